"""The engine: lanes for every member, deadlines, retries in smaller calls, health, probes."""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from fx100_lmcache.engine.base import Job, MemberState, ReadBatch, Status, Transfer
from fx100_lmcache.engine.batch import NativeBatch
from fx100_lmcache.engine.expiry import Alarm, Expiry
from fx100_lmcache.engine.lane import Lane
from fx100_lmcache.engine.native import NativeLane
from fx100_lmcache.engine.slot import (
    LANES,
    EngineOptions,
    LaneFactory,
    MemberSlot,
    ThreadedLanes,
)
from fx100_lmcache.members.base import Member

log = logging.getLogger(__name__)

SMALLEST_IO_BYTES = 128 * 1024
RETIRED_S = 2.0  # a replaced member is kept open at least so long
MAX_STUCK = 64  # transfers of one member that may be left in the kernel, over all its returns
_SLICE = 32  # jobs submitted at a time: the first reads are under way while the next are made
_PAGE_BYTES = 4096  # no logical block is larger
_IO_ERROR_LIMIT_BYTES = 512 * 1024  # nothing is known that answers EIO to these for their size
_TOO_LARGE_ERRORS = frozenset({errno.EIO, errno.EINVAL, errno.EREMOTEIO})

Probe = Callable[[int, Member], "Member | None"]


