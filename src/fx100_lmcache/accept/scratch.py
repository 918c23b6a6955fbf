"""What the tests that write may destroy: named by the user, and nothing that is in use."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from fx100_lmcache.accept.steps import CannotRunError
from fx100_lmcache.config import Config
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.members.device import open_member
from fx100_lmcache.volume.format import contents_of
from fx100_lmcache.volume.opening import locate

MAX_SCRATCH = 16
_BLOCKS = Path("/sys/dev/block")


def check_scratch(config: Config, named: Sequence[Path]) -> tuple[Path, ...]:
    """Return what may be written to, after a look at each.

    Raises
    ------
    CannotRunError
        If one is a member of the volume, holds a volume of ours, is in use or mounted, or is
        neither a file nor a block device.
    """
    if len(named) > MAX_SCRATCH:
        raise CannotRunError(f"--destroy: at most {MAX_SCRATCH} may be named")
    members = [_key(path) for path in locate(config.volume.members) if isinstance(path, Path)]
    return tuple(_checked(path.absolute(), {*members} - {None}) for path in named)


def _checked(path: Path, members: set[tuple[str, int, int] | None]) -> Path:
    try:
        found = path.stat()
    except OSError as problem:
        raise CannotRunError(f"--destroy {path}: {problem.strerror}") from problem
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISBLK(found.st_mode)):
        raise CannotRunError(f"--destroy {path}: neither a file nor a block device")
    disks = {_disk_of(each) for each in members if each} - {None}
    if _key(path) in members or _disk(path) in disks:
        raise CannotRunError(f"--destroy {path}: it is a member of the volume")
    try:
        member = open_member(path, direct="off", exclusive=True)
    except (FX100Error, OSError) as problem:
        raise CannotRunError(f"--destroy {path}: it is in use: {problem}") from problem
    try:
        contents = contents_of(member)
    finally:
        member.close()
    if contents.kind == "volume":
        raise CannotRunError(
            f"--destroy {path}: it holds {contents.what}",
            remedy=f"if that volume is not wanted any more: wipefs --all {path}",
        )
    return path


def _key(path: Path) -> tuple[str, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    if stat.S_ISBLK(found.st_mode):
        return "device", os.major(found.st_rdev), os.minor(found.st_rdev)
    return "file", found.st_dev, found.st_ino


def _disk(path: Path) -> str | None:
    """Name the whole disk of a device or of a partition; None for a file."""
    key = _key(path)
    return _disk_of(key) if key else None


def _disk_of(key: tuple[str, int, int]) -> str | None:
    kind, major, minor = key
    if kind != "device":
        return None
    node = (_BLOCKS / f"{major}:{minor}").resolve()
    return node.parent.name if (node / "partition").exists() else node.name
