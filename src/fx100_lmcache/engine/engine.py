"""The engine: lanes for every member, deadlines, retries in smaller calls, health, probes."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from fx100_lmcache.engine.bounds import out_of_bounds
from fx100_lmcache.engine.deadlines import Alarm, DeadlineQueue
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.jobs import Job, MemberState, ReadBatch, Status, Transfer
from fx100_lmcache.engine.lane import Lane
from fx100_lmcache.engine.member_slot import EngineOptions, LaneFactory, MemberSlot, ThreadedLanes
from fx100_lmcache.engine.native_batch import NativeBatch
from fx100_lmcache.engine.native_lane import NativeLane, TransferRefusedError
from fx100_lmcache.engine.stripe import Probe, Stripe
from fx100_lmcache.members.base import NO_SPACE_ERRORS, Member

log = logging.getLogger(__name__)

SMALLEST_IO_BYTES = 128 * 1024
_AGAIN_S = 0.1  # after what failed for want of memory
_TRIES = 3  # of expiring something while the engine is being closed
_JOIN_S = 1.0  # for the thread that watches deadlines, which does not wait for devices
_SLICE = 32  # jobs submitted at a time: the first reads are under way while the next are made
_PAGE_BYTES = 4096  # no logical block is larger
_IO_ERROR_LIMIT_BYTES = 512 * 1024  # nothing is known that answers EIO to these for their size
_TOO_LARGE_ERRORS = frozenset({errno.EIO, errno.EINVAL, errno.EREMOTEIO})

Queued = tuple[MemberSlot, Lane, list[Transfer]]
Refused = tuple["MemberSlot | None", Transfer, Status, "OSError | None"]


class LaneEngine:
    """Threads for every member.

    In a forked child it is inert: it has no threads there, refuses what it is given, and leaves
    the parent's members, pools and locks alone.

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
    defects : Defects or None
        Where faults of our own are counted.

    Raises
    ------
    RuntimeError, OSError, MemoryError
        If there are no threads, descriptors or memory. Nothing is left of the engine then.
    """

    def __init__(
        self,
        members: Sequence[Member],
        options: EngineOptions,
        probe: Probe | None = None,
        *,
        lanes: LaneFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
        defects: Defects | None = None,
    ) -> None:
        self._options = options
        self._clock = clock
        self._probe = probe
        self.defects = defects or Defects()
        self._expiry: DeadlineQueue[Job | NativeBatch | Alarm] = DeadlineQueue()
        self._closing = threading.Event()
        self._look_now = [threading.Event() for _ in members]
        self.on_look: Callable[[int], None] = _nobody_looks
        self._inert = False
        self.bounced_transfers = 0
        self._count_lock = threading.Lock()
        self._stripe = Stripe(self._equip, self.now)
        self._slots = self._stripe.slots
        self._watcher = self._thread(self._watch, "fx100-deadlines")
        with contextlib.ExitStack() as undo:
            self._lanes = lanes or ThreadedLanes(options, self.defects)
            undo.callback(self._lanes.close)
            self.kind = self._lanes.kind
            for index, member in enumerate(members):
                self._slots.append(self._equip(index, member))
                undo.callback(self._slots[index].close)
            if lanes is None:
                undo.callback(self._stop_threads)
                self._watcher.start()
                for index in range(len(members)):
                    probing = functools.partial(self._probe_loop, index)
                    self._thread(probing, f"fx100-probe-{index}").start()
            undo.pop_all()
        _engines.add(self)

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def _stop_threads(self) -> None:
        self._closing.set()
        for look_now in self._look_now:
            look_now.set()
        self._expiry.stop()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(_JOIN_S)

    def _equip(self, index: int, member: Member) -> MemberSlot:
        slot = MemberSlot(
            index, member, max(1, self._options.max_io_bytes // _PAGE_BYTES) * _PAGE_BYTES
        )

        def finish(
            transfer: Transfer, status: Status, checksum: int, problem: Exception | None
        ) -> None:
            with self.defects.guard("a completion was not handled") as failed:
                self._finish(slot, transfer, status, checksum, problem)
            if failed.cause is not None:
                self._settle(slot, transfer, Status.ERROR, 0, _ours(failed.cause))

        slot.equip(self._lanes, finish)
        return slot

    def now(self) -> float:
        """Return the clock, by default the monotonic one."""
        return self._clock()

    @property
    def open_jobs(self) -> int:
        """Return how many jobs, and batches of reads, are not reported."""
        return self._expiry.open

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs. Never raises: what cannot be queued is reported as an error."""
        if self._inert:
            self._refuse_all(jobs)
            return
        self._expiry.begin(len(jobs))
        queued: Iterable[Queued] = ()
        refused: Iterable[Refused] = ()
        with self.defects.guard("jobs could not be queued") as failed:
            queued, refused = self._plan(jobs)
            for job in jobs:
                self._expiry.push(job.deadline, job)
        if failed.cause is not None:
            problem = _ours(failed.cause)
            queued = ()
            refused = ((None, t, Status.ERROR, problem) for job in jobs for t in job.transfers)
        for slot, lane, transfers in queued:
            self._hand_over(slot, lane, transfers)
        for at, transfer, status, reason in refused:
            self._settle(at, transfer, status, 0, reason)
        for job in jobs:
            if not job.transfers and not job.reported:
                self._report(job)
        if self._closing.is_set():  # meanwhile, and these were not seen there
            self._expire_all()

    def _plan(self, jobs: Sequence[Job]) -> tuple[list[Queued], list[Refused]]:
        """Choose a lane for each transfer, or say why there is none."""
        queued: dict[int, Queued] = {}
        refused: list[Refused] = []
        bounced = 0
        now = self.now()
        for job in jobs:
            for transfer in job.transfers:
                slot = self._slot_for(transfer)
                if slot is None:
                    problem = OSError(errno.EFAULT, "it would leave its buffer or its member")
                    refused.append((None, transfer, Status.ERROR, problem))
                elif job.deadline <= now:
                    refused.append((slot, transfer, Status.TIMED_OUT, None))
                elif not slot.health.usable or self._closing.is_set():
                    what = f"{slot.member.name} is {slot.health.state}"
                    problem = OSError(errno.ENODEV, what)
                    refused.append((slot, transfer, Status.ERROR, problem))
                else:
                    transfer.refusals = slot.refusals
                    transfer.slot = slot
                    lane = self._lane_for(slot, transfer)
                    bounced += lane is slot.bounced
                    queued.setdefault(id(lane), (slot, lane, []))[2].append(transfer)
        with self._count_lock:
            self.bounced_transfers += bounced
        return list(queued.values()), refused

    def _slot_for(self, transfer: Transfer) -> MemberSlot | None:
        """Find the slot of a transfer; None, counted and logged, if it must not be made."""
        known = 0 <= transfer.member < len(self._slots)
        slot = self._slots[transfer.member] if known else None
        wrong = out_of_bounds(transfer, slot.member if slot is not None else None)
        if not wrong:
            return slot
        self.defects.refused(wrong)
        return None

    def _hand_over(self, slot: MemberSlot, lane: Lane, transfers: Sequence[Transfer]) -> None:
        """Give transfers to their lane; those that it does not take have failed."""
        with self.defects.guard("transfers could not be queued") as failed:
            lane.submit(transfers)
        if failed.cause is not None:
            problem = _ours(failed.cause)
            for transfer in transfers:
                self._settle(slot, transfer, Status.ERROR, 0, problem, taken_from=lane)
        if self._closing.is_set():
            for transfer in transfers:
                self._recall(slot, lane, transfer, None)

    def _recall(
        self, slot: MemberSlot, lane: Lane, transfer: Transfer, problem: OSError | None
    ) -> None:
        """Take a transfer back that expired before it came to its lane, and so looked stuck."""
        if transfer.stuck:
            self._settle(slot, transfer, Status.TIMED_OUT, 0, problem, taken_from=lane)

    def _refuse_all(self, jobs: Sequence[Job]) -> None:
        """Answer in a forked child, without the locks of the parent's threads."""
        problem = OSError(errno.ENODEV, "this process was forked from the one with the engine")
        for job in jobs:
            for transfer in job.transfers:
                with job.lock:
                    job.end(transfer, Status.ERROR, 0, problem)
            job.on_done(job)

    def read(self, batches: Sequence[ReadBatch]) -> None:
        """Queue reads: without a job for each object while all goes well, if that is possible."""
        for batch in batches:
            self._read_batch(batch)
        if self._inert:
            return
        for slot in self._slots:
            if isinstance(slot.reads, NativeLane):
                slot.reads.wake()
        if self._closing.is_set():  # meanwhile, and these were not seen there
            self._expire_all()

    def _read_batch(self, batch: ReadBatch) -> None:
        first, total = 0, len(batch.piece_counts)  # before the first all are answered by their jobs
        with self.defects.guard("reads could not be queued"):
            if not self._inert and self._in_pools(batch):
                return
            while first < total and not self._inert:
                numbers = range(first, min(first + _SLICE, total))
                jobs = [batch.job_of(number) for number in numbers]
                first = numbers.stop
                self.submit(jobs)
        with self.defects.guard("a completion handler failed"):
            if first < total:
                batch.on_failed(range(first, total))

    def _in_pools(self, batch: ReadBatch) -> bool:
        """Queue a batch as it is; False, with nothing done, where each object needs a job."""
        if self._closing.is_set() or batch.deadline <= self.now():
            return False
        native = NativeBatch(
            batch, self._slots, self._expiry.begin, self._expiry.end, self._report, self.defects
        )
        if not native.prepare():
            return False
        self._expiry.begin()
        try:
            self._expiry.push(batch.deadline, native)  # first: no read is without a deadline
            taken = native.submit()
        except BaseException:
            native.give_up()
            self._expiry.end()
            raise
        if not taken:
            self._expiry.end()
        return taken

    def _lane_for(self, slot: MemberSlot, transfer: Transfer) -> Lane:
        if transfer.job.urgent:
            return slot.urgent
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
        problem: Exception | None,
    ) -> None:
        """Take a transfer back from a lane."""
        if problem is None:
            slot.health.note_success()
            slot.learn_limit(transfer)
        elif isinstance(problem, TransferRefusedError):
            self.defects.refused(str(problem))
            problem = _ours(problem)
        elif not isinstance(problem, OSError):
            self.defects.caught(f"{slot.member.name}: unexpected failure", problem)
            problem = _ours(problem)
        elif self._retry_smaller(slot, transfer, problem):
            return
        elif transfer.job.write and problem.errno in NO_SPACE_ERRORS:
            slot.health.note_no_space(problem)
            slot.troubles.note(str(problem))
            self._look_now[slot.index].set()
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
        lane = self._lane_for(slot, transfer)
        lane.submit([transfer])
        self._recall(slot, lane, transfer, problem)
        return True

    def _settle(
        self,
        slot: MemberSlot | None,
        transfer: Transfer,
        status: Status,
        checksum: int,
        problem: OSError | None,
        *,
        taken_from: Lane | None = None,
    ) -> None:
        """Note the fate of a transfer that is over, and report its job if it was the last.

        Parameters
        ----------
        taken_from : Lane or None
            Take it out of this lane first; what the lane does not give back, it will report.
        """
        job = transfer.job
        with job.lock:
            if transfer.over or (taken_from is not None and not taken_from.cancel(transfer)):
                return
            late = transfer.in_kernel
            if late and not job.reported:
                job.returned.append(transfer)
                late = False  # told after on_done
            done = job.end(transfer, status, checksum, problem)
        try:
            if transfer.stuck and slot is not None:
                slot.health.note_returned(works=problem is None)
            if late:
                self._tell_late(job, transfer)
        finally:
            if done:
                self._report(job)

    def _tell_late(self, job: Job, transfer: Transfer) -> None:
        with self.defects.guard("a completion handler failed"):
            if job.on_late is not None:
                job.on_late(transfer)

    def _report(self, job: Job) -> None:
        try:
            with self.defects.guard("a completion handler failed"):
                job.finished_at = self.now()
                job.on_done(job)
        finally:
            with job.lock:
                job.reported = True
                returned, job.returned = job.returned, []
            # the expiry queue keeps the job until its deadline: let go of the caller's memory
            still_out = any(transfer.in_kernel for transfer in job.transfers)
            job.transfers, job.on_done = (), _reported
            self._expiry.end()
        for transfer in returned:
            self._tell_late(job, transfer)
        if not still_out:
            job.on_late = None

    def _watch(self) -> None:
        while not self._closing.is_set():
            with self.defects.guard("deadlines could not be looked at"):
                self.expire_due()
            self._expiry.wait(self.now())

    def expire_due(self) -> None:
        """Expire the jobs whose deadlines have passed."""
        while (due := self._expiry.pop(self.now())) is not None:
            with self.defects.guard("a deadline could not be kept") as failed:
                self._expire(due)
            if failed.cause is not None:
                self._expiry.push(self.now() + _AGAIN_S, due)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call something once: at this time, or when the engine closes."""
        self._expiry.push(when, Alarm(call))

    def _expire_all(self) -> None:
        """Expire everything there is."""
        for _ in range(_TRIES):
            again: list[Job | NativeBatch | Alarm] = []
            while (due := self._expiry.pop(float("inf"))) is not None:
                with self.defects.guard("what is open could not be expired") as failed:
                    self._expire(due)
                if failed.cause is not None:
                    again.append(due)
            for due in again:
                self._expiry.push(0.0, due)
            if not again:
                return

    def _expire(self, due: Job | NativeBatch | Alarm) -> None:
        """Cancel what is queued; leave what the kernel has, to be reported late."""
        if isinstance(due, Alarm):
            due.ring()
            return
        if isinstance(due, NativeBatch):
            for job in due.conclude():  # what is left of it
                self._expire(job)
            return
        done = False
        with due.lock:
            for transfer in due.transfers:
                slot = transfer.slot  # not the one in force: that may be another device by now
                if transfer.status is Status.PENDING and isinstance(slot, MemberSlot):
                    done |= self._expire_transfer(due, transfer, slot)
                # else it is settled, or about to be refused
        if done:
            self._report(due)

    def _expire_transfer(self, job: Job, transfer: Transfer, slot: MemberSlot) -> bool:
        """Cancel a transfer, or note that it is stuck; return whether the job is to be reported."""
        lane = self._lane_for(slot, transfer)
        if lane.cancel(transfer):
            return job.end(transfer, Status.TIMED_OUT)
        if transfer.stuck:
            return False
        transfer.stuck = True
        if slot.health.usable:  # the first one says it all
            log.error("%s: a transfer is stuck in the kernel", slot.member.name)
        slot.health.note_stuck()
        if job.hold and lane is not slot.bounced:
            return False
        transfer.in_kernel = True
        transfer.status = Status.TIMED_OUT
        job.remaining -= 1
        return job.remaining == 0

    def _probe_loop(self, index: int) -> None:
        look_now = self._look_now[index]
        while not self._closing.is_set():
            look_now.wait(self._options.probe_interval_s)
            look_now.clear()
            if self._closing.is_set():
                return
            try:
                self.probe(index)
            except Exception:
                log.exception("probe of member %d failed", index)

    def probe(self, index: int) -> None:
        """Look whether a member that is not up works again, perhaps under another name.

        Also, at once, whether one is there at all whose write found no space.
        """
        if self._probe is not None:
            self._stripe.probe(index, self._probe)
        if self._slots[index].health.usable and not self._closing.is_set():
            self.on_look(index)

    def member(self, index: int) -> Member:
        """Return the member in use at a place of the stripe."""
        return self._slots[index].member

    def down_mask(self) -> int:
        """Bit map of the members that are not up."""
        return self._stripe.down_mask()

    def states(self) -> list[MemberState]:
        """Report every member's health."""
        return self._stripe.states()

    def flush(self) -> None:
        """Flush every member that is up."""
        for slot in self._slots:
            if slot.health.usable:
                slot.member.flush()

    def close(self, deadline_s: float) -> int:
        """Wait for open jobs, and for what is stuck, until the deadline; then stop.

        Every job is reported when it returns, except those on hold for what the kernel keeps:
        they are reported when it lets go.
        """
        if self._inert:
            return 0
        stripe, until = self._stripe, time.monotonic() + deadline_s
        while (self.open_jobs or stripe.stuck()) and (left_s := until - time.monotonic()) > 0:
            self._expiry.wait_for_end(min(0.1, left_s))
        self._closing.set()
        stripe.close()
        self._expire_all()
        self._stop_threads()
        self._lanes.close()
        stripe.close_retired()
        return stripe.stuck()


def _nobody_looks(_: int) -> None:
    """Stand in for who hears of looks."""


def _reported(_: Job) -> None:
    """Stand in for the handler of a job that was reported."""


def _ours(cause: Exception) -> OSError:
    """Describe a fault of our own as the outcome of a transfer."""
    return OSError(errno.EIO, f"internal error: {cause!r}")


_engines: weakref.WeakSet[LaneEngine] = weakref.WeakSet()


def _inert_in_child() -> None:
    # no lock is taken: a thread of the parent's, which is not here, may have held it
    for engine in list(_engines):
        engine._inert = True


os.register_at_fork(after_in_child=_inert_in_child)
