"""Which entries to evict first, at a cost that does not grow with those that may not go.

Entries that are pinned, being read, or on a member that is not up are set aside when they are
met, and come back when that ends. They are not walked again and again meanwhile.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fx100_lmcache.catalog.index import Rows

LIVE = 1  # the state of an entry that can be found

_CANDIDATE, _HELD, _AWAY = 0, 1, 2
_FEWEST_SORTED = 1024
_MANY = 1024  # from here on sorting anew is quicker than putting rows back one by one
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class EvictionColumns:
    """The catalog's columns that decide: one value for each row."""

    state: npt.NDArray[np.uint8]
    used_at: npt.NDArray[np.uint64]
    blocks: npt.NDArray[np.uint32]
    members: npt.NDArray[np.uint16]
    pins: npt.NDArray[np.uint32]
    pinned_until: npt.NDArray[np.uint32]
    readers: npt.NDArray[np.uint32]


class EvictionOrder:
    """Live rows, least recently used first.

    Attributes
    ----------
    set_aside : int
        How many may not go at present, as far as is known.
    """

    def __init__(self, columns: EvictionColumns) -> None:
        self._columns = columns
        self._aside = np.zeros(len(columns.state), np.uint8)
        self.set_aside = 0
        self._oldest: deque[tuple[int, int]] = deque()  # used at, row; sorted
        self._back: list[tuple[int, int]] = []  # the same of rows that came back; a heap
        self._down_mask = 0
        self._look_at = _NEVER  # when the first pin of those set aside runs out

    def victims(
        self, blocks: int, now_s: float, down_mask: int, at_most: int, live: int, top: int
    ) -> list[int]:
        """Choose rows; see :meth:`~fx100_lmcache.catalog.Catalog.victims`.

        Parameters
        ----------
        live : int
            How many rows are live.
        top : int
            Rows from here on were never used.
        """
        self._bring_back(now_s, down_mask, top)
        while True:
            chosen, freed = self._walk(blocks, now_s, at_most)
            everything = len(chosen) >= live - self.set_aside
            if freed >= blocks or len(chosen) >= at_most or everything:
                return chosen
            self._sort(max(_FEWEST_SORTED, live // 64, 4 * len(chosen)), now_s, top)

    def _walk(self, blocks: int, now_s: float, at_most: int) -> tuple[list[int], int]:
        columns = self._columns
        chosen: list[tuple[int, int]] = []
        freed = 0
        while freed < blocks and len(chosen) < at_most:
            oldest = self._next()
            if oldest is None:
                break
            used_at, row = oldest
            if columns.state[row] != LIVE or columns.used_at[row] != used_at:
                continue  # gone, or used since
            if not self._put_aside(row, now_s):
                chosen.append(oldest)
                freed += int(columns.blocks[row])
        self._oldest.extendleft(reversed(chosen))  # they may stay, after all
        return [row for _, row in chosen], freed

    def _next(self) -> tuple[int, int] | None:
        if self._back and (not self._oldest or self._back[0] < self._oldest[0]):
            return heapq.heappop(self._back)
        return self._oldest.popleft() if self._oldest else None

    def _put_aside(self, row: int, now_s: float) -> bool:
        """Set a row aside if it may not go at present."""
        columns = self._columns
        if int(columns.members[row]) & self._down_mask:
            self._aside[row] = _AWAY
        elif columns.pins[row] and columns.pinned_until[row] > now_s:
            self._aside[row] = _HELD
            self._look_at = min(self._look_at, int(columns.pinned_until[row]))
        elif columns.readers[row]:
            self._aside[row] = _HELD
        else:
            return False
        self.set_aside += 1
        return True

    def _sort(self, count: int, now_s: float, top: int) -> None:
        """Queue the oldest rows. Not all: sorting a million takes longer than a lookup may."""
        columns = self._columns
        rows = np.flatnonzero((columns.state[:top] == LIVE) & (self._aside[:top] == _CANDIDATE))
        pinned = (columns.pins[rows] > 0) & (columns.pinned_until[rows] > now_s)
        held = pinned | (columns.readers[rows] > 0)
        away = (columns.members[rows] & np.uint16(self._down_mask)) != 0
        self._aside[rows[held]] = _HELD
        self._aside[rows[away]] = _AWAY
        self.set_aside += int(np.count_nonzero(held | away))
        if pinned.any():
            first = int(columns.pinned_until[rows[pinned]].min())
            self._look_at = min(self._look_at, first)
        rows = rows[~(held | away)]
        if count < len(rows):
            rows = rows[np.argpartition(columns.used_at[rows], count)[:count]]
        rows = rows[np.argsort(columns.used_at[rows], kind="stable")]
        self._oldest = deque(zip(columns.used_at[rows].tolist(), rows.tolist(), strict=True))
        self._back.clear()

    def _bring_back(self, now_s: float, down_mask: int, top: int) -> None:
        """Take rows back for which time, or a member that has come back, has done it."""
        if down_mask != self._down_mask:
            self._down_mask = down_mask
            away = np.flatnonzero(self._aside[:top] == _AWAY)
            self._aside[away] = _CANDIDATE
            self.set_aside -= len(away)
            self._forget_order()
        if now_s >= self._look_at:
            held = np.flatnonzero(self._aside[:top] == _HELD)
            until, pins = self._columns.pinned_until[held], self._columns.pins[held]
            running = (pins > 0) & (until > now_s)
            self._look_at = int(until[running].min()) if running.any() else _NEVER
            self._return(held[~running & (self._columns.readers[held] == 0)])

    def _return(self, rows: Rows) -> None:
        if not len(rows):
            return
        self._aside[rows] = _CANDIDATE
        self.set_aside -= len(rows)
        if len(rows) > _MANY:
            self._forget_order()
            return
        used_at = self._columns.used_at[rows].tolist()
        for back in zip(used_at, rows.tolist(), strict=True):
            heapq.heappush(self._back, back)

    def _forget_order(self) -> None:
        self._oldest.clear()
        self._back.clear()

    def let_go(self, rows: Rows) -> None:
        """Note that pins or readers of rows have ended."""
        if not self.set_aside:
            return
        free = (self._columns.pins[rows] == 0) & (self._columns.readers[rows] == 0)
        self._return(rows[free & (self._aside[rows] == _HELD)])

    def let_go_one(self, row: int) -> None:
        """Note that the last reader of a row has ended; its pins may go on, or have run out."""
        if self._aside[row] == _HELD:
            self._aside[row] = _CANDIDATE
            self.set_aside -= 1
            heapq.heappush(self._back, (int(self._columns.used_at[row]), row))

    def remove(self, row: int) -> None:
        """Note that a row is no longer live."""
        if self._aside[row]:
            self._aside[row] = _CANDIDATE
            self.set_aside -= 1

    def clear(self, top: int) -> None:
        """Note that no row is live any more."""
        self._aside[:top] = _CANDIDATE
        self.set_aside = 0
        self._look_at = _NEVER
        self._forget_order()
