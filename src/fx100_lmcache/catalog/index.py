"""A hash index from 48-byte digests to row numbers, in numpy.

Batches are looked up without a Python loop: 10,000 digests take about 2 ms. Small ones take care
not to give up the GIL, which with one other thread busy costs 5 ms each time: numpy does so for
arrays of more than 500 elements, and in some ways of indexing. One million entries take 8 to 16
bytes each (a Python dict of bytes takes about 180). Open addressing with linear probing; the
digests themselves stay in the catalog's columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORDS = 6  # a digest is six 64-bit words

_EMPTY, _DELETED = -1, -2
# multiples of the golden ratio: the high bits of the sum depend on every bit of every word
_ODD = np.array([0x9E3779B97F4A7C15 * (2 * n + 1) % 2**64 for n in range(WORDS)], np.uint64)
_SMALLEST = 1024

U64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


def as_words(digests: bytes) -> U64:
    """View joined digests as an array of shape ``(n, 6)``."""
    return np.frombuffer(digests, np.uint64).reshape(-1, WORDS)


class DigestIndex:
    """Maps digests to rows.

    Parameters
    ----------
    digests : uint64 array of shape (rows, 6)
        The catalog's digest column; the index reads it to compare.
    """

    def __init__(self, digests: U64) -> None:
        self._digests = digests
        self._whole = digests.view(f"V{8 * WORDS}")[:, 0]
        self._reset(_SMALLEST)

    def __len__(self) -> int:
        return self._live

    def _reset(self, size: int) -> None:
        self._table = np.full(size, _EMPTY, np.int32)
        self._mask = size - 1
        self._shift = np.uint64(64 - (size.bit_length() - 1))
        self._live = 0
        self._filled = 0

    def _home(self, words: U64) -> Rows:
        # chunk hashes are not always random in every word: a counter may sit in any of them
        mixed = (words * _ODD).sum(axis=1, dtype=np.uint64)
        home: Rows = (mixed >> self._shift).astype(np.int64)
        return home

    def find(self, words: U64) -> Rows:
        """Row of each digest, -1 where there is none."""
        at = self._home(words)
        rows = self._table[at].astype(np.int64)
        found = self._whole[rows].view(np.uint64).reshape(-1, WORDS)  # of row -1: not looked at
        hit = (found == words).all(axis=1) & (rows >= 0)
        result = np.where(hit, rows, -1)
        on = ~hit & (rows != _EMPTY)
        if on.any():
            self._find_further(words, result, np.flatnonzero(on), (at[on] + 1) & self._mask)
        return result

    def _find_further(self, words: U64, result: Rows, open_: Rows, at: Rows) -> None:
        """Go on with the digests whose first slot has another one."""
        while len(open_):
            rows = self._table[at]
            hit = rows >= 0
            hit[hit] = (self._digests[rows[hit]] == words[open_[hit]]).all(axis=1)
            result[open_[hit]] = rows[hit]
            on = ~hit & (rows != _EMPTY)
            open_, at = open_[on], (at[on] + 1) & self._mask

    def insert(self, rows: Rows) -> None:
        """Add rows whose digests are in the column already and not yet in the index."""
        if (self._filled + len(rows)) * 2 > len(self._table):
            self._rebuild(self._live + len(rows))
        pending = np.asarray(rows, np.int64)
        at = self._home(self._digests[pending])
        while len(pending):
            vacant = self._table[at] < 0
            was_empty = self._table[at] == _EMPTY
            self._table[at[vacant]] = pending[vacant]  # of several, the last one stays
            placed = self._table[at] == pending
            # a slot counts as filled once, however many rows wanted it
            self._filled += int(np.count_nonzero(placed & was_empty))
            pending, at = pending[~placed], (at[~placed] + 1) & self._mask
        self._live += len(rows)

    def delete(self, row: int) -> None:
        """Remove one row, while its digest is still in the column."""
        at = int(self._home(self._digests[row : row + 1])[0])
        while self._table[at] != row:
            assert self._table[at] != _EMPTY, "not in the index"
            at = (at + 1) & self._mask
        self._table[at] = _DELETED
        self._live -= 1

    def clear(self) -> None:
        """Forget everything."""
        self._reset(_SMALLEST)

    def _rebuild(self, live: int) -> None:
        size = _SMALLEST
        while size < live * 3:
            size *= 2
        rows = self._table[self._table >= 0].astype(np.int64)
        self._reset(size)
        if len(rows):
            self.insert(rows)