class LaneEngine:
    """Threads for every member.

    Parameters
    ----------
    members : sequence of Member
        In stripe order.
    lanes : LaneFactory or None
        Where tests put lanes of their own; then nothing runs in the background, and
        :meth:`expire_due` and :meth:`probe` are called by hand.
    probe : callable or None
        ``probe(index, member)`` reads the label and returns the member to use from now on (the
        same one, or a freshly opened one), or None. Called on a thread of its own.
    """

    def __init__(
        self,
        members: Sequence[Member],
        options: EngineOptions,
        probe: Probe | None = None,
        *,
        lanes: LaneFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._clock = clock
        self._lanes = lanes or ThreadedLanes(options)
        self.kind = self._lanes.kind
        self._probe = probe
        self._expiry: Expiry[Job | NativeBatch | Alarm] = Expiry()
        self._closing = threading.Event()
        self.bounced_transfers = 0
        self._count_lock = threading.Lock()
        self._slots = [self._equip(i, m) for i, m in enumerate(members)]
        self._retired: list[MemberSlot] = []
        if lanes is None:
            self._start(self._watch, "fx100-deadlines")
            for index in range(len(members)):
                self._start(functools.partial(self._probe_loop, index), f"fx100-probe-{index}")

    def _start(self, target: Callable[[], None], name: str) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def _equip(self, index: int, member: Member) -> MemberSlot:
        slot = MemberSlot(
            index, member, max(1, self._options.max_io_bytes // _PAGE_BYTES) * _PAGE_BYTES
        )

        def finish(
            transfer: Transfer, status: Status, checksum: int, problem: OSError | None
        ) -> None:
            self._finish(slot, transfer, status, checksum, problem)

        for kind in LANES:
            setattr(slot, kind, self._lanes.make(kind, slot, finish))
        return slot

    def now(self) -> float:
        """Return the clock, by default the monotonic one."""
        return self._clock()

    @property
    def open_jobs(self) -> int:
        """Return how many jobs, and batches of reads, are not reported."""
        return self._expiry.open

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs."""
        queued: dict[int, tuple[Lane, list[Transfer]]] = {}
        refused: list[tuple[MemberSlot, Transfer]] = []
        bounced = 0
        now = self.now()
        for job in jobs:
            for transfer in job.transfers:
                slot = self._slots[transfer.member]
                if not slot.health.usable or self._closing.is_set() or job.deadline <= now:
                    refused.append((slot, transfer))
                    continue
                transfer.refusals = slot.refusals
                transfer.slot = slot
                lane = self._lane_for(slot, transfer)
                bounced += lane is slot.bounced
                queued.setdefault(id(lane), (lane, []))[1].append(transfer)
        self._open_all(jobs)
        with self._count_lock:
            self.bounced_transfers += bounced
        for lane, transfers in queued.values():
            lane.submit(transfers)
        if self._closing.is_set():  # meanwhile, and these were not seen there
            for job in jobs:
                self._expire(job)
        for slot, transfer in refused:
            self._refuse(slot, transfer, late=transfer.job.deadline <= now)
        for job in jobs:
            if not job.transfers and not job.reported:
                self._report(job)

    def read(self, batches: Sequence[ReadBatch]) -> None:
        """Queue reads: without a job for each object while all goes well, if that is possible."""
        for batch in batches:
            self._queue_batch(batch)
        for slot in self._slots:
            if isinstance(slot.reads, NativeLane):
                slot.reads.wake()

    def _queue_batch(self, batch: ReadBatch) -> None:
        native = NativeBatch(batch, self._slots, self._open_all, self._expiry.end)
        self._expiry.begin()
        if self._closing.is_set() or batch.deadline <= self.now() or not native.submit():
            for at in range(0, len(batch.counts), _SLICE):
                numbers = range(at, min(at + _SLICE, len(batch.counts)))
                self.submit([batch.job_of(number) for number in numbers])
            self._expiry.end()
            return
        self._expiry.push(batch.deadline, native)
        if self._closing.is_set():  # meanwhile, and this was not seen there
            self._expire(native)

    def _open_all(self, jobs: Sequence[Job]) -> None:
        """Count jobs as open until they are reported."""
        self._expiry.begin(len(jobs))
        for job in jobs:
            self._expiry.push(job.deadline, job)

    def _refuse(self, slot: MemberSlot, transfer: Transfer, *, late: bool) -> None:
        if late:
            self._settle(slot, transfer, Status.TIMED_OUT, 0, None)
        else:
            problem = OSError(errno.ENODEV, f"{slot.member.name} is {slot.health.state}")
            self._settle(slot, transfer, Status.ERROR, 0, problem)

    def _lane_for(self, slot: MemberSlot, transfer: Transfer) -> Lane:
        align = slot.member.logical_block_bytes
        if not transfer.buffer.fits_directly(transfer.start, transfer.length, align):
            return slot.bounced
        return slot.writes if transfer.job.write else slot.reads

    def _finish(
        self,
        slot: MemberSlot,
        transfer: Transfer,
        status: Status,
        checksum: int,
        problem: OSError | None,
    ) -> None:
        """Take a transfer back from a lane."""
        if problem is None:
            slot.health.note_success()
            slot.learn_limit(transfer)
        elif self._retry_smaller(slot, transfer, problem):
            return
        else:
            transfer.first_failure = slot.health.note_error(problem)
            slot.troubles.note(str(problem))
        self._settle(slot, transfer, status, checksum, problem)

    def _retry_smaller(self, slot: MemberSlot, transfer: Transfer, problem: OSError) -> bool:
        """Try again in calls of half the size: some targets refuse large ones."""
        smaller = (transfer.max_io_bytes or slot.max_io_bytes) // 2
        while smaller and smaller >= transfer.length:
            smaller //= 2
        smaller = smaller // SMALLEST_IO_BYTES * SMALLEST_IO_BYTES
        with transfer.job.lock:
            if (
                transfer.status is not Status.PENDING
                or transfer.stuck  # the deadline has passed
                or problem.errno not in _TOO_LARGE_ERRORS
                or smaller == 0
            ):
                return False
            if 0 < transfer.max_io_bytes <= _IO_ERROR_LIMIT_BYTES and problem.errno != errno.EINVAL:
                return False  # that is a broken device, not a limit
            transfer.max_io_bytes = smaller
            transfer.started = False
            transfer.error = problem
        slot.troubles.note(f"{problem}; trying again in smaller calls")
        self._lane_for(slot, transfer).submit([transfer])
        return True

    def _settle(
        self,
        slot: MemberSlot,
        transfer: Transfer,
        status: Status,
        checksum: int,
        problem: OSError | None,
    ) -> None:
        job = transfer.job
        with job.lock:
            late = transfer.in_kernel
            transfer.checksum, transfer.error = checksum, problem
            if not late:
                transfer.status = status
                job.remaining -= 1
            done = not late and job.remaining == 0
            if late and not job.reported:
                job.returned.append(transfer)
                late = False  # told after on_done
        if transfer.stuck:
            slot.health.note_returned(works=problem is None)
        if late and job.on_late is not None:
            job.on_late(transfer)
        if done:
            self._report(job)

    def _report(self, job: Job) -> None:
        job.finished_at = self.now()
        late = job.on_late
        try:
            job.on_done(job)
        finally:
            with job.lock:
                job.reported = True
                returned, job.returned = job.returned, []
            # the expiry queue keeps the job until its deadline: let go of the caller's memory
            if not any(transfer.in_kernel for transfer in job.transfers):
                job.on_late = None
            job.transfers, job.on_done = (), _reported
            self._expiry.end()
        for transfer in returned:
            if late is not None:
                late(transfer)

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                self.expire_due()
            except Exception:
                log.exception("a completion handler failed")
            self._expiry.wait(self.now())

    def expire_due(self) -> None:
        """Expire the jobs whose deadlines have passed."""
        while (job := self._expiry.pop(self.now())) is not None:
            self._expire(job)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call something once: at this time, or when the engine closes."""
        self._expiry.push(when, Alarm(call))

    def _expire(self, job: Job | NativeBatch | Alarm) -> None:
        """Cancel what is queued; leave what the kernel has, to be reported late."""
        if isinstance(job, Alarm):
            job.ring()
            return
        if isinstance(job, NativeBatch):
            job.conclude()  # what is left of it are jobs, which have expired
            return
        with job.lock:
            if job.remaining == 0:
                return
            for transfer in job.transfers:
                slot = transfer.slot  # not the one in force: that may be another device by now
                if transfer.status is not Status.PENDING or not isinstance(slot, MemberSlot):
                    continue  # settled, or about to be refused
                lane = self._lane_for(slot, transfer)
                if not lane.cancel(transfer):
                    transfer.stuck = True
                    if slot.health.usable:  # the first one says it all
                        log.error("%s: a transfer is stuck in the kernel", slot.member.name)
                    slot.health.note_stuck()
                    if job.hold and lane is not slot.bounced:
                        continue
                    transfer.in_kernel = True
                transfer.status = Status.TIMED_OUT
                job.remaining -= 1
            done = job.remaining == 0
        if done:
            self._report(job)

    def _probe_loop(self, index: int) -> None:
        while not self._closing.wait(self._options.probe_interval_s):
            try:
                self.probe(index)
            except Exception:
                log.exception("probe of member %d failed", index)

    def probe(self, index: int) -> None:
        """Look whether a member that is not up works again, perhaps under another name."""
        self._close_idle_retired()
        slot = self._slots[index]
        if self._probe is None or slot.health.usable:
            return
        before = slot.health.state
        found = self._probe(index, slot.member)
        if found is None:
            slot.health.note_probe(works=False)
        elif self._closing.is_set():
            if found is not slot.member:
                found.close()
        elif found is slot.member:
            slot.health.note_probe(works=True)
            log.warning("%s: up again (was %s)", found.name, before)
        elif self._stuck_at(index) > MAX_STUCK:
            log.error("%s: %d transfers are stuck; not replaced", found.name, MAX_STUCK)
            found.close()
        else:
            self._slots[index] = self._equip(index, found)
            slot.retired_at = self.now()
            self._retired.append(slot)
            slot.close()
            log.warning("%s: back as %s", slot.member.name, found.name)

    def _stuck_at(self, index: int) -> int:
        slots = [self._slots[index], *self._retired]
        return sum(slot.health.stuck for slot in slots if slot.index == index)

    def _close_idle_retired(self) -> None:
        # only when the kernel has let go, and whoever was just submitting: its descriptor must not
        # be reused under a transfer
        until = self.now() - RETIRED_S
        for slot in [slot for slot in self._retired if slot.idle and slot.retired_at <= until]:
            self._retired.remove(slot)
            slot.member.close()

    def member(self, index: int) -> Member:
        """Return the member in use at a place of the stripe."""
        return self._slots[index].member

    def down_mask(self) -> int:
        """Bit map of the members that are not up."""
        return sum(1 << slot.index for slot in self._slots if not slot.health.usable)

    def states(self) -> list[MemberState]:
        """Report every member's health."""
        return [
            MemberState(
                s.member.name,
                s.health.state,
                s.member.io_mode,
                s.max_io_bytes,
                self._stuck_at(s.index),
                s.health.errors,
                s.health.last_error,
            )
            for s in self._slots
        ]

    def flush(self) -> None:
        """Flush every member that is up."""
        for slot in self._slots:
            if slot.health.usable:
                slot.member.flush()

    def close(self, deadline_s: float) -> int:
        """Wait for open jobs, and for what is stuck, until the deadline; then stop."""
        until = time.monotonic() + deadline_s
        while (self.open_jobs or self._stuck()) and (left_s := until - time.monotonic()) > 0:
            self._expiry.wait_for_end(min(0.1, left_s))
        self._closing.set()
        while (job := self._expiry.pop(float("inf"))) is not None:
            self._expire(job)
        for slot in self._slots:
            slot.close()
        for slot in self._retired:
            if slot.idle:
                slot.member.close()
        self._lanes.close()
        return self._stuck()

    def _stuck(self) -> int:
        return sum(self._stuck_at(slot.index) for slot in self._slots)


def _reported(_: Job) -> None:
    """Stand in for the handler of a job that was reported."""
