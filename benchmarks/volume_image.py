"""Volumes with many entries, written inode by inode: no data is moved to make a million of them."""

from collections.abc import Callable
from pathlib import Path

from fx100_lmcache.members.device import open_member
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope
from fx100_lmcache.ondisk.geometry import BLOCK_BYTES, MAX_FRAME_BLOCKS, Geometry, plan_geometry
from fx100_lmcache.ondisk.inode import InodePlace, pack_inode
from fx100_lmcache.ondisk.location import pack_location
from fx100_lmcache.volume.format import format_volume

MEMBERS = 4
PIECES = 8
OBJECT_BYTES = PIECES * MAX_FRAME_BLOCKS * BLOCK_BYTES
"""Full chunks: every piece is a whole frame."""
SCOPE = Scope("mp", "benchmark/model", 1)
_BATCH = 1024


def digest_of(number: int) -> bytes:
    """Name an entry by number."""
    return SCOPE.digest(number.to_bytes(32, "little"))


def write_image(home: Path, entries: int, progress: Callable[[int], None]) -> list[Path]:
    """Write a volume of sparse files whose tables hold so many entries of eight pieces each."""
    slots = -(-entries // MEMBERS)
    paths = [home / f"member-{number}" for number in range(MEMBERS)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(round((slots * 1.05 + 64) * OBJECT_BYTES) // 4096 * 4096)
    members = [open_member(path) for path in paths]
    geometry = plan_geometry(
        [m.size_bytes for m in members],
        object_bytes=OBJECT_BYTES,
        bytes_per_inode=OBJECT_BYTES,
        io_align_bytes=max(m.logical_block_bytes for m in members),
    )
    volume = format_volume(members, geometry, unix_s=1)
    meta = ChunkMeta(SCOPE, Layout("bytes", (("uint8", (OBJECT_BYTES,)),))).pack()
    share = PIECES // MEMBERS
    for member, path in enumerate(paths):
        with path.open("r+b") as file:
            file.seek(geometry.slot_offset(member, 0, 0))
            for start in range(0, slots, _BATCH):
                batch = range(start, min(start + _BATCH, slots))
                file.write(
                    b"".join(
                        _inode(InodePlace(volume.uuid, 0, member, slot), geometry, meta, share)
                        for slot in batch
                    )
                )
                progress(len(batch))
    for opened in members:
        opened.close()
    return paths


def _inode(place: InodePlace, geometry: Geometry, meta: bytes, share: int) -> bytes:
    number = place.slot * MEMBERS + place.member
    pieces = [
        (pack_location(m, (number * share + part) * MAX_FRAME_BLOCKS, MAX_FRAME_BLOCKS), number)
        for m in range(MEMBERS)
        for part in range(share)
    ]
    return pack_inode(
        place,
        inode_bytes=geometry.inode_bytes,
        generation=1,
        order=(1, number + 1),
        digest=digest_of(number),
        length=OBJECT_BYTES,
        pieces=pieces,
        meta=meta,
    )
