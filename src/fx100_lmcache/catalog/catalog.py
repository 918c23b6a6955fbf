"""The catalog: every entry of the store as a row of numpy columns.

A row is an inode slot of the volume, so entries need no numbering of their own. A million
entries of 8 pieces take about 220 bytes each. Not thread-safe: the store holds its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fx100_lmcache.catalog.eviction import LIVE, EvictionColumns, EvictionOrder
from fx100_lmcache.catalog.index import WORDS, DigestIndex, Rows, as_words
from fx100_lmcache.catalog.pieces import PieceTable

U64 = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

FREE, DYING = 0, 2
_WINDOW_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, copied out of the columns.

    Attributes
    ----------
    pieces : tuple of (location, checksum)
        As on disk, see :func:`~fx100_lmcache.ondisk.location.unpack_location`.
    meta : int
        Number of its metadata in :attr:`Catalog.metas`.
    """

    row: int
    digest: bytes
    length: int
    meta: int
    pieces: tuple[tuple[int, int], ...]


class Catalog:
    """Entries of the opened shards.

    Parameters
    ----------
    rows : int
        Inode slots of the volume. Columns are allocated for all of them but take memory only
        where used.
    """

    def __init__(self, rows: int) -> None:
        self.metas: list[bytes] = []
        self._meta_ids: dict[bytes, int] = {}
        rows = max(rows, 2)  # the index looks at rows -1 and -2, and takes nothing from there
        self._digests = np.zeros((rows, WORDS), np.uint64)
        self._state = np.zeros(rows, np.uint8)
        self._length = np.zeros(rows, np.uint32)
        self._blocks = np.zeros(rows, np.uint32)
        self._meta = np.zeros(rows, np.uint32)
        self._members = np.zeros(rows, np.uint16)
        self._used_at = np.zeros(rows, np.uint64)
        self._pins = np.zeros(rows, np.uint32)
        self._pinned_until = np.zeros(rows, np.uint32)
        # 32 bits: every reader has an object of its own in memory, so they cannot run over
        self._readers = np.zeros(rows, np.uint32)
        self._piece_at = np.zeros(rows, np.uint32)
        self._piece_count = np.zeros(rows, np.uint16)
        self._pieces = PieceTable()
        self._index = DigestIndex(self._digests)
        self._order = EvictionOrder(
            EvictionColumns(
                self._state,
                self._used_at,
                self._blocks,
                self._members,
                self._pins,
                self._pinned_until,
                self._readers,
            )
        )
        self._tick = 0
        self._top = 0
        self.live_bytes = 0

    def __len__(self) -> int:
        return len(self._index)

    def intern_meta(self, meta: bytes) -> int:
        """Give a metadata blob a number; the same blob always gets the same number."""
        number = self._meta_ids.setdefault(meta, len(self.metas))
        if number == len(self.metas):
            self.metas.append(meta)
        return number

    def find(self, digests: Sequence[bytes]) -> Rows:
        """Row of each digest, -1 where nothing is stored."""
        return self._index.find(as_words(b"".join(digests)))

    def find_one(self, digest: bytes) -> int:
        """Row of one digest, or -1."""
        return int(self._index.find(as_words(digest))[0])

    def entry(self, row: int) -> Entry:
        """Copy one entry out."""
        locations, checksums = self._pieces.read(
            int(self._piece_at[row]), int(self._piece_count[row])
        )
        return Entry(
            row,
            self._digests[row].tobytes(),
            int(self._length[row]),
            int(self._meta[row]),
            tuple(zip(locations.tolist(), checksums.tolist(), strict=True)),
        )

    def pieces(self, rows: Rows) -> tuple[Rows, U64, U64]:
        """Piece count of each row; then locations and checksums, one row's after the other's."""
        counts = self._piece_count[rows].astype(np.int64)
        return (counts, *self._pieces.read_many(self._piece_at[rows].astype(np.int64), counts))

    def add(
        self,
        row: int,
        digest: bytes,
        *,
        length: int,
        blocks: int,
        meta: int,
        members: int,
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        """Publish an entry: from here on it is found. If it raises, nothing has changed."""
        assert self._state[row] == FREE
        self._digests[row] = as_words(digest)[0]
        piece_at = self._pieces.add(pieces)
        try:
            self._index.insert(np.array([row], np.int64))
        except BaseException:
            self._pieces.free(piece_at, len(pieces))
            raise
        self._state[row] = LIVE
        self._length[row] = length
        self._blocks[row] = blocks
        self._meta[row] = meta
        self._members[row] = members
        self._piece_count[row] = len(pieces)
        self._piece_at[row] = piece_at
        self._top = max(self._top, row + 1)
        self.live_bytes += length
        self.touch(np.array([row], np.int64))

    def add_recovered(
        self,
        rows: Rows,
        words: U64,
        *,
        length: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        meta: npt.NDArray[np.int64],
        members: npt.NDArray[np.int64],
        locations: U64,
        checksums: U64,
        piece_counts: npt.NDArray[np.int64],
        age: npt.NDArray[np.int64],
    ) -> None:
        """Publish many entries at once; those of lowest ``age`` count as used longest ago."""
        self._digests[rows] = words
        self._state[rows] = LIVE
        self._length[rows] = length
        self._blocks[rows] = blocks
        self._meta[rows] = meta
        self._members[rows] = members
        self._piece_count[rows] = piece_counts
        self._piece_at[rows] = self._pieces.add_many(locations, checksums, piece_counts)
        self._index.insert(rows)
        self._used_at[rows] = age + (self._tick + 1)
        if len(rows):
            self._tick += int(age.max()) + 1
            self._top = max(self._top, int(rows.max()) + 1)
        self.live_bytes += int(length.sum())

    def drop(self, row: int) -> None:
        """Hide a live entry; its row and blocks stay taken until :meth:`release`."""
        assert self._state[row] == LIVE
        self._index.delete(row)
        self._order.remove(row)
        self._state[row] = DYING
        self._pins[row] = 0
        self.live_bytes -= int(self._length[row])

    def drop_all(self) -> list[tuple[int, bytes, int]]:
        """Hide every entry; return row, digest and blocks of each."""
        rows = np.flatnonzero(self._state[: self._top] == LIVE)
        size = 8 * WORDS
        joined = self._digests[rows].tobytes()
        digests = [joined[at : at + size] for at in range(0, len(joined), size)]
        self._index.clear()
        self._order.clear(self._top)
        self._state[rows] = DYING
        self._pins[rows] = 0
        self.live_bytes = 0
        return list(zip(rows.tolist(), digests, self._blocks[rows].tolist(), strict=True))

    def release(self, row: int) -> None:
        """Forget a hidden entry whose blocks have been freed."""
        assert self._state[row] == DYING
        assert not self._readers[row]
        self._pieces.free(int(self._piece_at[row]), int(self._piece_count[row]))
        self._state[row] = FREE

    def is_live(self, row: int) -> bool:
        """Whether a row is published."""
        return bool(self._state[row] == LIVE)

    def blocks(self, row: int) -> int:
        """Blocks that an entry takes."""
        return int(self._blocks[row])

    def readable(self, rows: Rows, down_mask: int) -> Flags:
        """Which rows lie wholly on members that are up."""
        on: Flags = (self._members[rows] & np.uint16(down_mask)) == 0
        return on

    def is_readable(self, row: int, down_mask: int) -> bool:
        """Whether one row lies wholly on members that are up."""
        return not int(self._members[row]) & down_mask

    def lengths(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Logical length of each row."""
        return self._length[rows]

    def meta_numbers(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Metadata number of each row."""
        return self._meta[rows]

    def touch(self, rows: Rows) -> None:
        """Mark rows as just used, the first one most recently.

        Callers give a prefix in order, so of one conversation the tail is evicted before the
        chunks that it needs.
        """
        count = len(rows)
        self._used_at[rows] = np.arange(self._tick + count, self._tick, -1, dtype=np.uint64)
        self._tick += count

    def pin(self, rows: Rows, now_s: float, until_s: int) -> None:
        """Take one pin on each row; all pins of a row expire together at ``until_s``."""
        self._pins[rows[self._pinned_until[rows] <= now_s]] = 0  # those had expired
        np.add.at(self._pins, rows, np.uint32(1))
        self._pinned_until[rows] = np.maximum(self._pinned_until[rows], until_s)

    def unpin(self, rows: Rows) -> int:
        """Give one pin of each row back; return how many there were."""
        each, wanted = np.unique(rows, return_counts=True)
        given = np.minimum(self._pins[each], wanted).astype(np.uint32)
        self._pins[each] -= given
        self._order.let_go(each)
        return int(given.sum())

    def pinned(self, row: int, now_s: float) -> bool:
        """Whether somebody holds an unexpired pin."""
        return bool(self._pins[row] and self._pinned_until[row] > now_s)

    def start_reading(self, rows: Iterable[int]) -> None:
        """Count a reader in flight of each row: the entry's blocks stay until it ends."""
        for row in rows:
            self._readers[row] += 1

    def stop_reading(self, rows: Iterable[int]) -> list[int]:
        """End a reader of each row; return the rows that are hidden and have no other."""
        idle = []
        for row in rows:
            left = int(self._readers[row]) - 1
            self._readers[row] = left
            if not left:
                if self._state[row] == DYING:
                    idle.append(row)
                elif self._order.set_aside:
                    self._order.let_go_one(row)
        return idle

    def being_read(self, row: int) -> bool:
        """Whether readers are in flight."""
        return bool(self._readers[row])

    def victims(
        self, blocks: int, now_s: float, down_mask: int, at_most: int = 1 << 62
    ) -> list[int]:
        """Choose the least recently used rows that together free at least ``blocks``.

        Rows that are pinned, being read, or on a member that is not up (its inode could not be
        erased) are passed over. Fewer blocks than asked for means that no more can be freed, or
        that more than ``at_most`` rows would have to go.
        """
        return self._order.victims(blocks, now_s, down_mask, at_most, len(self), self._top)

    def evictable(self, row: int, now_s: float, down_mask: int) -> bool:
        """Whether a row may be evicted: see :meth:`victims`."""
        return bool(
            self._state[row] == LIVE
            and not self.pinned(row, now_s)
            and not self._readers[row]
            and self.is_readable(row, down_mask)
        )

    def live_rows(self, start: int = 0, limit: int | None = None) -> list[int]:
        """Rows of live entries from row ``start`` on, in row order."""
        if limit is None:
            limit = self._top
        found: list[int] = []
        for at in range(start, self._top, _WINDOW_ROWS):  # the lock is held: not all for a few
            state = self._state[at : min(at + _WINDOW_ROWS, self._top)]
            found += (at + np.flatnonzero(state == LIVE)).tolist()
            if len(found) >= limit:
                break
        return found[:limit]

    def ages(self) -> tuple[Rows, U64]:
        """Rows of live entries, and a number for each that is lower the longer it was not used."""
        rows = np.flatnonzero(self._state[: self._top] == LIVE)
        return rows, self._used_at[rows]

    def bytes_by_meta(self) -> dict[int, int]:
        """Logical bytes of live entries by metadata number."""
        rows = np.flatnonzero(self._state[: self._top] == LIVE)
        sums = np.bincount(self._meta[rows], weights=self._length[rows])
        return {number: int(total) for number, total in enumerate(sums.tolist()) if total}

    def used_blocks(self) -> int:
        """Blocks of live and hidden entries."""
        return int(self._blocks[: self._top][self._state[: self._top] != FREE].sum())
