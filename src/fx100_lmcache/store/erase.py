"""Take entries out of the store: hide, erase the inode, free the space after the last reader.

The inode is erased on the media before its slot and blocks are used again; otherwise a crash
could bring the entry back over somebody else's data. It is erased at once: readers need the
entry's blocks, and its row, which counts them, but not its inode. So another copy may be put as
soon as the old inode is gone, into another slot and other blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.catalog.catalog import Entry
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.ondisk.inode import InodePlace, parse_table
from fx100_lmcache.space.ledger import Use
from fx100_lmcache.space.space import Extent, extent_of
from fx100_lmcache.store.backing import without_space
from fx100_lmcache.store.state import Core

log = logging.getLogger(__name__)

_RETRIES = 16  # of what could not be erased, in one go
_MANY_FAILED = 64
_RETRY_PAUSE_S = 1.0  # after a retry that failed


@dataclass(frozen=True, slots=True)
class _Victim:
    """An inode to erase, and what is free afterwards."""

    extent: Extent
    digest: bytes
    published: bool
    retried: bool = False


class Eraser:
    """Erases inodes, and knows of which objects there may still be one on the media."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._inodes: dict[bytes, set[int]] = {}  # rows whose inode is to go, by digest
        self._erased_being_read: dict[int, _Victim] = {}
        self._failed: deque[_Victim] = deque()
        self._retry_at = float("-inf")
        self._refusing = 0
        self._alarm_set = False
        self._awaited: set[bytes] = set()
        self._changed: list[bytes] = []
        self._failures = BurstLog(log, "inodes not erased")

    def drop(self, row: int) -> Entry | None:
        """Hide an entry and erase its inode; None if it is not live. The lock is held."""
        core = self._core
        self.retry_failed()
        if not core.catalog.is_live(row):
            return None
        entry = core.catalog.entry(row)
        self.hidden(row, entry.digest, core.catalog.blocks(row))
        core.catalog.drop(row)
        self._erase(self._victim(entry))
        return entry

    def hidden(self, row: int, digest: bytes, blocks: int) -> None:
        """Note that an entry was hidden, and its inode is on its way out. The lock is held."""
        self._core.ledger.retire(row, blocks)
        self._expect(row, digest)

    def erase_hidden(self, row: int) -> None:
        """Erase the inode of a hidden entry. The lock is held."""
        self._erase(self._victim(self._core.catalog.entry(row)))

    def forget(self, row: int) -> None:
        """Take a hidden entry's inode as erased, since it no longer counts. The lock is held."""
        self._gone(self._victim(self._core.catalog.entry(row)))

    def read_out(self, rows: Iterable[int]) -> None:
        """Free hidden entries whose last reader has ended. The lock is held."""
        for row in rows:
            victim = self._erased_being_read.pop(row, None)
            if victim is not None:
                self._free(victim)
            else:  # its inode is not erased yet, perhaps since its member was stuck
                self.retry_failed()

    def erase_unpublished(self, extent: Extent, digest: bytes) -> None:
        """Erase an inode that may have been written but was never published. The lock is held."""
        self._core.ledger.erase(extent.row)
        self._expect(extent.row, digest)
        self._erase(_Victim(extent, digest, published=False))

    def quarantine_unpublished(self, extent: Extent, digest: bytes, *, retry: bool) -> None:
        """Keep the space of a put whose inode may be there, or may yet come. The lock is held.

        Parameters
        ----------
        retry : bool
            Erase it at the next opportunity; otherwise :meth:`erase_unpublished` will be called.
        """
        self._core.ledger.quarantine(extent.row)
        self._expect(extent.row, digest)
        if retry:
            self._try_again_later(_Victim(extent, digest, published=False))

    def erase_stale(self, rows: list[int]) -> None:
        """Erase inodes that recovery rejected; their slots are taken until then."""
        with self._core.lock:
            for row in rows:
                self._core.space.hold_slot(row)
                self._core.ledger.erase_stale(row)
                self._erase(_Victim(Extent(row, ()), b"", published=False))

    @property
    def unerased(self) -> int:
        """Inodes that could not be erased and wait for another attempt."""
        return len(self._failed)

    def leaving(self, digest: bytes) -> bool:
        """Whether the media may hold an inode of this object that is on its way out.

        A put of it waits: with two inodes, a crash could bring the old one back.
        """
        return digest in self._inodes

    def in_flight(self, digest: bytes) -> bool:
        """Whether such an inode is being erased now, so that waiting for it makes sense."""
        ledger = self._core.ledger
        return any(ledger.use(row) is Use.ERASING for row in self._inodes.get(digest, ()))

    def await_change(self, digest: bytes) -> None:
        """Have :meth:`take_changed` return this object when something has come of its erase."""
        self._awaited.add(digest)

    def take_changed(self) -> bytes | None:
        """Return an awaited object whose inode was, or could not be, erased; once."""
        return self._changed.pop() if self._changed else None

    @property
    def failing(self) -> bool:
        """Whether erases fail again and again although every member is up."""
        return len(self._failed) >= _MANY_FAILED and not self._core.closed_mask()

    @property
    def refusing_mask(self) -> int:
        """Bit map of the members without space below that refuse what was written before, too.

        Storage that copies on write does. What is evicted there is lost for nothing.
        """
        return self._refusing

    def retry_failed(self, at_most: int = _RETRIES) -> None:
        """Try again what could not be erased while its member was away. The lock is held."""
        core = self._core
        if not self._failed or core.engine.now() < self._retry_at:
            return
        if not core.engine.open_to_writes():
            return
        down = core.closed_mask()
        for _ in range(min(at_most, len(self._failed))):
            victim = self._failed.popleft()
            if down >> core.geometry.place(victim.extent.row)[0] & 1:
                self._failed.append(victim)
            else:
                core.ledger.erase(victim.extent.row)
                self._erase(replace(victim, retried=True))

    def _try_again_later(self, victim: _Victim) -> None:
        """Keep what could not be erased: for the next one who comes by, or for a second."""
        core = self._core
        self._failed.append(victim)
        if not self._alarm_set and not core.closing:
            self._alarm_set = True
            due = core.engine.now() + _RETRY_PAUSE_S
            core.engine.call_at(due, partial(self._ring, due))

    def _ring(self, due: float) -> None:
        core = self._core
        with core.lock:
            self._alarm_set = False
            if core.engine.now() < due:  # the engine closes: nothing can be erased any more
                return
            self.retry_failed()
            if self._failed:
                self._try_again_later(self._failed.pop())

    def _expect(self, row: int, digest: bytes) -> None:
        self._inodes.setdefault(digest, set()).add(row)

    def _victim(self, entry: Entry) -> _Victim:
        extent = extent_of(entry.row, (location for location, _ in entry.pieces))
        return _Victim(extent, entry.digest, published=True)

    def _erase(self, victim: _Victim) -> None:
        core = self._core
        try:
            core.send(self._job(victim))
        except Exception:
            log.exception("internal error: an erase could not be begun; it is tried again")
            core.count_fault()
            core.ledger.quarantine(victim.extent.row)
            self._try_again_later(victim)
            self._note_change(victim.digest)

    def _job(self, victim: _Victim) -> Job:
        core = self._core
        member, shard, slot = core.geometry.place(victim.extent.row)
        offset = core.geometry.slot_offset(member, shard, slot)
        transfer = Transfer(member, offset, core.zeros, 0, core.geometry.inode_bytes)
        deadline = core.engine.now() + core.options.store_s

        def done(job: Job) -> None:
            self._erased(job.transfers[0], victim)

        def late(transfer: Transfer) -> None:
            self._late(transfer, victim)

        return Job(True, [transfer], deadline, done, late)

    def _erased(self, transfer: Transfer, victim: _Victim) -> None:
        core = self._core
        with core.lock:
            if without_space([transfer]):
                core.backing.note_failed([transfer])
                self._look_back(victim)
                return
            if transfer.status is Status.OK:
                self._gone(victim)
                if victim.retried:  # it works again
                    self.retry_failed(at_most=1)
                return
            reason = f"{transfer.error or transfer.status.value}"
            self._not_erased(victim, reason, in_kernel=transfer.in_kernel)

    def _not_erased(self, victim: _Victim, reason: str, *, in_kernel: bool = False) -> None:
        """Keep the slot and blocks of an inode that may still be there, and try again later."""
        core = self._core
        core.ledger.quarantine(victim.extent.row)
        core.counts["erase_failures"] += 1
        if not in_kernel:
            self._try_again_later(victim)
        if victim.retried:
            self._retry_at = core.engine.now() + _RETRY_PAUSE_S
        self._note_change(victim.digest)
        self._failures.note(reason)

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
                if there:
                    self._refusing |= 1 << member
                    self._not_erased(victim, "no space below")
                else:
                    self._gone(victim)
                    if not victim.published:
                        core.backing.hold_slot(victim.extent.row)

        deadline = core.engine.now() + core.options.load_s
        core.send(Job(False, [transfer], deadline, done))

    def _late(self, transfer: Transfer, victim: _Victim) -> None:
        with self._core.lock:
            if transfer.error is not None:
                self._try_again_later(victim)
            else:
                self._gone(victim)

    def _gone(self, victim: _Victim) -> None:
        """Note that an inode is erased, or no longer counts."""
        core, row = self._core, victim.extent.row
        self._refusing &= ~(1 << core.geometry.place(row)[0])
        rows = self._inodes.get(victim.digest, set())
        rows.discard(row)
        if not rows:
            self._inodes.pop(victim.digest, None)
        self._note_change(victim.digest)
        if victim.published and core.catalog.being_read(row):
            core.ledger.keep_for_readers(row)
            self._erased_being_read[row] = victim
        else:
            self._free(victim)

    def _note_change(self, digest: bytes) -> None:
        if digest in self._awaited:
            self._awaited.discard(digest)
            self._changed.append(digest)
        self._core.wake()

    def _free(self, victim: _Victim) -> None:
        core = self._core
        if victim.published:
            core.space.note_written(victim.extent)
        core.free(victim.extent)
        if victim.published:
            core.catalog.release(victim.extent.row)
