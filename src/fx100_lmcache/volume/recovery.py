"""Recovery: read every inode table, keep what is valid, derive the rest.

An inode is taken only if all that it says can be true (:mod:`fx100_lmcache.volume.verdict`). Of
those the newest wins a digest, and wins the blocks that it claims. What is not taken is counted by
reason, and reported so that it can be erased. Tables of different members are read at
the same time, and worked on in stretches that stay in the CPU's cache. A few slots that cannot be
read cost the entries in them, not the volume.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from fx100_lmcache.buffers import BufferPool, IoBuffer
from fx100_lmcache.members.base import MEDIA_ERRORS, Member, read_whole
from fx100_lmcache.ondisk.geometry import Geometry
from fx100_lmcache.ondisk.inode import InodePlace, TableRows, parse_table
from fx100_lmcache.ondisk.location import blocks_of, members_of
from fx100_lmcache.ondisk.reason import Reason
from fx100_lmcache.volume.overlap import contested_entries, resolve
from fx100_lmcache.volume.verdict import GOOD, LAST_EPOCH, Judge, reason_of

MAX_UNREADABLE_SLOTS = 64
"""More than so many are a broken member: then nothing is opened."""

_READ_BYTES = 2 * 1024 * 1024

log = logging.getLogger(__name__)

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Columns:
    """Inodes by column: arrays with one element (or row) for each."""

    rows: I64
    words: U64
    epoch: I64
    counter: I64
    length: I64
    blocks: I64
    meta_ids: I64
    members: I64
    locations: U64
    checksums: U64
    piece_counts: I64
    shard: I64
    generation: I64

    def __len__(self) -> int:
        return len(self.rows)


_COLUMNS = tuple(column.name for column in fields(Columns))


@dataclass(slots=True)
class Recovered(Columns):
    """All entries found, in no special order."""

    age: I64
    """Rank in the order of writing: the oldest has the lowest."""
    metas: list[bytes]
    generations: dict[int, int]
    """Generation in force for each shard."""
    newest_epoch: int
    """Highest epoch in any inode that can be true."""
    stale_rows: list[int] = field(default_factory=list)
    """Slots of inodes that lost against newer ones: erase them."""
    unreadable_rows: list[int] = field(default_factory=list)
    """Slots that cannot be read: erase them too; to be written is what heals most of them."""
    held_rows: list[int] = field(default_factory=list)
    """Slots that must stay as they are: what stands there is of a format that we do not know."""
    dropped: Counter[Reason] = field(default_factory=Counter)
    """Inodes with a right checksum that were not taken, dead generations not among them."""
    torn: int = 0
    foreign: int = 0

    @property
    def next_epoch(self) -> int:
        """What the next writer must use at least, so that its inodes are newer than all of these.

        At the last epoch, which only forged media have, its counter alone decides.
        """
        return min(self.newest_epoch + 1, LAST_EPOCH)

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """How many were dropped for each reason there is, zeros included."""
        return {reason.value: self.dropped[reason] for reason in Reason}


@dataclass(frozen=True, slots=True)
class _Refused:
    """An inode that cannot be true. It counts unless its generation is a dead one."""

    row: int
    shard: int
    generation: int
    reason: Reason


@dataclass(slots=True)
class _Part:
    """What one stretch of a table holds."""

    columns: Columns
    metas: list[bytes]
    torn: int = 0
    foreign: int = 0
    odd: dict[Reason, I64] = field(default_factory=dict)
    """Rows of slots that hold no inode of their place."""
    refused: list[_Refused] = field(default_factory=list)


def recover(
    members: Sequence[Member],
    geometry: Geometry,
    volume: bytes,
    generations: dict[int, int],
    *,
    claim_epoch: int | None = None,
) -> Recovered:
    """Rebuild the catalog of the given shards.

    Parameters
    ----------
    generations : dict of int to int
        Shard number to the generation that its claim says. Inodes of an older one do not count;
        one of a newer one proves that the claim block was lost in a power cut.
    claim_epoch : int or None
        Highest epoch of the claims, which bounds those of inodes; None if it is not known.

    Raises
    ------
    OSError
        If more of the tables than :data:`MAX_UNREADABLE_SLOTS` cannot be read.
    """
    judge = Judge(geometry, generations, claim_epoch)
    parts = []
    unreadable: list[int] = []
    tables = _read_tables(members, geometry, volume, list(generations), unreadable)
    for place, view in tables:
        stretch = parse_table(view, place, inode_bytes=geometry.inode_bytes)
        if len(stretch.slots) or stretch.torn or stretch.foreign or stretch.odd:
            parts.append(_part(stretch, place, geometry, judge))
    found = _join(parts)
    found.generations = {
        shard: max(generation, int(found.generation[found.shard == shard].max(initial=generation)))
        for shard, generation in generations.items()
    }
    found.unreadable_rows = sorted(unreadable)
    for part in parts:
        _note_refused(found, part)
    return _choose(found, geometry)


def _read_tables(
    members: Sequence[Member],
    geometry: Geometry,
    volume: bytes,
    shards: Sequence[int],
    unreadable: list[int],
) -> Iterator[tuple[InodePlace, memoryview]]:
    """Yield all tables in stretches, taking turns with the members; a view lasts for one step.

    Rows that cannot be read are empty in the views, and are added to ``unreadable``.

    Threads only read. What is parsed stays in one thread: several would fight for the
    interpreter's lock, and keep the memory that they freed.
    """
    slots = max(_READ_BYTES // geometry.inode_bytes, 1)
    longest = max(shape.slots_per_shard for shape in geometry.members)
    places = (
        InodePlace(volume, shard, member, slot)
        for shard in shards
        for slot in range(0, longest, slots)
        for member in range(len(members))
        if slot < geometry.members[member].slots_per_shard
    )
    buffers = BufferPool(min(slots, longest) * geometry.inode_bytes)

    def read(place: InodePlace) -> IoBuffer:
        buffer = buffers.take()
        buffer.length = geometry.inode_bytes * min(
            slots, geometry.members[place.member].slots_per_shard - place.slot
        )
        offset = geometry.slot_offset(place.member, place.shard, place.slot)
        view, member = buffer.view[: buffer.length], members[place.member]
        try:
            read_whole(member, offset, view)
        except OSError:
            first = geometry.row(place.member, place.shard, place.slot)
            most = MAX_UNREADABLE_SLOTS - len(unreadable)
            bad = _read_slots(member, offset, view, geometry.inode_bytes, most)
            unreadable.extend(first + slot for slot in bad)
        return buffer

    for place, buffer in _ahead(read, places, 0 if members[0].fileno() is None else len(members)):
        yield place, buffer.view[: buffer.length]
        buffers.give_back(buffer)


def _read_slots(
    member: Member, offset: int, view: memoryview, inode_bytes: int, most: int
) -> list[int]:
    """Read slot by slot; return those that cannot be read, which are empty in the view.

    Raises
    ------
    OSError
        If that is so for more than ``most`` slots, or for all: then it is not the media.
    """
    unreadable = []
    for at in range(0, len(view), inode_bytes):
        with view[at : at + inode_bytes] as slot:
            try:
                read_whole(member, offset + at, slot)
            except OSError as problem:
                unreadable.append(at // inode_bytes)
                if (
                    problem.errno not in MEDIA_ERRORS
                    or len(unreadable) > most
                    or len(unreadable) * inode_bytes == len(view)
                ):
                    raise
                log.error("%s: inode at byte %d: %s", member.name, offset + at, problem)
                slot[:] = bytes(len(slot))
    return unreadable


def _ahead(
    read: Callable[[InodePlace], IoBuffer], places: Iterable[InodePlace], threads: int
) -> Iterator[tuple[InodePlace, IoBuffer]]:
    """Read in order, twice as many stretches ahead as there are threads; 0 threads: when asked."""
    if not threads:
        yield from ((place, read(place)) for place in places)
        return
    with ThreadPoolExecutor(threads, "fx100-recovery") as pool:
        coming: deque[tuple[InodePlace, Future[IoBuffer]]] = deque()
        for place in places:
            coming.append((place, pool.submit(read, place)))
            if len(coming) > 2 * threads:
                first, buffer = coming.popleft()
                yield first, buffer.result()
        for place, buffer in coming:
            yield place, buffer.result()


def _part(found: TableRows, place: InodePlace, geometry: Geometry, judge: Judge) -> _Part:
    """Judge a stretch, and keep what can be true of it."""
    first = geometry.row(place.member, place.shard, 0)
    words = np.ascontiguousarray(found.heads["digest"]).view(np.uint64).reshape(-1, 6)
    codes = judge.verdicts(found, words, place.shard)
    part = _Part(_columns(found, words, place, first), found.metas, found.torn, found.foreign)
    part.odd = {reason: slots + first for reason, slots in found.odd.items()}
    if codes.any():
        columns = part.columns
        part.refused = [
            _Refused(row, place.shard, generation, reason_of(code))
            for row, generation, code in zip(
                *(c[codes != GOOD].tolist() for c in (columns.rows, columns.generation, codes)),
                strict=True,
            )
        ]
        _keep(columns, codes == GOOD)
        # not that of what was refused: all pay for it
        widest = int(columns.piece_counts.max(initial=0))
        columns.locations = columns.locations[:, :widest]
        columns.checksums = columns.checksums[:, :widest]
        used = np.unique(columns.meta_ids)  # what nothing refers to might not be readable
        columns.meta_ids = np.searchsorted(used, columns.meta_ids)
        part.metas = [part.metas[number] for number in used.tolist()]
    return part


def _columns(found: TableRows, words: U64, place: InodePlace, first: int) -> Columns:
    heads, locations = found.heads, found.locations
    epoch, counter, length, piece_counts, shard, generation = (
        heads[name].astype(np.int64)
        for name in ("epoch", "counter", "length", "pieces", "shard", "generation")
    )
    return Columns(
        rows=found.slots + first,
        words=words,
        epoch=epoch,
        counter=counter,
        length=length,
        blocks=blocks_of(locations).view(np.int64).sum(axis=1),
        meta_ids=found.meta_ids,
        members=_member_masks(locations, place.member),
        locations=locations,
        checksums=found.checksums,
        piece_counts=piece_counts,
        shard=shard,
        generation=generation,
    )


def _keep(columns: Columns, keep: Flags) -> None:
    for name in _COLUMNS:
        setattr(columns, name, getattr(columns, name)[keep])


def _member_masks(locations: U64, home: int) -> I64:
    """Members of each entry, its inode's own among them: without it it could not be erased."""
    used = locations != 0  # a padded place is zero; a real one has a block count
    bits = np.where(used, np.uint64(1) << members_of(locations), np.uint64(0))
    masks: I64 = np.bitwise_or.reduce(bits, axis=1, initial=1 << home).astype(np.int64)
    return masks


