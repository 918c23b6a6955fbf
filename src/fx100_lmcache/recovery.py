"""Recovery: read every inode table, keep what is valid, derive the rest.

Nothing but inodes is trusted. The newest inode wins a digest, and wins the blocks that it
claims; losers are reported so that they can be erased. Tables of different members are read at
the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fx100_lmcache.aligned import aligned_buffer
from fx100_lmcache.geometry import Geometry
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.inode import MAX_BLOCK, InodePlace, TableRows, parse_table
from fx100_lmcache.overlap import contested_entries, resolve

_READ_BYTES = 4 * 1024 * 1024

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


_COLUMNS = (
    *("rows", "words", "length", "blocks", "meta_ids", "members", "locations", "checksums"),
    *("counts", "shard", "generation"),
)


@dataclass(slots=True)
class Recovered:
    """All entries found, oldest first; arrays have one element (or row) for each."""

    rows: I64
    words: U64
    length: I64
    blocks: I64
    meta_ids: I64
    members: I64
    locations: U64
    checksums: U64
    counts: I64
    metas: list[bytes]
    shard: I64
    generation: I64
    generations: dict[int, int]
    """Generation in force for each shard."""
    newest_epoch: int
    """Highest epoch in any valid inode: the next writer must use a higher one."""
    stale_rows: list[int] = field(default_factory=list)
    """Slots of inodes that lost against newer ones: erase them."""
    torn: int = 0
    foreign: int = 0

    def __len__(self) -> int:
        return len(self.rows)


def recover(
    members: Sequence[Member], geometry: Geometry, volume: bytes, generations: dict[int, int]
) -> Recovered:
    """Rebuild the catalog of the given shards.

    Parameters
    ----------
    generations : dict of int to int
        Shard number to the generation that its claim says. Inodes of an older one do not count;
        one of a newer one proves that the claim block was lost in a power cut.

    Raises
    ------
    OSError
        If a table cannot be read.
    """

    def read_member(index: int) -> list[tuple[I64, TableRows]]:
        return [
            part
            for shard in generations
            for part in _read_table(members[index], geometry, volume, index, shard)
        ]

    if len(members) == 1 or members[0].fileno() is None:
        parts = [part for index in range(len(members)) for part in read_member(index)]
    else:
        with ThreadPoolExecutor(len(members), "fx100-recovery") as pool:
            parts = [p for found in pool.map(read_member, range(len(members))) for p in found]
    found = _join(parts, geometry)
    found.generations = {
        shard: max(generation, int(found.generation[found.shard == shard].max(initial=generation)))
        for shard, generation in generations.items()
    }
    return _choose(found, geometry)


def _read_table(
    member: Member, geometry: Geometry, volume: bytes, index: int, shard: int
) -> list[tuple[I64, TableRows]]:
    parts = []
    total = geometry.table_bytes(index)
    step = max(_READ_BYTES // geometry.inode_bytes, 1) * geometry.inode_bytes
    with aligned_buffer(min(step, total)) as buffer:
        for start in range(0, total, step):
            view = buffer[: min(step, total - start)]
            offset = geometry.slot_offset(index, shard, 0) + start
            if member.read_into(offset, view) != len(view):
                raise OSError(f"{member.name}: short read of the inode table at {offset}")
            place = InodePlace(volume, shard, index, start // geometry.inode_bytes)
            found = parse_table(view, place, inode_bytes=geometry.inode_bytes)
            view.release()
            if len(found.slots) or found.torn or found.foreign:
                parts.append((found.slots + geometry.row(index, shard, 0), found))
    return parts


def _join(parts: list[tuple[I64, TableRows]], geometry: Geometry) -> Recovered:
    """Put the parts of all tables together, oldest inode first."""
    widest = max((p.locations.shape[1] for _, p in parts), default=0)
    metas: dict[bytes, int] = {}
    meta_ids = []
    for _, part in parts:
        numbers = np.array([metas.setdefault(m, len(metas)) for m in part.metas], np.int64)
        meta_ids.append(numbers[part.meta_ids] if len(numbers) else part.meta_ids)
    heads = [p.heads for _, p in parts]
    epoch, counter, length, counts, shard, generation = (
        _cat([h[name].astype(np.int64) for h in heads])
        for name in ("epoch", "counter", "length", "pieces", "shard", "generation")
    )
    order = np.lexsort((counter, epoch))
    locations = _padded([p.locations for _, p in parts], widest)[order]
    return Recovered(
        rows=_cat([rows for rows, _ in parts])[order],
        words=_digest_words(heads)[order],
        length=length[order],
        blocks=(locations >> np.uint64(40) & np.uint64(0xFFFF)).sum(axis=1).astype(np.int64),
        meta_ids=_cat(meta_ids)[order],
        members=_member_masks(locations) | _inode_members(heads)[order],
        locations=locations,
        checksums=_padded([p.checksums for _, p in parts], widest)[order],
        counts=counts[order],
        metas=list(metas),
        shard=shard[order],
        generation=generation[order],
        generations={},
        newest_epoch=int(epoch.max(initial=0)),
        torn=sum(p.torn for _, p in parts),
        foreign=sum(p.foreign for _, p in parts),
    )


def _cat(arrays: list[I64]) -> I64:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _padded(arrays: list[U64], widest: int) -> U64:
    if not arrays:
        return np.zeros((0, 0), np.uint64)
    result = np.zeros((sum(len(a) for a in arrays), widest), np.uint64)
    at = 0
    for array in arrays:
        result[at : at + len(array), : array.shape[1]] = array
        at += len(array)
    return result


def _digest_words(heads: list[npt.NDArray[np.void]]) -> U64:
    if not heads:
        return np.zeros((0, 6), np.uint64)
    return np.concatenate(
        [np.ascontiguousarray(h["digest"]).view(np.uint64).reshape(-1, 6) for h in heads]
    )


def _member_masks(locations: U64) -> I64:
    used = locations != 0  # a padded place is zero; a real one has a block count
    bits = np.uint64(1) << (locations >> np.uint64(56))
    masks: I64 = np.bitwise_or.reduce(np.where(used, bits, 0), axis=1, initial=0).astype(np.int64)
    return masks


def _inode_members(heads: list[npt.NDArray[np.void]]) -> I64:
    # the inode's own member counts too: without it the entry could not be erased
    members = _cat([h["member"].astype(np.int64) for h in heads])
    masks: I64 = np.left_shift(np.int64(1), members)
    return masks


def _choose(found: Recovered, geometry: Geometry) -> Recovered:
    """Drop inodes that cannot be true, then those that lost against newer ones."""
    in_force = np.zeros(geometry.shards, np.int64)
    for shard, generation in found.generations.items():
        in_force[shard] = generation
    current = found.generation == in_force[found.shard]
    possible = current & _possible(found, geometry)
    found.torn += int(np.count_nonzero(current & ~possible))
    newest = possible & _newest_of_digest(found.words, possible)
    contested = contested_entries(found.locations, newest)
    keep = newest
    for index in resolve(found.locations, contested):
        keep[index] = False
    # what lost must go from the media, or it would come back when the winner has gone
    found.stale_rows = found.rows[current & ~keep].tolist()
    for name in _COLUMNS:
        setattr(found, name, getattr(found, name)[keep])
    return found


def _possible(found: Recovered, geometry: Geometry) -> npt.NDArray[np.bool_]:
    """Whether every piece lies in its shard's data area and the lengths add up."""
    locations = found.locations
    used = locations != 0
    member = (locations >> np.uint64(56)).astype(np.int64)
    start = (locations & np.uint64(MAX_BLOCK)).astype(np.int64)
    blocks = (locations >> np.uint64(40) & np.uint64(0xFFFF)).astype(np.int64)
    frames = [m.frames_per_shard for m in geometry.members]
    shard_blocks = np.array(frames, np.int64) * geometry.frame_blocks
    known = member < len(frames)
    size = shard_blocks[np.where(known, member, 0)]
    first = size * found.shard[:, None]
    inside = known & (blocks > 0) & (start >= first) & (start + blocks <= first + size)
    last_blocks = (
        np.take_along_axis(blocks, np.maximum(found.counts - 1, 0)[:, None], axis=1)[:, 0]
        if blocks.shape[1]
        else np.zeros(0, np.int64)
    )
    room = found.blocks * geometry.block_bytes
    least = (found.blocks - last_blocks) * geometry.block_bytes
    fits: npt.NDArray[np.bool_] = (
        (inside | ~used).all(axis=1) & (found.length <= room) & (found.length > least)
    )
    return fits


def _newest_of_digest(words: U64, possible: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Mark, of inodes with one digest, the newest; the arrays are in order of age."""
    newest = np.ones(len(words), np.bool_)
    mixed = words[:, 0] * np.uint64(3) ^ words[:, 2] ^ words[:, 3] ^ words[:, 5] * np.uint64(7)
    order = np.argsort(mixed, kind="stable")
    same = mixed[order][1:] == mixed[order][:-1]
    if same.any():  # rare: settle those few one by one
        suspects = np.zeros(len(words), np.bool_)
        suspects[order[1:][same]] = True
        suspects[order[:-1][same]] = True
        seen: set[bytes] = set()
        for index in np.flatnonzero(suspects & possible)[::-1].tolist():
            digest = words[index].tobytes()
            newest[index] = digest not in seen
            seen.add(digest)
    return newest
