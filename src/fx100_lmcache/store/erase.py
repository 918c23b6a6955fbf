"""Evict and remove, one path: hide, wait for readers, erase the inode, free the space.

The inode is erased on the media before its slot and blocks are used again; otherwise a crash
could bring the entry back over somebody else's data.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.engine.base import Job, Status, Transfer
from fx100_lmcache.ondisk.inode import InodePlace, parse_table
from fx100_lmcache.space import Extent, extent_of
from fx100_lmcache.store.backing import without_space
from fx100_lmcache.store.core import Core

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Victim:
    """An inode to erase, and what is free afterwards."""

    extent: Extent
    digest: bytes
    published: bool


class Eraser:
    """Takes entries out of the store."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._failed: list[_Victim] = []
        self._failures = BurstLog(log, "inodes not erased")

    def drop(self, row: int) -> None:
        """Hide a live entry and erase it as soon as nobody reads it. The lock is held."""
        core = self._core
        self.retry_failed()
        core.dying.add(core.catalog.drop(row).digest)
        core.erasing_blocks += core.catalog.blocks(row)
        if not core.catalog.being_read(row):
            self.erase_hidden(row)

    def evict(self, blocks: int, at_most: int = 1 << 62) -> int:
        """Drop least recently used entries worth ``blocks``; return how many were dropped."""
        core = self._core
        if blocks <= 0:
            return 0
        now, closed = core.engine.now(), core.closed_mask()
        return self._evict(core.catalog.victims(blocks, now, closed, at_most))

    def evict_oldest(self, count: int) -> int:
        """Drop so many of the least recently used entries, however large they are."""
        return self.evict(1 << 62, at_most=count) if count > 0 else 0

    def evict_frames(self, frames: int) -> int:
        """Empty shared frames, whatever the age of what is in them.

        For an object that needs whole frames when free blocks are many but scattered. The frames
        with most room are chosen, so that few entries have to go.
        """
        core = self._core
        now, down = core.engine.now(), core.closed_mask()
        rows: set[int] = set()
        for member, blocks in core.space.roomiest(down, 2 * frames):
            there = core.catalog.rows_on(member, blocks)
            if all(core.catalog.evictable(row, now, down) for row in there):
                rows.update(there)
                frames -= 1
                if frames == 0:
                    break
        return self._evict(sorted(rows))

    def _evict(self, rows: list[int]) -> int:
        core = self._core
        told = []
        for row in rows:
            # an erase that ends at once lets a put go on, which may have evicted this one, too
            if core.catalog.is_live(row):
                entry = core.catalog.entry(row)
                told.append((entry.digest, entry.length, entry.meta))
                self.drop(row)
        core.counts["evictions"] += len(told)
        if told:
            core.on_evicted(told)
        return len(told)

    def erase_hidden(self, row: int) -> None:
        """Erase a hidden entry that nobody reads, then forget it. The lock is held."""
        self._erase(self._victim(row))

    def forget(self, row: int) -> None:
        """Free a hidden entry whose inode no longer counts. The lock is held."""
        victim = self._victim(row)
        self._core.erasing_blocks -= victim.extent.blocks
        self._free(victim)

    def erase_unpublished(self, extent: Extent, digest: bytes) -> None:
        """Erase an inode that may have been written but was never published."""
        with self._core.lock:
            self._core.dying.add(digest)
            self._core.erasing_blocks += extent.blocks
            self._erase(_Victim(extent, digest, published=False))

    def erase_stale(self, rows: list[int]) -> None:
        """Erase inodes that recovery rejected; their slots are taken until then."""
        with self._core.lock:
            for row in rows:
                self._core.space.hold_slot(row)
                self._erase(_Victim(Extent(row, ()), b"", published=False))

    @property
    def unerased(self) -> int:
        """Inodes that could not be erased and wait for another attempt."""
        return len(self._failed)

    @property
    def underway(self) -> int:
        """Inodes that are being erased, or will be when their last reader is done."""
        return max(0, len(self._core.dying) - len(self._failed))

    def retry_failed(self) -> None:
        """Try again what could not be erased while a member was away. The lock is held."""
        if self._failed and not self._core.closed_mask():
            failed, self._failed = self._failed, []
            for victim in failed:
                self._core.quarantined_blocks -= victim.extent.blocks
                self._core.erasing_blocks += victim.extent.blocks
                self._erase(victim)

    def _victim(self, row: int) -> _Victim:
        entry = self._core.catalog.entry(row)
        extent = extent_of(row, (location for location, _ in entry.pieces))
        return _Victim(extent, entry.digest, published=True)

    def _erase(self, victim: _Victim) -> None:
        core = self._core
        member, shard, slot = core.geometry.place(victim.extent.row)
        offset = core.geometry.slot_offset(member, shard, slot)
        transfer = Transfer(member, offset, core.zeros, 0, core.geometry.inode_bytes)
        deadline = core.engine.now() + core.options.store_s

        def done(job: Job) -> None:
            self._erased(job.transfers[0], victim)

        def late(transfer: Transfer) -> None:
            self._late(transfer, victim)

        core.engine.submit([Job(True, [transfer], deadline, done, late)])

    def _erased(self, transfer: Transfer, victim: _Victim) -> None:
        core = self._core
        with core.lock:
            if without_space([transfer]):
                core.backing.note_failed([transfer])
                self._look_back(victim)
                return
            core.erasing_blocks -= victim.extent.blocks
            if transfer.status is Status.OK:
                self._free(victim)
            else:
                # the inode may still be there: its slot and blocks must not be used again
                core.quarantined_blocks += victim.extent.blocks
                core.counts["erase_failures"] += 1
                if not transfer.in_kernel:
                    self._failed.append(victim)
                self._failures.note(f"{transfer.error or transfer.status.value}")
        core.space_freed()

    def _look_back(self, victim: _Victim) -> None:
        """Read an inode that could not be erased for want of space: it may never have been there.

        One that was to be written found no space either, as a rule.
        """
        core = self._core
        member, shard, slot = core.geometry.place(victim.extent.row)
        place = InodePlace(core.volume, shard, member, slot)
        buffer = core.inodes.take()
        transfer = Transfer(
            member, core.geometry.slot_offset(member, shard, slot), buffer, 0, buffer.length
        )

        def done(job: Job) -> None:
            read = job.transfers[0]
            table = parse_table(buffer.view, place, inode_bytes=buffer.length)
            there = read.status is not Status.OK or len(table.slots) > 0
            if not read.in_kernel:
                core.inodes.give_back(buffer)
            with core.lock:
                core.erasing_blocks -= victim.extent.blocks
                if there:
                    core.quarantined_blocks += victim.extent.blocks
                    core.counts["erase_failures"] += 1
                    self._failed.append(victim)
                    self._failures.note("no space below")
                else:
                    self._free(victim)
                    if not victim.published:
                        core.backing.hold_slot(victim.extent.row)
            core.space_freed()

        deadline = core.engine.now() + core.options.load_s
        core.engine.submit([Job(False, [transfer], deadline, done)])

    def _late(self, transfer: Transfer, victim: _Victim) -> None:
        core = self._core
        with core.lock:
            if transfer.error is not None:
                self._failed.append(victim)
                return
            core.quarantined_blocks -= victim.extent.blocks
            self._free(victim)
        core.space_freed()

    def _free(self, victim: _Victim) -> None:
        core = self._core
        if victim.published:
            core.space.note_written(victim.extent)
        core.space.free(victim.extent)
        core.dying.discard(victim.digest)
        if victim.published:
            core.catalog.release(victim.extent.row)
        else:
            core.reserved_blocks -= victim.extent.blocks
