"""sysfs -> snapshot. Names are never computed: directories are followed, attributes are read."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import aiofiles
import aiofiles.os

from fx100_lmcache.nvmf.address import parse_address
from fx100_lmcache.nvmf.errors import IdentityError, SettingError
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.snapshot import (
    NEVER,
    Controller,
    Namespace,
    NamespacePath,
    Snapshot,
    Subsystem,
)

SECTOR_BYTES = 512
"""Unit of the attribute ``size``, whatever the logical block size is."""
MAX_ATTRIBUTE_BYTES = 4096
"""sysfs never shows more than one page."""

Setting = Literal["fast_io_fail_tmo", "ctrl_loss_tmo", "reconnect_delay"]
"""The settings of a connected controller that may be changed, by their sysfs names."""

_CONTROLLER = (
    "transport", "address", "state", "hostnqn", "hostid", "queue_count", "sqsize", "kato",
    "reconnect_delay", "ctrl_loss_tmo", "fast_io_fail_tmo",
)  # fmt: skip
_BLOCK = (
    "nsid", "size", "hidden", "nguid", "eui", "uuid", "wwid", "dev", "uevent",
    "queue/logical_block_size", "queue/max_hw_sectors_kb", "queue/max_sectors_kb",
    "queue/scheduler", "ana_state",
)  # fmt: skip
_Attributes = dict[str, str]


class Sysfs:
    """Reads NVMe's part of a sysfs tree.

    Parameters
    ----------
    root : Path
        Where sysfs is mounted; another directory in tests.
    """

    def __init__(self, root: Path = Path("/sys")) -> None:
        self.root = root

    async def snapshot(self) -> Snapshot:
        """Read all subsystems, controllers and namespaces.

        A device that goes away meanwhile is left out or shows None; that is no error. Without an
        NVMe driver the snapshot is empty.
        """
        base = self.root / "class" / "nvme-subsystem"
        names = await _listed(base)
        found = await asyncio.gather(*(_subsystem(base / name) for name in names))
        return Snapshot(tuple(subsystem for subsystem in found if subsystem is not None))

    async def write(self, controller: str, setting: Setting, value: int) -> None:
        """Change a time-out of a connected controller.

        Parameters
        ----------
        controller : str
            The kernel's name, e.g. ``nvme0``.
        setting : Setting
            The sysfs file.
        value : int
            Seconds; `NEVER` switches the time-out off.

        Raises
        ------
        SettingError
            If the file is missing, read-only for us, or the kernel refuses the value.
        """
        path = self.root / "class" / "nvme" / controller / setting
        try:
            async with aiofiles.open(path, "w", opener=_open_existing) as file:
                await file.write(f"{value}\n")
        except OSError as error:
            raise SettingError(
                f"cannot write {value} to {path}: {error.strerror}", remedy=_setting_remedy(error)
            ) from error


def _open_existing(path: str, flags: int) -> int:
    # With O_CREAT a missing file of sysfs is a matter of permission, which misleads.
    return os.open(path, flags & ~os.O_CREAT)


def _setting_remedy(error: OSError) -> str:
    return {
        errno.ENOENT: "the controller is gone, or this kernel or transport lacks the setting",
        errno.EACCES: "run as root",
        errno.EPERM: "run as root",
        errno.EROFS: "sysfs is read-only here: run outside the container, or mount it rw",
        errno.EINVAL: "the kernel refuses this value: see its log (dmesg)",
    }.get(error.errno or 0, "see the kernel log (dmesg)")


@aiofiles.os.wrap
def _listed(directory: Path) -> list[str]:
    """Return the names of the directories in `directory`; attributes are files and left out."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []


@aiofiles.os.wrap
def _attributes(directory: Path, names: Iterable[str]) -> _Attributes:
    """Read some attributes; all in one go, since each hop to another thread costs more."""
    found = ((name, _attribute(directory / name)) for name in names)
    return {name: value for name, value in found if value is not None}


def _attribute(path: Path) -> str | None:
    # A vanished device gives ENOENT or ENODEV, a namespace without size EINVAL: all mean absent.
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_ATTRIBUTE_BYTES).strip()
    except OSError:
        return None


