"""Members that fail, hang, vanish and come back; deadlines; closing."""

import errno
import gc
import logging
import threading
import time
import weakref

import pytest
from conftest import MakeEngine
from engine_tools import (
    KIB,
    MIB,
    PATIENCE_S,
    GatedMember,
    Outcome,
    ReplacedMember,
    buffer_of,
    pattern,
    read_at,
    start,
    write_at,
)

from fx100_lmcache.engine.base import Job, Status, Transfer
from fx100_lmcache.engine.health import ERRORS_IN_A_ROW
from fx100_lmcache.engine.lane_engine import LaneEngine
from fx100_lmcache.members.base import Member
from fx100_lmcache.testing.inline import InlineLanes, inline_engine
from fx100_lmcache.testing.memory import Fault, MemoryMember


def eventually(condition: object) -> bool:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.005)
    return False


def state(engine: LaneEngine, member: int = 0) -> str:
    return engine.states()[member].state


# Deadlines with simulated time


def stalled_engine(
    reads: int = 1, shift: int = 0, **job: bool
) -> tuple[LaneEngine, InlineLanes, Outcome]:
    member = MemoryMember(MIB)
    member.faults = [Fault("stall", "write" if job.get("write") else "read", times=reads)]
    engine, lanes, _ = inline_engine([member])
    buffer = buffer_of(bytes(reads * 4096), shift=shift)
    transfers = [Transfer(0, n * 4096, buffer, n * 4096, 4096) for n in range(reads)]
    return engine, lanes, start(engine, transfers, within_s=5.0, **job)


def expire(engine: LaneEngine, seconds: float = 5.0) -> None:
    engine._clock.advance(seconds)  # type: ignore[attr-defined]
    engine.expire_due()


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
    reads, _, bounced_lane = lanes._made
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


# Health


def test_errors_in_a_row_take_a_member_down_and_a_probe_brings_it_back() -> None:
    member = MemoryMember(MIB)
    works = [False]
    engine, _, _ = inline_engine([member], probe=lambda _, m: m if works[0] else None)
    member.faults = [Fault("error", "read", times=100, value=errno.EIO)]
    for number in range(ERRORS_IN_A_ROW):
        assert (state(engine), engine.down_mask()) == ("up", 0), number
        read_at(engine, 0, buffer_of(bytes(4096)))
    assert (state(engine), engine.down_mask()) == ("down", 1)
    calls = len(member.calls)
    refused = read_at(engine, 0, buffer_of(bytes(4096)))
    assert refused.transfers[0].error is not None
    assert refused.transfers[0].error.errno == errno.ENODEV
    assert len(member.calls) == calls  # a member that is down is not asked
    engine.probe(0)
    assert state(engine) == "down"
    member.faults.clear()
    works[0] = True
    engine.probe(0)
    assert (state(engine), engine.down_mask()) == ("up", 0)
    assert read_at(engine, 0, buffer_of(bytes(4096))).statuses == [Status.OK]


def test_a_success_between_errors_keeps_a_member_up() -> None:
    member = MemoryMember(MIB)
    engine, _, _ = inline_engine([member])
    for _ in range(3 * ERRORS_IN_A_ROW):
        member.faults = [Fault("error", "read", value=errno.EIO)]
        read_at(engine, 0, buffer_of(bytes(4096)))
        read_at(engine, 0, buffer_of(bytes(4096)))
    assert state(engine) == "up"
    assert engine.states()[0].errors == 3 * ERRORS_IN_A_ROW


def test_mismatches_do_not_take_a_member_down() -> None:
    engine, _, _ = inline_engine([MemoryMember(MIB)])
    for _ in range(2 * ERRORS_IN_A_ROW):
        assert read_at(engine, 0, buffer_of(bytes(4096)), 1).statuses == [Status.MISMATCH]
    assert state(engine) == "up"


def test_only_the_failing_member_is_down() -> None:
    members = [MemoryMember(MIB, index=n) for n in range(3)]
    engine, _, _ = inline_engine(members)
    members[1].gone = True
    for _ in range(ERRORS_IN_A_ROW):
        read_at(engine, 0, buffer_of(bytes(4096)), member=1)
    assert engine.down_mask() == 0b010
    assert read_at(engine, 0, buffer_of(bytes(4096)), member=2).statuses == [Status.OK]


def test_a_suspect_member_that_answers_the_probe_is_used_again() -> None:
    engine, lanes, _ = stalled_engine()
    engine._probe = lambda _, member: member
    expire(engine)
    assert state(engine) == "suspect"
    engine.probe(0)
    assert (state(engine), engine.states()[0].stuck) == ("up", 1)
    lanes.release()
    assert (state(engine), engine.states()[0].stuck) == ("up", 0)


def test_forgiven_stuck_transfers_are_not_forgiven_twice() -> None:
    engine, lanes, _ = stalled_engine()
    engine._probe = lambda _, member: member
    expire(engine)
    engine.probe(0)
    lanes.release()
    member = engine.member(0)
    assert isinstance(member, MemoryMember)
    member.faults = [Fault("stall", "read")]
    start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)], within_s=1.0)
    expire(engine, 1.0)
    assert state(engine) == "suspect"


