"""Locations and checksums of all entries' pieces, in two growing arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_FIRST_CAPACITY = 4096


class PieceTable:
    """Runs of pieces; a freed run is reused by the next entry with as many pieces.

    Entries of a volume have few different piece counts, so runs are not split or merged.
    """

    def __init__(self) -> None:
        self._location: U64 = np.zeros(_FIRST_CAPACITY, np.uint64)
        self._checksum: U64 = np.zeros(_FIRST_CAPACITY, np.uint64)
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, pieces: Sequence[tuple[int, int]]) -> int:
        """Keep the pieces of one entry; return where."""
        count = len(pieces)
        free = self._free[count]
        at = free.pop() if free else self._extend(count)
        self._location[at : at + count] = [location for location, _ in pieces]
        self._checksum[at : at + count] = [checksum for _, checksum in pieces]
        return at

    def add_many(
        self, locations: U64, checksums: U64, counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Keep the pieces of many entries, given as padded rows; return where each starts."""
        inside = np.arange(locations.shape[1]) < counts[:, None]
        if not self._end and len(counts):  # adopt what the selection allocates anyway
            at = 0
            self._location, self._checksum = locations[inside], checksums[inside]
            self._end = len(self._location)
        else:
            total = int(counts.sum())
            at = self._extend(total)
            self._location[at : at + total] = locations[inside]
            self._checksum[at : at + total] = checksums[inside]
        starts: npt.NDArray[np.int64] = at + np.cumsum(counts) - counts
        return starts

    def read(self, at: int, count: int) -> tuple[U64, U64]:
        """Copy locations and checksums of one entry."""
        return self._location[at : at + count].copy(), self._checksum[at : at + count].copy()

    def read_many(self, starts: I64, counts: I64) -> tuple[U64, U64]:
        """Copy locations and checksums of many entries, one after the other."""
        before = np.cumsum(counts) - counts
        places = np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
        return self._location[places], self._checksum[places]

    def free(self, at: int, count: int) -> None:
        """Give a run back."""
        self._free[count].append(at)

    def _extend(self, count: int) -> int:
        at, self._end = self._end, self._end + count
        if self._end > len(self._location):
            # by an eighth, in place: the kernel moves large arrays without copying them
            capacity = max(self._end, len(self._location) * 9 // 8)
            self._location.resize(capacity, refcheck=False)
            self._checksum.resize(capacity, refcheck=False)
        return at
