"""Making a new volume: what is there, what would be lost, and how it is written."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fx100_lmcache.buffers import aligned_buffer
from fx100_lmcache.config import Config
from fx100_lmcache.errors import (
    ForeignDataError,
    MemberOpenError,
    RecordError,
    SectorSizeError,
    UnsupportedVersionError,
)
from fx100_lmcache.members.allocation import Allocation, allocation_of
from fx100_lmcache.members.base import Member
from fx100_lmcache.members.device import DeviceMember, create_file, write_through
from fx100_lmcache.ondisk.geometry import LABEL_BYTES, Geometry, label_copy_offset, plan_geometry
from fx100_lmcache.ondisk.label import Label, is_label, unpack_label
from fx100_lmcache.volume.opening import (
    member_paths,
    open_to_format,
    refuse_dev,
    silent_devices,
    silent_error,
)
from fx100_lmcache.volume.volume import Volume, assemble, read_at

_CHECKED_BYTES = 1024 * 1024  # at each end of a device, before it is formatted

# (offset, bytes, what it is): signatures named to the operator who is about to lose the data
_SIGNATURES = (
    (0x438, b"\x53\xef", "an ext2/3/4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x10040, b"_BHRfS_M", "a btrfs file system"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (512, b"LABELONE", "an LVM physical volume"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "a Linux md member"),
    (0, b"LUKS\xba\xbe", "a LUKS container"),
    (4086, b"SWAPSPACE2", "swap space"),
    (510, b"\x55\xaa", "an MBR partition table or boot sector"),
)


@dataclass(frozen=True)
class Contents:
    """What a format would destroy.

    Attributes
    ----------
    kind : {"nothing", "volume", "foreign"}
        Both ends zero; a volume of ours; anything else.
    what : str
        In words; empty for nothing.
    """

    kind: Literal["nothing", "volume", "foreign"]
    what: str = ""


def contents_of(member: Member) -> Contents:
    """Look at a member's first and last MiB, and say what it holds."""
    size = min(_CHECKED_BYTES, member.size_bytes // LABEL_BYTES * LABEL_BYTES)
    if not size:
        return Contents("nothing")
    front = read_at(member, 0, size)
    back = read_at(member, label_copy_offset(member.size_bytes) + LABEL_BYTES - size, size)
    ours = [block for block in (front[:LABEL_BYTES], back[-LABEL_BYTES:]) if is_label(block)]
    for block in ours:
        try:
            label = unpack_label(block)
        except UnsupportedVersionError as problem:
            return Contents("foreign", f"a volume of a newer format ({problem})")
        except RecordError:
            continue
        made = time.strftime("%Y-%m-%d", time.gmtime(label.created_unix_s))
        return Contents("volume", f"member {label.index} of volume {label.volume}, made {made}")
    if ours:
        return Contents("volume", "a damaged label of ours")
    if not any(front) and not any(back):
        return Contents("nothing")
    known = (name for at, mark, name in _SIGNATURES if front[at : at + len(mark)] == mark)
    return Contents("foreign", next(known, "data of an unknown kind"))


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """What `format` is about to do.

    Attributes
    ----------
    create : tuple of (path, bytes)
        Files that do not exist yet.
    members : tuple of (name, bytes, logical block size)
        In stripe order, including those to be created.
    contents : tuple of Contents
        What each member holds now.
    allocations : tuple of Allocation
        What the storage below really has of each; a file to be created will be all there.
    """

    create: tuple[tuple[Path, int], ...]
    members: tuple[tuple[str, int, int], ...]
    geometry: Geometry
    contents: tuple[Contents, ...]
    allocations: tuple[Allocation, ...]


def plan_format(config: Config, *, allocate: bool = False) -> FormatPlan:
    """Work out a new volume without writing anything.

    Parameters
    ----------
    allocate : bool
        All of every member is to be written, so there must be room for it.

    Raises
    ------
    VolumeError
        If a member is too small, or cannot be opened.
    MemberOpenError
        If a file system has no room for what is to be written.
    ClaimError
        If a member is in use.
    """
    create, described, contents, allocations = [], [], [], []
    room: list[tuple[Path, int]] = []
    paths = member_paths(config)
    for path in silent_devices(paths):
        raise silent_error(path)
    with contextlib.ExitStack() as opened:
        for path, member in zip(paths, config.volume.members, strict=True):
            if not path.exists() and member.size_bytes is not None:
                refuse_dev(path)
                create.append((path, member.size_bytes))
                described.append((str(path), member.size_bytes, 512))
                contents.append(Contents("nothing"))
                allocations.append(Allocation(member.size_bytes, thin=False))
                room.append((path, member.size_bytes))
                continue
            device = open_to_format(config, path)
            opened.callback(device.close)
            described.append(_describe(device))
            contents.append(contents_of(device))
            allocations.append(allocation_of(device))
            there = allocations[-1].allocated_bytes
            if allocate and path.is_file() and there is not None:
                room.append((path, device.size_bytes - there))
    _check_room(room)
    return FormatPlan(
        tuple(create),
        tuple(described),
        _geometry(config, described),
        tuple(contents),
        tuple(allocations),
    )


def _describe(member: DeviceMember) -> tuple[str, int, int]:
    return member.name, member.size_bytes, member.logical_block_bytes


def _geometry(config: Config, described: Sequence[tuple[str, int, int]]) -> Geometry:
    align = max(block for _, _, block in described)
    if align > 4096:
        raise SectorSizeError(
            f"logical blocks of {align} bytes; at most 4096 are supported",
            remedy="format the namespaces with an LBA format of 4096 bytes or less",
        )
    return plan_geometry(
        [size for _, size, _ in described],
        object_bytes=config.volume.object_bytes,
        shards=config.volume.shards,
        inode_bytes=config.volume.inode_bytes,
        bytes_per_inode=config.volume.bytes_per_inode,
        io_align_bytes=align,
        names=[name for name, _, _ in described],
    )


def _check_room(room: Sequence[tuple[Path, int]]) -> None:
    """Raise if the file systems of some files lack the bytes that each still needs."""
    wanted: dict[int, tuple[Path, int]] = {}
    for path, size in room:
        home = path.parent
        while not home.exists():
            home = home.parent
        device = home.stat().st_dev
        wanted[device] = (home, wanted.get(device, (home, 0))[1] + size)
    for home, size in wanted.values():
        stat = os.statvfs(home)
        free = stat.f_bavail * stat.f_frsize
        if size > free:
            raise MemberOpenError(
                f"{home} has {free} bytes free, the members need {size}; nothing was "
                "created or written",
                remedy="free some space or make `volume.members[].size` smaller",
            )


def format_members(
    config: Config,
    plan: FormatPlan,
    *,
    force: bool = False,
    allocate: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Volume:
    """Create missing files and write the volume; the caller closes the members.

    Parameters
    ----------
    allocate : bool
        Write zeros over all of what is there already, before anything else.
    progress : callable or None
        Called with the number of zeros just written.

    Raises
    ------
    ForeignDataError
        If a member holds something else; nothing was written then.
    ClaimError
        If the volume that is there is in use.
    """
    paths = member_paths(config)
    new = dict(plan.create)
    with contextlib.ExitStack() as undo:
        opened = {}
        for path in paths:
            if path not in new:
                opened[path] = open_to_format(config, path)
                undo.callback(opened[path].close)
                check_formattable(opened[path], force=force)
        for path, size in plan.create:
            create_file(path, size, progress)
            undo.callback(path.unlink, missing_ok=True)
            opened[path] = open_to_format(config, path)
            undo.callback(opened[path].close)
        for path in paths if allocate else ():
            if path not in new:
                write_through(opened[path], progress)
        members = [opened[path] for path in paths]
        # anew, since a new file may need larger blocks than were planned for
        geometry = _geometry(config, [_describe(member) for member in members])
        format_volume(members, geometry, unix_s=int(time.time()))
        volume = assemble(members)  # read back: two names of one device show now at the latest
        undo.pop_all()
    return volume


def check_formattable(member: Member, *, force: bool = False) -> None:
    """Refuse a device whose ends hold data that is not ours.

    Raises
    ------
    ForeignDataError
        Naming what was recognised.
    """
    if not force:
        refuse_foreign(member.name, contents_of(member))


def refuse_foreign(name: str, contents: Contents) -> None:
    """Raise ForeignDataError if a member holds what is not ours."""
    if contents.kind == "foreign":
        raise ForeignDataError(
            f"{name} holds {contents.what}; nothing was written",
            remedy="if it may be destroyed, wipe it (`wipefs -a`, `blkdiscard`) or use --force",
        )


def format_volume(
    members: Sequence[Member], geometry: Geometry, *, unix_s: int, volume: uuid.UUID | None = None
) -> Volume:
    """Write a new volume over the members; call :func:`check_formattable` first.

    The new label goes to the end first, then the old one and the claims go, then the new label
    comes to the front, with a flush after each: wherever that is interrupted, the two copies
    disagree, and one of them shows that the member is ours and may be formatted again. Inode
    tables need no erasing: inodes of another volume do not count.
    """
    name = volume or uuid.uuid4()
    labels = [Label(name, index, unix_s, geometry) for index in range(len(members))]
    for index, member in enumerate(members):
        _write(member, geometry.label_copy_offset(index), labels[index].pack())
    _flush(members)
    for member in members:
        _write(member, 0, bytes(geometry.table_offset))  # the label and the claims
    _flush(members)
    for index, member in enumerate(members):
        _write(member, 0, labels[index].pack())
    _flush(members)
    return Volume(labels[0], tuple(members))


def _write(member: Member, offset: int, data: bytes) -> None:
    with aligned_buffer(len(data)) as view:
        view[:] = data
        if member.write_from(offset, view) != len(data):
            raise OSError(f"{member.name}: short write at {offset}")


def _flush(members: Sequence[Member]) -> None:
    for member in members:
        member.flush()