def test_gone_member_comes_back_under_another_name(make_engine: MakeEngine) -> None:
    """B12, B85: the old descriptor stays dead; the new one is found by the probe thread."""
    old, new = ReplacedMember(MIB, name="/dev/nvme0n1"), MemoryMember(MIB, name="/dev/nvme0n5")
    back = threading.Event()

    def probe(index: int, member: Member) -> Member | None:
        return new if back.is_set() else None

    engine = make_engine([old], probe=probe)
    for _ in range(ERRORS_IN_A_ROW):
        assert read_at(engine, 0, buffer_of(bytes(4096))).statuses == [Status.ERROR]
    assert state(engine) == "down"
    back.set()
    assert eventually(lambda: engine.down_mask() == 0)
    assert engine.member(0) is new
    assert engine.states()[0].name == "/dev/nvme0n5"
    assert write_at(engine, 0, buffer_of(pattern(512))).statuses == [Status.OK]


def test_what_a_dead_member_kept_does_not_hurt_its_successor(make_engine: MakeEngine) -> None:
    """Transfers of the old device expire on the old device's lanes."""
    old, new = GatedMember(name="old"), GatedMember(name="new")
    engine = make_engine([old], probe=lambda _, member: new, reader_threads=1)
    old.gate.clear()
    stuck = start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)], within_s=0.05)
    queued = start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)], within_s=0.6)
    assert stuck.wait().statuses == [Status.TIMED_OUT]
    assert eventually(lambda: engine.member(0) is new)
    new.gate.clear()
    fine = start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)])
    new.wait_entered(1)
    also_fine = start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)])
    assert queued.wait().statuses == [Status.TIMED_OUT]
    assert state(engine) == "up"
    new.gate.set()
    assert (fine.wait().statuses, also_fine.wait().statuses) == ([Status.OK], [Status.OK])
    old.gate.set()
    assert stuck.came_late.wait(PATIENCE_S)
    assert engine.states()[0].stuck == 0


def test_a_probe_that_fails_is_tried_again(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    tries = []

    def probe(index: int, member: Member) -> Member | None:
        tries.append(index)
        if len(tries) < 3:
            raise RuntimeError("sysfs has an unknown shape")
        return member

    member = MemoryMember(MIB)
    engine = make_engine([member], probe=probe)
    member.faults = [Fault("error", "read", times=ERRORS_IN_A_ROW)]
    with caplog.at_level(logging.CRITICAL):
        for _ in range(ERRORS_IN_A_ROW):
            read_at(engine, 0, buffer_of(bytes(4096)))
        assert eventually(lambda: state(engine) == "up")
    assert len(tries) == 3


def test_a_failing_handler_costs_no_thread(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    engine = make_engine([MemoryMember(MIB)], reader_threads=1)

    def broken(_: Job) -> None:
        raise RuntimeError("a bug in the caller")

    for _ in range(3):
        transfer = Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)
        engine.submit([Job(False, [transfer], engine.now() + 30, broken)])
    assert read_at(engine, 0, buffer_of(bytes(4096))).statuses == [Status.OK]
    assert caplog.text.count("a completion handler failed") == 3
    assert engine.close(5.0) == 0


def test_a_member_that_raises_anything_costs_no_thread(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")

    class Broken(MemoryMember):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            if offset == 0:
                raise ValueError("not an OSError")
            return super().read_into(offset, buffer)

    engine = make_engine([Broken(MIB)], reader_threads=1)
    assert read_at(engine, 0, buffer_of(bytes(4096))).statuses == [Status.ERROR]
    assert read_at(engine, 4096, buffer_of(bytes(4096))).statuses == [Status.OK]
    assert "unexpected failure" in caplog.text


# Closing


def test_close_waits_for_open_jobs(make_engine: MakeEngine) -> None:
    member = GatedMember()
    engine = make_engine([member])
    member.gate.clear()
    outcome = start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)], write=True)
    member.wait_entered(1)
    threading.Timer(0.1, member.gate.set).start()
    assert engine.close(PATIENCE_S) == 0
    assert outcome.statuses == [Status.OK]


def test_close_with_stalled_io_keeps_its_deadline(make_engine: MakeEngine) -> None:
    """B55: 32 transfers in the kernel; their buffers are left alone."""
    member = GatedMember()
    engine = make_engine([member], reader_threads=32)
    member.gate.clear()
    outcomes = [
        start(engine, [Transfer(0, 0, buffer_of(bytes(64 * KIB)), 0, 64 * KIB)]) for _ in range(40)
    ]
    member.wait_entered(32)
    started = time.monotonic()
    assert engine.close(0.3) == 32
    assert time.monotonic() - started < PATIENCE_S / 2  # it came back: the test did not hang
    for outcome in outcomes:
        assert outcome.wait().statuses == [Status.TIMED_OUT]
    assert sum(t.in_kernel for outcome in outcomes for t in outcome.transfers) == 32
    member.gate.set()
    assert eventually(lambda: sum(len(o.late) for o in outcomes) == 32)
