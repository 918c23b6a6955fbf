"""How much of a member the storage below really has: sparse files, thin devices."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from fx100_lmcache.members.base import Member

_UNIT_BYTES = 512  # of st_blocks, whatever the file system's blocks are
SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the storage below says of a member.

    Attributes
    ----------
    allocated_bytes : int or None
        What is really there; None where nobody says.
    thin : bool
        Space is promised that may not be there when it is written.
    """

    allocated_bytes: int | None
    thin: bool


UNKNOWN = Allocation(None, False)


def allocation_of(member: Member, sysfs: Path = SYSFS) -> Allocation:
    """Find out how much of a member is really there.

    A file's blocks are known. Of a device it is known for a loop device (those of its file) and
    for an NVMe namespace whose utilisation the kernel shows (from 6.8 on); a local drive counts
    there what was not trimmed, so a low one is no sign of a thin namespace. SCSI disks say
    whether they are thin.
    """
    fd = member.fileno()
    if fd is None:
        return UNKNOWN
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode):
            return _of_file(found, member.size_bytes)
        number = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
        return _of_device(sysfs / "dev" / "block" / number, member.size_bytes)
    except OSError:
        return UNKNOWN


def _of_file(found: os.stat_result, size_bytes: int) -> Allocation:
    there = min(size_bytes, found.st_blocks * _UNIT_BYTES)
    return Allocation(there, there < size_bytes)


def _of_device(device: Path, size_bytes: int) -> Allocation:
    backing = _text(device / "loop" / "backing_file")
    if backing:
        return _of_file(Path(backing).stat(), size_bytes)
    if any(_text(said) == "1" for said in device.glob("device/scsi_disk/*/thin_provisioning")):
        return Allocation(None, True)
    used, block = _text(device / "nuse"), _text(device / "queue" / "logical_block_size")
    if used.isdigit() and block.isdigit():
        return Allocation(min(size_bytes, int(used) * int(block)), False)
    return UNKNOWN


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
