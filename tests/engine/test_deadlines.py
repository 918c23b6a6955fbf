"""Deadlines: what is cancelled, what is told late, what is waited for."""

import gc
import weakref

from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.testing.inline import inline_engine
from fx100_lmcache.testing.memory import Fault, MemoryMember
from support.engine import (
    MIB,
    PATIENCE_S,
    GatedMember,
    MakeEngine,
    buffer_of,
    expire,
    pattern,
    stalled_engine,
    start,
    state,
    write_at,
)

# Deadlines with simulated time


def test_at_the_deadline_what_is_in_the_kernel_times_out_and_is_told_late() -> None:
    engine, lanes, outcome = stalled_engine()
    expire(engine, 4.9)
    assert outcome.reports == 0
    expire(engine, 0.1)
    assert outcome.statuses == [Status.TIMED_OUT]
    assert outcome.transfers[0].in_kernel
    assert (outcome.reports, outcome.late, state(engine)) == (1, [], "suspect")
    lanes.release()
    assert outcome.late == outcome.transfers
    assert (outcome.reports, state(engine)) == (1, "up")


def test_held_job_waits_for_the_kernel() -> None:
    """Memory that is not ours must not be reported as ours to reuse."""
    engine, lanes, outcome = stalled_engine(hold=True)
    expire(engine)
    assert (outcome.reports, state(engine)) == (0, "suspect")
    lanes.release()
    assert (outcome.reports, outcome.late, outcome.statuses) == (1, [], [Status.OK])
    assert state(engine) == "up"


def test_held_job_in_a_bounce_buffer_does_not_wait() -> None:
    engine, lanes, outcome = stalled_engine(hold=True, shift=64)
    expire(engine)
    assert outcome.statuses == [Status.TIMED_OUT]
    lanes.release()
    assert len(outcome.late) == 1


def test_bounced_bytes_that_come_late_are_not_copied(make_engine: MakeEngine) -> None:
    member = GatedMember()
    engine = make_engine([member])
    write_at(engine, 0, buffer_of(pattern(4096)))
    member.gate.clear()
    target = buffer_of(bytes(4096), shift=64)
    outcome = start(engine, [Transfer(0, 0, target, 0, 4096)], within_s=0.1).wait()
    target.view[:4096] = b"\x55" * 4096  # its owner has it back
    member.gate.set()
    assert outcome.came_late.wait(PATIENCE_S)
    assert bytes(target.view[:4096]) == b"\x55" * 4096


def test_late_is_told_after_done_even_when_the_kernel_is_faster() -> None:
    """A transfer may come back while its job is being reported."""
    engine, lanes, _ = stalled_engine()
    events: list[str] = []
    member = engine.member(0)
    assert isinstance(member, MemoryMember)
    member.faults = [Fault("stall", "read")]

    def done(job: Job) -> None:
        lanes.release()  # the kernel lets go just now
        events.append(f"done, {sum(t.in_kernel for t in job.transfers)} in the kernel")

    transfer = Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)
    engine.submit([Job(False, [transfer], engine.now() + 1, done, lambda _: events.append("late"))])
    expire(engine, 1.0)
    assert events == ["done, 1 in the kernel", "late"]


def test_one_that_came_late_before_its_job_was_reported_is_told_once() -> None:
    """Two pieces of a held job: the bounced one times out, the direct one is waited for."""
    member = MemoryMember(MIB)
    member.faults = [Fault("stall", "read", times=2)]
    engine, lanes, _ = inline_engine([member])
    direct, bounced = buffer_of(bytes(4096)), buffer_of(bytes(4096), shift=64)
    transfers = [Transfer(0, 0, direct, 0, 4096), Transfer(0, 0, bounced, 0, 4096)]
    outcome = start(engine, transfers, within_s=1.0, hold=True)
    expire(engine, 1.0)
    reads, _, bounced_lane, _ = lanes._made
    bounced_lane.release()
    assert (outcome.reports, outcome.late) == (0, [])
    reads.release()
    assert outcome.statuses == [Status.OK, Status.TIMED_OUT]
    assert outcome.late == [outcome.transfers[1]]
    assert engine.states()[0].stuck == 0


def test_reported_jobs_do_not_keep_memory_until_their_deadline() -> None:
    engine, _, _ = inline_engine([MemoryMember(MIB)])

    class Owner:
        buffer = buffer_of(bytes(4096))

        def done(self, job: Job) -> None:
            """Keep the owner alive through the handler."""

    owner = Owner()
    gone = weakref.ref(owner)
    engine.submit(
        [Job(False, [Transfer(0, 0, owner.buffer, 0, 4096)], 1e9, owner.done, owner.done)]
    )
    del owner
    gc.collect()
    assert gone() is None


# Deadlines with threads


def test_queued_transfers_are_cancelled_at_the_deadline(make_engine: MakeEngine) -> None:
    member = GatedMember()
    member.gate.clear()
    engine = make_engine([member], reader_threads=2)
    blocked = start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096) for _ in range(2)])
    member.wait_entered(2)
    queued = start(
        engine,
        [Transfer(0, n * 4096, buffer_of(bytes(4096)), 0, 4096) for n in range(5)],
        within_s=0.05,
        hold=True,
    ).wait()
    assert queued.statuses == [Status.TIMED_OUT] * 5
    assert not any(t.in_kernel for t in queued.transfers)
    assert state(engine) == "up"  # nothing is stuck: the deadline of those in the kernel is far
    member.gate.set()
    assert blocked.wait().statuses == [Status.OK] * 2
    assert queued.reports == 1
    assert len([c for c in member.calls if c[0] == "read"]) == 2


def test_reads_overtake_writes(make_engine: MakeEngine) -> None:
    member = GatedMember()
    engine = make_engine([member], writer_threads=1)
    member.gate.clear()
    writes = [
        start(engine, [Transfer(0, n * MIB, buffer_of(bytes(MIB)), 0, MIB)], write=True)
        for n in range(6)
    ]
    member.wait_entered(1)
    read = start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)])
    member.wait_entered(1)  # it is in the kernel although five writes are queued before it
    member.gate.set()
    read.wait()
    for write in writes:
        write.wait()


def test_a_batch_of_118_has_32_reads_in_flight(make_engine: MakeEngine) -> None:
    """B65: nobody waits for one chunk before asking for the next."""
    members = [GatedMember(index=n) for n in range(4)]
    engine = make_engine(members, reader_threads=16)
    for member in members:
        member.gate.clear()
    outcomes = [
        start(engine, [Transfer(n % 4, n * 4096, buffer_of(bytes(4096)), 0, 4096)])
        for n in range(118)
    ]
    for member in members:
        member.wait_entered(8)
    assert sum(member.in_flight for member in members) >= 32
    for member in members:
        member.gate.set()
    for outcome in outcomes:
        assert outcome.wait().statuses == [Status.OK]