async def _subsystem(directory: Path) -> Subsystem | None:
    about = await _attributes(directory, ("subsysnqn", "iopolicy", "model", "serial"))
    if "subsysnqn" not in about:
        return None
    nqn = about["subsysnqn"]
    controllers: list[Controller] = []
    blocks = await _blocks(directory)
    hidden: list[tuple[str, str, _Attributes]] = []
    for name in await _listed(directory):
        found = await _attributes(directory / name, _CONTROLLER)
        if not found.keys() >= {"transport", "state"}:
            continue
        controllers.append(_controller(name, nqn, found))
        for path_name, block in (await _blocks(directory / name)).items():
            if block.get("hidden") == "1":
                hidden.append((name, path_name, block))
            else:
                blocks[path_name] = block | {"controller": name}
    namespaces = [_namespace(name, nqn, block, hidden) for name, block in blocks.items()]
    return Subsystem(
        directory.name,
        nqn,
        about.get("iopolicy"),
        about.get("model"),
        about.get("serial"),
        tuple(controllers),
        tuple(namespace for namespace in namespaces if namespace is not None),
    )


async def _blocks(directory: Path) -> dict[str, _Attributes]:
    """Read the block devices right below `directory`, hidden ones too."""
    found = {}
    for name in await _listed(directory):
        # Character devices (ng0n1) may have an nsid as well, but neither size nor queue.
        attributes = await _attributes(directory / name, _BLOCK)
        if attributes.keys() >= {"nsid", "size", "queue/logical_block_size"}:
            found[name] = attributes
    return found


def _controller(name: str, nqn: str, found: _Attributes) -> Controller:
    queues, size = _number(found.get("queue_count")), _number(found.get("sqsize"))
    return Controller(
        name=name,
        subsystem_nqn=nqn,
        transport=found["transport"],
        address=parse_address(found.get("address", "")),
        state=found["state"],
        host_nqn=found.get("hostnqn"),
        host_id=found.get("hostid"),
        io_queues=None if queues is None else max(queues - 1, 0),
        queue_size=None if size is None else size + 1,
        keep_alive_s=_number(found.get("kato")),
        reconnect_delay_s=_time_out(found.get("reconnect_delay")),
        ctrl_loss_timeout_s=_time_out(found.get("ctrl_loss_tmo")),
        fast_io_fail_s=_time_out(found.get("fast_io_fail_tmo")),
    )


def _namespace(
    name: str, nqn: str, block: _Attributes, hidden: list[tuple[str, str, _Attributes]]
) -> Namespace | None:
    identity = _identity(nqn, block)
    if block.get("hidden") == "1" or identity is None:
        return None
    if "controller" in block:
        paths = [_path(name, block["controller"], block)]
    else:
        mine = (each for each in hidden if _identity(nqn, each[2]) == identity)
        paths = [_path(path, controller, attributes) for controller, path, attributes in mine]
    return Namespace(
        name=name,
        device=f"/dev/{_device_name(block.get('uevent', '')) or name}",
        device_number=block.get("dev", ""),
        identity=identity,
        size_bytes=(_number(block["size"]) or 0) * SECTOR_BYTES,
        lba_bytes=_number(block["queue/logical_block_size"]) or 0,
        max_hw_sectors_kb=_number(block.get("queue/max_hw_sectors_kb")),
        max_sectors_kb=_number(block.get("queue/max_sectors_kb")),
        wwid=block.get("wwid"),
        paths=tuple(paths),
    )


def _path(name: str, controller: str, block: _Attributes) -> NamespacePath:
    scheduler = block.get("queue/scheduler")
    return NamespacePath(name, controller, block.get("ana_state"), _selected(scheduler))


def _identity(nqn: str, block: _Attributes) -> NamespaceIdentity | None:
    # A read that crossed the device's removal may show anything; such a device is left out.
    with suppress(IdentityError):
        return NamespaceIdentity(
            subsystem_nqn=nqn,
            nsid=_number(block["nsid"]),
            nguid=block.get("nguid"),
            eui64=block.get("eui"),
            uuid=block.get("uuid"),
        )
    return None


def _device_name(uevent: str) -> str | None:
    lines = (line.partition("=") for line in uevent.splitlines())
    return next((value for key, _, value in lines if key == "DEVNAME" and value), None)


def _selected(scheduler: str | None) -> str | None:
    """Return the scheduler in force: ``[none] mq-deadline`` -> ``none``."""
    if not scheduler:
        return None
    return scheduler.partition("[")[2].partition("]")[0] or scheduler.split()[0]


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _time_out(text: str | None) -> int | None:
    return NEVER if text == "off" else _number(text)
