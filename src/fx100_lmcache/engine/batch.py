"""A batch of reads in the native pools.

A job with its transfers costs some 80 us of Python for each object, which at 1 MiB is more than
moving the bytes does. So while all goes well there are no jobs: the pools in C count the reads of
a batch down, compare checksums, and Python hears of the end. As soon as one read fails, or the
deadline passes, every object that is not there yet gets an ordinary job for the reads that are
left, and the engine goes on as with any other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fx100_lmcache.engine.base import Job, ReadBatch, Status
from fx100_lmcache.engine.native import BATCH_BITS, NativeLane
from fx100_lmcache.engine.slot import MemberSlot

Flags = npt.NDArray[np.bool_]

_NUMBERS = itertools.count(1 << (63 - BATCH_BITS))  # so that no ticket is that of a single transfer


class NativeBatch:
    """Reads of one batch, in the pools of several members. Thread-safe.

    Parameters
    ----------
    slots : sequence of MemberSlot
        Those in force; a member that comes back meanwhile is of no concern to these reads.
    adopt : callable
        Takes over jobs that have reads in the pools.
    ended : callable
        Told when the batch is over and what was good in it is reported.
    """

    def __init__(
        self,
        batch: ReadBatch,
        slots: Sequence[MemberSlot],
        adopt: Callable[[Sequence[Job]], None],
        ended: Callable[[], None],
    ) -> None:
        self._batch: ReadBatch | None = batch
        self._number = next(_NUMBERS)
        on = np.bincount(batch.members, minlength=len(slots)).tolist()  # pieces on each member
        self._slots = {m: slot for m, slot in enumerate(slots) if on[m]}
        self._refusals = {member: slot.refusals for member, slot in self._slots.items()}
        self._adopt = adopt
        self._ended = ended
        self._lock = threading.Lock()
        self._handle: object = None

    def submit(self) -> bool:
        """Queue the reads; False, with nothing done, where single transfers are needed."""
        batch = self._batch
        assert batch is not None
        lanes = [slot.reads for slot in self._slots.values() if slot.health.usable]
        native = [lane for lane in lanes if isinstance(lane, NativeLane)]
        if not native or len(native) < len(self._slots) or len(batch.members) >> BATCH_BITS:
            return False
        rows = self._rows(batch, native)
        if rows is None:
            return False
        with self._lock:
            for lane in native:
                lane.batches[self._number] = self
            try:
                pools = [lane.pool for lane in native]
                self._handle = native[0].module.submit_batch(
                    pools, self._number << BATCH_BITS, rows
                )
            except MemoryError:
                self._leave_lanes()
                return False
        return True

    def _rows(self, batch: ReadBatch, lanes: Sequence[NativeLane]) -> npt.NDArray[np.uint64] | None:
        """Lay the reads out as the pools take them; None if one needs a bounce buffer."""
        places = dict(zip(self._slots, range(len(lanes)), strict=True))
        number = np.array([places.get(m, 0) for m in range(max(places) + 1)])[batch.members]
        fds = [lane.fileno() for lane in lanes]
        align = np.array([lane.align_bytes for lane in lanes])[number]
        padded = -(-batch.lengths // align) * align
        if (batch.addresses % align).any() or (padded > batch.rooms).any() or min(fds) < 0:
            return None
        columns = (
            number,
            np.array(fds)[number],
            batch.addresses,
            batch.lengths,
            padded,
            batch.offsets,
            np.array([lane.max_io_bytes for lane in lanes])[number],
            align,
            batch.checksums,
        )
        rows = np.empty((len(number), len(columns)), np.uint64)
        for place, column in enumerate(columns):
            rows[:, place] = column
        return rows

    def conclude(self) -> None:
        """Report what was read well, and hand the rest over as jobs. Only the first call counts.

        Called when the last read has ended, when one has failed, and at the deadline.
        """
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is None:
                return
            lanes = self._lanes
            good = np.frombuffer(lanes[0].module.watch_batch(self._handle), np.bool_)
            owners = np.repeat(np.arange(len(batch.counts)), batch.counts)
            failed = sorted(set(owners[~good].tolist()))
            jobs = [batch.job_of(number) for number in failed]
            self._note_good(batch, good)
            self._adopt(jobs)
            firsts = np.cumsum(batch.counts) - batch.counts
            for number, job in zip(failed, jobs, strict=True):
                self._go_on(job, int(firsts[number]), good)
            self._leave_lanes()
        try:
            rest = set(range(len(batch.counts))).difference(failed)
            if rest:
                batch.on_good(sorted(rest))
        finally:
            self._ended()

    @property
    def _lanes(self) -> list[NativeLane]:
        return [slot.reads for slot in self._slots.values() if isinstance(slot.reads, NativeLane)]

    def _note_good(self, batch: ReadBatch, good: Flags) -> None:
        for member, slot in self._slots.items():
            lengths = batch.lengths[good & (batch.members == member)]
            if len(lengths):
                slot.health.note_success()
                if lengths.max() > slot.max_io_bytes // 2:
                    slot.refusals = 0

    def _go_on(self, job: Job, first: int, good: Flags) -> None:
        """Make a job out of an object's reads, wherever each of them is."""
        job.remaining = 0
        for place, transfer in enumerate(job.transfers, first):
            slot = self._slots[transfer.member]
            transfer.slot, transfer.refusals = slot, self._refusals[transfer.member]
            transfer.ticket = (self._number << BATCH_BITS) + place
            if good[place]:
                transfer.status, transfer.checksum = Status.OK, transfer.expected or 0
            else:
                job.remaining += 1
        for place, transfer in enumerate(job.transfers, first):
            lane = self._slots[transfer.member].reads
            if not good[place] and isinstance(lane, NativeLane):
                lane.adopt(transfer)

    def _leave_lanes(self) -> None:
        for lane in self._lanes:
            lane.batches.pop(self._number, None)