def _note_refused(found: Recovered, part: _Part) -> None:
    """Count what cannot be true, and have it erased, unless we do not know what it is."""
    for reason, rows in part.odd.items():
        found.dropped[reason] += len(rows)
        (found.held_rows if reason is Reason.FORMAT else found.stale_rows).extend(rows.tolist())
    for refused in part.refused:
        if refused.generation >= found.generations[refused.shard]:
            found.dropped[refused.reason] += 1
            found.stale_rows.append(refused.row)


def _join(parts: list[_Part]) -> Recovered:
    """Put the parts of all tables together."""
    widest = max((p.columns.locations.shape[1] for p in parts), default=0)
    metas: dict[bytes, int] = {}
    for part in parts:
        numbers = np.array([metas.setdefault(m, len(metas)) for m in part.metas], np.int64)
        columns = part.columns
        if len(columns):
            columns.meta_ids = numbers[columns.meta_ids]
        columns.locations = _padded(columns.locations, widest)
        columns.checksums = _padded(columns.checksums, widest)
    joined = {
        name: np.concatenate([getattr(p.columns, name) for p in parts or [_NOTHING]])
        for name in _COLUMNS
    }
    age = np.empty(len(joined["rows"]), np.int64)
    age[np.lexsort((joined["counter"], joined["epoch"]))] = np.arange(len(age))
    return Recovered(
        **joined,
        age=age,
        metas=list(metas),
        generations={},
        newest_epoch=int(joined["epoch"].max(initial=0)),
        torn=sum(p.torn for p in parts),
        foreign=sum(p.foreign for p in parts),
    )


