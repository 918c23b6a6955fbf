"""Which entries go, and when: ahead of need, for puts that wait, and from scattered frames."""

from __future__ import annotations

import enum

from fx100_lmcache.store.erase import Eraser
from fx100_lmcache.store.state import Core
from fx100_lmcache.store.waiting import Put, WaitingRoom

_AT_ONCE = 64  # entries evicted without letting go of the lock, so that lookups go between


class Outlook(enum.Enum):
    """What a put that found no space can hope for."""

    LATER = "later"
    """Space is on its way: look again when an erase ends."""
    AGAIN = "again"
    """More has to be evicted: go on when others have had the lock."""
    NEVER = "never"
    """Nothing more can be evicted for it."""


class Evictor:
    """Evicts. The lock is held in all methods."""

    def __init__(self, core: Core, eraser: Eraser) -> None:
        self._core = core
        self._eraser = eraser

    def keep_reserve(self) -> None:
        """Evict ahead of need, a batch at a time, so that puts do not wait for erases."""
        core = self._core
        kept, batch = core.options.reserve_fraction, core.options.evict_batch_fraction
        stocks = core.stocks(core.closed_mask())
        if blocks := stocks.blocks.to_evict(kept, core.ledger.erasing_blocks, batch):
            self._evict_oldest(blocks)
        if inodes := stocks.inodes.to_evict(kept, core.ledger.erases_in_flight, batch):
            self._evict_entries(inodes)

    def make_room(self, put: Put, room: WaitingRoom) -> Outlook:
        """Evict for the puts that wait, of which the first one has found no space.

        First the oldest entries, until what all of them need is free or being erased. If that is
        so and the first one still finds nothing, its space is scattered: then what lies in frames
        that are nearly free goes, and at last the oldest once more.
        """
        ledger = self._core.ledger
        evicted = self.make_up(room)
        if evicted or put.erases_ahead is None:
            put.erases_ahead = ledger.erases_begun
        if ledger.erases_in_flight and ledger.erases_ended < put.erases_ahead:
            short = evicted and self._is_short(room.blocks, len(room))
            return Outlook.AGAIN if short else Outlook.LATER
        return self._for_first(put)

    def make_up(self, room: WaitingRoom) -> int:
        """Evict what is short for all puts that wait; return how many entries went."""
        blocks = self._missing_blocks(room.blocks)
        if blocks > 0:
            return self._evict_oldest(blocks)
        return self._evict_entries(self._missing_inodes(len(room)))

    def _for_first(self, put: Put) -> Outlook:
        """Help a put that has found no space although what it waited for has ended."""
        core = self._core
        evicted = 0
        if not self._is_short(put.blocks, 1):  # else nothing can be evicted
            frame = core.geometry.frame_blocks
            if put.attempts == 0:
                put.attempts = 1
                evicted = self._empty_frames(-(-put.blocks // frame))
            if not evicted and put.attempts == 1:
                put.attempts = 2
                evicted = self._evict_oldest(max(put.blocks, 2 * frame))
        if not evicted and not core.ledger.erases_in_flight:
            return Outlook.NEVER
        put.erases_ahead = core.ledger.erases_begun
        return Outlook.LATER

    def _missing_blocks(self, wanted: int) -> int:
        core = self._core
        free = core.space.free_blocks_up(core.closed_mask())
        return wanted - free - core.ledger.erasing_blocks

    def _missing_inodes(self, wanted: int) -> int:
        core = self._core
        free = core.space.free_slots_up(core.closed_mask())
        return wanted - free - core.ledger.erases_in_flight

    def _is_short(self, blocks: int, inodes: int) -> bool:
        return self._missing_blocks(blocks) > 0 or self._missing_inodes(inodes) > 0

    def _evict_oldest(self, blocks: int) -> int:
        core = self._core
        now, closed = core.engine.now(), core.closed_mask() | self._eraser.refusing_mask
        return self._evict(core.catalog.victims(blocks, now, closed, _AT_ONCE))

    def _evict_entries(self, count: int) -> int:
        if count <= 0:
            return 0
        core = self._core
        now, closed = core.engine.now(), core.closed_mask() | self._eraser.refusing_mask
        every_block = core.space.total_blocks + 1
        return self._evict(core.catalog.victims(every_block, now, closed, min(count, _AT_ONCE)))

    def _empty_frames(self, frames: int) -> int:
        """Empty shared frames, whatever the age of what is in them.

        For an object that needs whole frames when free blocks are many but scattered. The frames
        with most room are chosen, so that few entries have to go.
        """
        core = self._core
        now, closed = core.engine.now(), core.closed_mask() | self._eraser.refusing_mask
        rows: set[int] = set()
        for member, frame in core.space.roomiest(closed, 2 * frames):
            there = core.space.tenants(member, frame)
            if all(core.catalog.evictable(row, now, closed) for row in there):
                rows.update(there)
                frames -= 1
                if frames == 0:
                    break
        return self._evict(sorted(rows))

    def _evict(self, rows: list[int]) -> int:
        core = self._core
        if self._eraser.failing:  # what is evicted now would be lost for nothing
            return 0
        gone = [entry for entry in map(self._eraser.drop, rows) if entry is not None]
        core.counts["evictions"] += len(gone)
        if gone:
            core.tell_evicted([(entry.digest, entry.length, entry.meta) for entry in gone])
        return len(gone)
