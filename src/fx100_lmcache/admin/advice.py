"""What is wrong with a volume, for an operator: what, why it matters, what to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from fx100_lmcache.config import ConfigError
from fx100_lmcache.errors import (
    ClaimError,
    DuplicateMemberError,
    FX100Error,
    InterruptedFormatError,
    MemberOpenError,
    MemberSizeError,
    MissingMemberError,
    NotFormattedError,
    SectorSizeError,
    UnsupportedVersionError,
    WrongVolumeError,
)
from fx100_lmcache.findings import Finding, problem, warning
from fx100_lmcache.members.base import Member
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.ondisk.geometry import LABEL_BYTES

SUBJECT = "volume"

# the first class that fits
_WHY: tuple[tuple[type[Exception], str], ...] = (
    (ConfigError, "without a configuration nothing can be opened"),
    (NvmeError, "the namespace cannot be found, so its share of every object cannot be read"),
    (
        MissingMemberError,
        "objects are striped over all members: without one of them the volume does not open",
    ),
    (DuplicateMemberError, "two writers to one place would destroy each other's data"),
    (WrongVolumeError, "members of different volumes hold parts of different objects"),
    (
        NotFormattedError,
        "without a label nothing tells which part of the volume the member holds",
    ),
    (
        InterruptedFormatError,
        "the members hold parts of two volumes, neither of which is whole",
    ),
    (UnsupportedVersionError, "this package cannot know where that format keeps its data"),
    (MemberSizeError, "data and the second label copy lay beyond the present end"),
    (SectorSizeError, "the device refuses transfers as small as the volume needs"),
    (ClaimError, "a volume that is being formatted cannot be read"),
    (MemberOpenError, "its share of every object cannot be read or written"),
    (Exception, "the volume does not open"),
)

# what to do about errors that do not say: the first class that fits
_DO: tuple[tuple[type[Exception], str], ...] = (
    (ConfigError, "correct the file"),
    (NvmeError, "fx100 nvme connect CONFIG"),
    (Exception, "dmesg | tail; check the device"),
)


def problem_of(error: FX100Error | OSError, config: Path, member: str | None = None) -> Finding:
    """Turn an error into a finding: what to do is the error's own remedy, if it has one."""
    why = next(why for kind, why in _WHY if isinstance(error, kind))
    do = next(do for kind, do in _DO if isinstance(error, kind))
    what = str(error)
    if isinstance(error, FX100Error):
        what, do = error.what, error.remedy or do
    do = f"{do}; then: fx100 status CONFIG".replace("CONFIG", str(config))
    return problem(SUBJECT, what, why, do, member)


def damaged_label(member: Member, label_size_bytes: int, front_is_good: bool) -> Finding:
    """Describe a member with one unreadable label copy, and how the good one mends it.

    Parameters
    ----------
    label_size_bytes : int
        Size of the member as its label says.
    front_is_good : bool
        Which copy is the good one.
    """
    last = label_size_bytes // LABEL_BYTES - 1
    source, target = (0, last) if front_is_good else (last, 0)
    where, name = "end" if front_is_good else "start", shlex.quote(member.name)
    return problem(
        SUBJECT,
        f"{member.name}: the label copy at its {where} is damaged",
        "the volume works, but if the other copy is lost too, all data is",
        f"dd if={name} of={name} bs={LABEL_BYTES} count=1 skip={source} "
        f"seek={target} conv=notrunc,fsync",
        member.name,
    )


def lost_path(device: str | None, path: str, state: str, config: Path) -> Finding:
    """Describe a path to a namespace that carries no I/O."""
    return warning(
        SUBJECT,
        f"{device}: path {path} is {state}",
        "only other paths can serve its reads and writes; without any they fail",
        f"fx100 nvme check {config}",
        device,
    )


def shape_warnings(
    member: Member, label_size_bytes: int, wanted_direct: str, config: Path
) -> Iterator[Finding]:
    """Yield what works but not as well as it could."""
    if member.io_mode != "direct" and wanted_direct == "prefer":
        yield warning(
            SUBJECT,
            f"{member.name}: direct I/O does not work here",
            "everything goes through the page cache: slower, and it takes memory from others",
            "move it to ext4 or XFS, or set io.direct: require to refuse such a start",
            member.name,
        )
    if member.size_bytes > label_size_bytes:
        yield warning(
            SUBJECT,
            f"{member.name}: grew from {label_size_bytes} to {member.size_bytes} bytes",
            "the volume works as before, but does not use the new space",
            f"when the cache may be lost: fx100 format {config}",
            member.name,
        )


def thin_member(member: Member, there: int | None, label_size_bytes: int, config: Path) -> Finding:
    """Describe a member that promises more space than may be there when it is written.

    Parameters
    ----------
    there : int or None
        Bytes that are allocated, where known.
    label_size_bytes : int
        Size of the member as its label says.
    """
    if there is None:
        what = f"{member.name}: thinly provisioned"
    else:
        what = f"{member.name}: sparse, {there} of its {label_size_bytes} bytes are allocated"
    return warning(
        SUBJECT,
        what,
        "when the storage below is full, only what was written before can be written again",
        f"see to it that there is room below; when the cache may be lost: fx100 format --allocate "
        f"{config}",
        member.name,
    )


def few_inodes(
    entries: int, slots: int, free_share: float, mean_bytes: int, object_bytes: int, do_bytes: int
) -> Finding:
    """Describe a volume whose objects are smaller than it was laid out for.

    Parameters
    ----------
    do_bytes : int
        What ``volume.bytes_per_inode`` should be.
    """
    return warning(
        SUBJECT,
        f"inodes are the limit: {entries:,} of {slots:,} used while {free_share:.0%} of the space "
        "is free",
        f"objects have {mean_bytes:,} bytes on average, smaller than planned (volume.object is "
        f"{object_bytes:,}), so the oldest go before the space is used",
        f"when the cache may be lost, format with volume.bytes_per_inode: {do_bytes}",
    )
