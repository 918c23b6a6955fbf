"""Direct I/O, proven by a write and a read where the format keeps nothing.

Opening with O_DIRECT proves little: there are file systems that take the flag and refuse the
first write, or go through the page cache all the same. A volume has at least one unit of I/O
between the end of a member's data area and the second copy of its label that belongs to nobody.
What stands there is read, overwritten with noise, read back, and written back.

Nothing is written unless all shards can be locked: a server that runs, here or on another host,
is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from fx100_lmcache.buffers import address_of, aligned_buffer
from fx100_lmcache.config import Config
from fx100_lmcache.errors import ClaimError, FX100Error
from fx100_lmcache.findings import Finding, note, ok, problem, warning
from fx100_lmcache.members.base import Member, read_whole
from fx100_lmcache.members.device import DeviceMember
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES, Geometry, round_up
from fx100_lmcache.volume.claim import decided_by_locks, newest_claim, read_claims
from fx100_lmcache.volume.machine import this_machine
from fx100_lmcache.volume.opening import open_members
from fx100_lmcache.volume.volume import Volume, assemble

_NOT_PROVEN = "it may still fail when the server writes for the first time"


def scratch_offset(geometry: Geometry, member: int) -> int | None:
    """Return where one unit of I/O belongs to nobody, or None if there is no room for one.

    Only a device whose size is no multiple of 4,096 bytes can be without.
    """
    blocks = geometry.shard_blocks(member, geometry.shards - 1).stop
    start = round_up(geometry.block_offset(member, blocks), geometry.io_align_bytes)
    fits = start + geometry.io_align_bytes <= geometry.label_copy_offset(member)
    return start if fits else None


def prove_io(config: Config, *, exclusive: bool) -> list[Finding]:
    """Write and read one unit of I/O on every member.

    Parameters
    ----------
    exclusive : bool
        Open block devices as `lmcache server` does, which mounted ones and members of md or LVM
        refuse.
    """
    try:
        members = open_members(config, exclusive=exclusive)
    except ClaimError as error:
        return [note("I/O", f"not proven by a write: {error}", _NOT_PROVEN)]
    except FX100Error as error:
        return [problem("I/O", str(error), "the volume does not open", "fx100 status CONFIG")]
    with contextlib.ExitStack() as opened:
        for member in members:
            opened.callback(member.close)
        try:
            volume = assemble(members)
            owner = _owner(volume)
        except (FX100Error, OSError):
            return []  # told already, by those who look at labels and claims
        if owner:
            what = f"not proven by a write: the volume is in use by {owner}"
            return [note("I/O", what, _NOT_PROVEN, "stop that, then: fx100 doctor CONFIG")]
        return [
            finding
            for index, member in enumerate(volume.members)
            for finding in _prove(member, scratch_offset(volume.geometry, index), volume.geometry)
        ]


def _owner(volume: Volume) -> str:
    """Lock all shards without claiming them; return who has one, empty if nobody does."""
    geometry, machine = volume.geometry, this_machine()
    for shard in range(geometry.shards):
        start = geometry.claim_offset(shard, 0)
        locked = all(member.try_lock(start, 2 * CLAIM_BYTES) for member in volume.members)
        claim = newest_claim(read_claims(volume.members, geometry, shard), volume.uuid, shard)
        holder = claim.holder if claim else ""
        if not locked:
            return holder or "an unknown process"
        if claim and holder and not decided_by_locks(claim, machine, volume.members):
            return holder
    return ""


def _prove(member: Member, offset: int | None, geometry: Geometry) -> Iterator[Finding]:
    size = geometry.io_align_bytes
    if offset is None:
        yield note(
            member.name,
            "not proven by a write: no room between its data and the copy of its label",
            _NOT_PROVEN,
        )
        return
    try:
        came_back = _write_and_read(member, offset, size)
    except OSError as error:
        yield problem(
            member.name,
            f"opened for {member.io_mode} I/O, but {size} bytes cannot be written and read back: "
            f"{error.strerror or error}",
            "every store would fail, or every load, behind a healthy server",
            "dmesg | tail; move a file to ext4 or XFS; io.direct: off shows whether that is it",
        )
        return
    if not came_back:
        yield problem(
            member.name,
            f"{size} bytes were written, and others read back",
            "the device loses or mixes up data; every load would be a miss",
            f"nvme smart-log {member.name}; replace it",
        )
        return
    yield ok(member.name, f"{member.io_mode} I/O proven by writing and reading {size} bytes")
    yield from _really_direct(member, offset, size)


def _write_and_read(member: Member, offset: int, size: int) -> bool:
    """Write noise and read it back; what stood there before is put back in any case."""
    noise = os.urandom(size)
    with aligned_buffer(size) as before, aligned_buffer(size) as view:
        read_whole(member, offset, before)
        try:
            view[:] = noise
            _write(member, offset, view)
            view[:] = bytes(size)
            read_whole(member, offset, view)
            return bytes(view) == noise
        finally:
            _write(member, offset, before)


def _write(member: Member, offset: int, view: memoryview) -> None:
    moved = member.write_from(offset, view)
    if moved != len(view):
        raise OSError(f"{moved} of {len(view)} bytes were written")


def _really_direct(member: Member, offset: int, size: int) -> Iterator[Finding]:
    """Look at the flag of the descriptor, and into the page cache."""
    fd = member.fileno()
    if member.io_mode != "direct" or fd is None or not isinstance(member, DeviceMember):
        return
    flag = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    if flag and not _is_cached(Path(member.name), offset, size):
        return
    yield warning(
        member.name,
        "takes the flag for direct I/O, and goes through the page cache all the same",
        "slower, and the page cache grows until it takes memory from others",
        "move it to ext4 (without data=journal) or XFS",
    )


def _is_cached(path: Path, offset: int, size: int) -> bool:
    """Whether the page cache holds bytes that were only ever moved directly.

    The kernel is asked with mincore, not with a read that must not wait (RWF_NOWAIT): such a read
    is begun all the same, and on a fast device it may be done before the kernel looks.
    """
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset + size - start
    resident = (ctypes.c_ubyte * (round_up(length, mmap.PAGESIZE) // mmap.PAGESIZE))()
    with path.open("rb") as file:
        try:
            pages = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
        except OSError:  # a file system without mappings: the kernel does not tell
            return False
        with pages:
            address = ctypes.c_void_p(address_of(pages))
            failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(length), resident)
    return not failed and any(page & 1 for page in resident)
