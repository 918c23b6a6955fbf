"""A sysfs tree in a folder, as the kernel makes it with native multipath."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

HOST_ID = "f0100000-1ab0-4000-8000-000000000001"
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"
NQN = "nqn.2024-01.io.fx100:array"


class FakeSysfs:
    """Writes attributes; nothing of it is read back here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.subsystems = root / "class" / "nvme-subsystem"
        self.controllers = root / "class" / "nvme"
        for folder in (self.subsystems, self.controllers):
            folder.mkdir(parents=True)

    def subsystem(self, name: str = "nvme-subsys0", nqn: str = NQN, **attributes: str) -> Path:
        about = {"subsysnqn": nqn, "iopolicy": "round-robin", "model": "fx100", "serial": "s1"}
        return write(self.subsystems / name, about | attributes)

    def controller(
        self, name: str = "nvme0", subsystem: str = "nvme-subsys0", **attributes: str
    ) -> Path:
        """Make a tcp controller whose time-outs are as they should be."""
        folder = write(
            self.controllers / name,
            {
                "transport": "tcp",
                "address": "traddr=10.0.0.1,trsvcid=4420,src_addr=10.0.0.9",
                "state": "live",
                "hostnqn": HOST_NQN,
                "hostid": HOST_ID,
                "queue_count": "9",
                "sqsize": "127",
                "kato": "5",
                "reconnect_delay": "2",
                "ctrl_loss_tmo": "600",
                "fast_io_fail_tmo": "2",
            }
            | attributes,
        )
        (self.subsystems / subsystem / name).symlink_to(folder)
        return folder

    def head(self, name: str, nsid: int, subsystem: str = "nvme-subsys0", **given: str) -> Path:
        """Make the node that may be opened."""
        return write(self.subsystems / subsystem / name, block(name, nsid) | given)

    def path(self, name: str, nsid: int, controller: str, **given: str) -> Path:
        """Make a controller's hidden node."""
        attributes = block(name, nsid) | {
            "hidden": "1",
            "uevent": "DEVTYPE=disk",
            "ana_state": "optimized",
            "queue/scheduler": "[none] mq-deadline",
        }
        return write(self.controllers / controller / name, attributes | given)


def block(name: str, nsid: int) -> dict[str, str]:
    return {
        "nsid": str(nsid),
        "size": "131072",
        "hidden": "0",
        "uuid": f"00000000-0000-4000-8000-{nsid:012d}",
        "wwid": f"uuid.00000000-0000-4000-8000-{nsid:012d}",
        "dev": f"259:{nsid}",
        "uevent": f"MAJOR=259\nMINOR={nsid}\nDEVNAME={name}\nDEVTYPE=disk",
        "queue/logical_block_size": "512",
        "queue/max_hw_sectors_kb": "2048",
        "queue/max_sectors_kb": "1280",
        "queue/scheduler": "none",
    }


def write(folder: Path, attributes: Mapping[str, str]) -> Path:
    for name, value in attributes.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    return folder