def _padded(array: U64, widest: int) -> U64:
    if array.shape[1] == widest:
        return array
    result = np.zeros((len(array), widest), np.uint64)
    result[:, : array.shape[1]] = array
    return result


def _nothing() -> _Part:
    none, table = np.zeros(0, np.int64), np.zeros((0, 0), np.uint64)
    columns: dict[str, npt.NDArray[np.generic]] = dict.fromkeys(_COLUMNS, none)
    columns |= {"words": np.zeros((0, 6), np.uint64), "locations": table, "checksums": table}
    return _Part(Columns(**columns), [])  # type: ignore[arg-type]


_NOTHING = _nothing()


def _choose(found: Recovered, geometry: Geometry) -> Recovered:
    """Drop inodes of dead generations, then those that lost against newer ones."""
    in_force = np.zeros(geometry.shards, np.int64)
    for shard, generation in found.generations.items():
        in_force[shard] = generation
    current = found.generation == in_force[found.shard]
    keep = current & _newest_of_digest(found.words, current, found.age)
    twice = int(np.count_nonzero(current & ~keep))
    contested = contested_entries(found.locations, keep, found.age, geometry)
    losers = resolve(found.locations, contested)
    found.dropped += Counter({Reason.DUPLICATE: twice, Reason.OVERLAP: len(losers)})
    for index in losers:
        keep[index] = False
    if keep.all():
        return found
    # what lost must go from the media, or it would come back when the winner has gone
    found.stale_rows += found.rows[current & ~keep].tolist()
    _keep(found, keep)
    found.age = found.age[keep]
    return found


def _newest_of_digest(words: U64, current: Flags, age: I64) -> Flags:
    """Mark, of inodes with one digest, the newest."""
    newest = np.ones(len(words), np.bool_)
    mixed = words[:, 0] * np.uint64(3) ^ words[:, 2] ^ words[:, 3] ^ words[:, 5] * np.uint64(7)
    ordered = np.sort(mixed)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):  # rare: settle those few one by one
        suspects = np.flatnonzero(np.isin(mixed, twice) & current)
        seen: set[bytes] = set()
        for index in suspects[np.argsort(age[suspects])][::-1].tolist():
            digest = words[index].tobytes()
            newest[index] = digest not in seen
            seen.add(digest)
    return newest
