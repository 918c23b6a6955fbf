"""A batch of reads in the native pools.

A job with its transfers costs more Python for each object of 1 MiB than moving its bytes does. So
while all goes well there are no jobs: the pools in C count the reads of a batch down, compare
checksums, and Python hears of the end. As soon as one read fails, or the
deadline passes, every object that is not there yet gets an ordinary job for the reads that are
left, and the engine goes on as with any other.

Everything that can fail for want of memory comes before the step that cannot: who fails leaves the
batch as it was, and the next event, or the engine, tries again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fx100_lmcache.engine.bounds import all_within, padded_to
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.jobs import Job, ReadBatch, Status, Transfer
from fx100_lmcache.engine.member_slot import MemberSlot
from fx100_lmcache.engine.native_lane import BATCH_BITS, NativeLane

Flags = npt.NDArray[np.bool_]

_NUMBERS = itertools.count(1 << (63 - BATCH_BITS))  # so that no ticket is that of a single transfer


class NativeBatch:
    """Reads of one batch, in the pools of several members. Thread-safe.

    Parameters
    ----------
    slots : sequence of MemberSlot
        Those in force; a member that comes back meanwhile is of no concern to these reads.
    adopt : callable
        Told how many jobs have taken over reads that are in the pools.
    ended : callable
        Told when the batch is over and what was good in it is reported.
    report : callable
        Reports a job all of whose reads have ended.
    """

    def __init__(
        self,
        batch: ReadBatch,
        slots: Sequence[MemberSlot],
        adopt: Callable[[int], None],
        ended: Callable[[], None],
        report: Callable[[Job], None],
        defects: Defects,
    ) -> None:
        self._batch: ReadBatch | None = batch
        self._all_slots = list(slots)
        self._number = next(_NUMBERS)
        self._slots: dict[int, MemberSlot] = {}
        self._lanes: list[NativeLane] = []
        self._refusals: dict[int, int] = {}
        self._adopt = adopt
        self._ended = ended
        self._report = report
        self._defects = defects
        self._lock = threading.Lock()
        self._handle: object = None
        self._rows: npt.NDArray[np.uint64] | None = None
        self._made: dict[int, Job] = {}

    def prepare(self) -> bool:
        """Lay the reads out; False where single transfers are needed."""
        self._rows = self._layout()
        return self._rows is not None

    def submit(self) -> bool:
        """Queue the reads; False if the engine has been closed, or the deadline passed, meanwhile.

        After an exception nothing is queued either.
        """
        with self._lock:
            if self._batch is None:
                return False
            lanes = self._lanes
            try:
                for lane in lanes:
                    lane.batches[self._number] = self
                self._handle = lanes[0].module.submit_batch(
                    [lane.pool for lane in lanes], self._number << BATCH_BITS, self._rows
                )
            except BaseException:
                self._batch = None
                self._leave_lanes()
                raise
            self._rows = None
        return True

    def give_up(self) -> None:
        """Never queue the reads."""
        with self._lock:
            self._batch = None

    def _layout(self) -> npt.NDArray[np.uint64] | None:
        """Lay the reads out as the pools take them; None if single transfers are needed.

        That is so where a read needs a bounce buffer, a member is not up or has no native lane,
        and where something is wrong: the engine refuses the transfer that is to blame.
        """
        batch = self._batch
        if batch is None or not len(batch.members) or len(batch.members) >> BATCH_BITS:
            return None
        if not all_within(batch, [slot.member for slot in self._all_slots]):
            return None
        on = np.bincount(batch.members, minlength=len(self._all_slots)).tolist()
        self._slots = {m: slot for m, slot in enumerate(self._all_slots) if on[m]}
        self._refusals = {member: slot.refusals for member, slot in self._slots.items()}
        usable = all(slot.health.usable for slot in self._slots.values())
        reads = [slot.reads for slot in self._slots.values()]
        lanes = self._lanes = [lane for lane in reads if isinstance(lane, NativeLane)]
        if not usable or len(lanes) < len(self._slots):
            return None
        places = dict(zip(self._slots, range(len(lanes)), strict=True))
        number = np.array([places.get(m, 0) for m in range(max(places) + 1)])[batch.members]
        fds = [lane.fileno() for lane in lanes]
        align = np.array([lane.align_bytes for lane in lanes])[number]
        padded = padded_to(batch.lengths, align)
        if (batch.addresses % align).any() or (padded > batch.rooms).any() or min(fds) < 0:
            return None
        columns = (
            number,
            np.array(fds)[number],
            batch.addresses,
            batch.rooms,
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

    def conclude(self) -> Sequence[Job]:
        """Report what was read well, and hand the rest over as jobs, which are returned.

        Called when the last read has ended, when one has failed, at the deadline, and when the
        engine is closed. Only the first call does something; one that raises has done nothing.
        """
        with self._lock:
            batch = self._batch
            if batch is None:
                return list(self._made.values())
            if self._handle is None:  # nothing is queued yet, and nothing will be
                self._batch = None
                return ()
            rest, complete = self._hand_over(batch)
            self._batch = None
        try:
            with self._defects.guard("a completion handler failed"):
                if rest:
                    batch.on_good(rest)
        finally:
            self._ended()
            for job in complete:
                self._report(job)
        return list(self._made.values())

    def _hand_over(self, batch: ReadBatch) -> tuple[list[int], list[Job]]:
        """Make jobs of the objects that are not there.

        Returns
        -------
        rest : list of int
            Numbers of the other objects.
        complete : list of Job
            What has become whole since an earlier try.
        """
        good = np.frombuffer(self._lanes[0].module.watch_batch(self._handle), np.bool_)
        owners = np.repeat(np.arange(len(batch.piece_counts)), batch.piece_counts)
        firsts = (np.cumsum(batch.piece_counts) - batch.piece_counts).tolist()
        left = {*owners[~good].tolist(), *self._made}  # what an earlier try began stays a job
        rest = [number for number in range(len(batch.piece_counts)) if number not in left]
        complete: list[Job] = []
        self._note_good(batch, good)
        for number in sorted(left):
            if number not in self._made:
                self._made[number] = batch.job_of(number)
        goods = good.tolist()
        for number in left:
            for place, transfer in enumerate(self._made[number].transfers, firsts[number]):
                if not goods[place]:
                    self._adopt_into_lane(transfer, place)
        # from here on nothing can fail
        for number in left:
            job = self._made[number]
            if self._go_on(job, firsts[number], goods):
                complete.append(job)
        self._adopt(len(left))
        self._leave_lanes()
        return rest, complete

    def _note_good(self, batch: ReadBatch, good: Flags) -> None:
        for member, slot in self._slots.items():
            lengths = batch.lengths[good & (batch.members == member)]
            if len(lengths):
                slot.health.note_success()
                if lengths.max() > slot.max_io_bytes // 2:
                    slot.refusals = 0

    def _adopt_into_lane(self, transfer: Transfer, place: int) -> None:
        """Let the lane find the transfer of a ticket, once the batch has left the lane."""
        lane = self._slots[transfer.member].reads
        assert isinstance(lane, NativeLane)
        lane.adopt(transfer, (self._number << BATCH_BITS) + place)

    def _go_on(self, job: Job, first: int, goods: Sequence[bool]) -> bool:
        """Make a job out of an object's reads, wherever each is; whether all have ended."""
        done = False
        with job.lock:
            for place, transfer in enumerate(job.transfers, first):
                transfer.slot = self._slots[transfer.member]
                transfer.refusals = self._refusals[transfer.member]
                if goods[place]:
                    done = job.end(transfer, Status.OK, transfer.expected or 0)
        return done

    def _leave_lanes(self) -> None:
        for lane in self._lanes:
            lane.batches.pop(self._number, None)
