"""Could this process connect a path? Asked at the start, not when the first one is lost."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fx100_lmcache.config.nvme import NvmeConfig
from fx100_lmcache.nvmf.connect import ETC_NVME, host_identity
from fx100_lmcache.nvmf.errors import HostIdentityError
from fx100_lmcache.nvmf.fabrics import FABRICS_DEVICE


@dataclass(frozen=True)
class Obstacle:
    """One reason why this process cannot connect, and what to do about it."""

    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.what} (do: {self.do})"


async def obstacles(
    nvme: NvmeConfig,
    device: Path = FABRICS_DEVICE,
    sysfs: Path = Path("/sys"),
    etc: Path = ETC_NVME,
    search_path: str | None = None,
) -> list[Obstacle]:
    """Return why this process could not connect the configured subsystems; empty if it could.

    Nothing is connected: the device is opened and closed again.

    Parameters
    ----------
    device, sysfs, etc : Path
        What connecting needs; others in tests.
    search_path : str or None
        Where the ``nvme`` program is looked for; by default ``PATH``.
    """
    found = [_device(nvme, device), _sysfs(sysfs), _program(nvme, search_path)]
    try:
        await host_identity(nvme.host_nqn, nvme.host_id, etc)
    except HostIdentityError as error:
        found.append(Obstacle(error.what, error.remedy or ""))
    return [each for each in found if each is not None]


def _device(nvme: NvmeConfig, device: Path) -> Obstacle | None:
    # the kernel asks for no capability; whoever may open the device may connect
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        transports = " ".join(sorted({f"nvme-{each.transport}" for each in nvme.subsystems}))
        return Obstacle(
            f"{device} is missing",
            f"modprobe -a {transports}; in a container: --device {device}",
        )
    except OSError as error:
        return Obstacle(
            f"{device} cannot be opened ({error.strerror})",
            f"run as root; in a container also: --device {device}",
        )
    return None


def _sysfs(sysfs: Path) -> Obstacle | None:
    try:
        read_only = bool(os.statvfs(sysfs).f_flag & os.ST_RDONLY)
    except OSError:
        read_only = True
    if not read_only:
        return None
    return Obstacle(
        f"{sysfs} cannot be written to, so that time-outs of new paths stay the kernel's",
        f"in a container, mount it writable: -v {sysfs}:{sysfs}:rw",
    )


def _program(nvme: NvmeConfig, search_path: str | None) -> Obstacle | None:
    needed = any(each.dhchap_secret_file is None for each in nvme.subsystems)
    if not needed or shutil.which("nvme", path=search_path):
        return None
    return Obstacle("the program nvme is not installed", "apt install nvme-cli (dnf, zypper)")
