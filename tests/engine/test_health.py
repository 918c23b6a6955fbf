"""Members that fail, vanish and come back; closing."""

import errno
import logging
import threading
import time

import pytest

from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.health import ERRORS_IN_A_ROW
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.engine.stripe import MAX_STUCK
from fx100_lmcache.members.base import Member
from fx100_lmcache.testing.inline import inline_engine
from fx100_lmcache.testing.lacking import Footprint, lacking
from fx100_lmcache.testing.memory import Fault, MemoryMember
from support.engine import (
    KIB,
    MIB,
    PATIENCE_S,
    GatedMember,
    MakeEngine,
    ReplacedMember,
    buffer_of,
    eventually,
    expire,
    pattern,
    read_at,
    stalled_engine,
    start,
    state,
    write_at,
)


class Closable(MemoryMember):
    closes = 0

    def close(self) -> None:
        self.closes += 1


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


def test_a_member_that_answers_its_probe_gets_threads_that_nothing_hangs_in(
    make_engine: MakeEngine,
) -> None:
    """Whatever keeps the calls of one file keeps every thread of its lanes."""
    member = GatedMember()
    engine = make_engine([member], probe=lambda _, m: m, reader_threads=2)
    stuck, gates = [], []
    for rounds in range(1, 3):
        member.gate.clear()
        stuck += [
            start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)], within_s=0.05)
            for _ in range(2)
        ]
        member.wait_entered(2)
        assert eventually(lambda n=rounds: engine.states()[0].stuck == 2 * n)
        assert eventually(lambda: state(engine) == "up")
        gates.append(member.gate)
        member.gate = threading.Event()
        member.gate.set()
        assert read_at(engine, 0, buffer_of(bytes(4096))).statuses == [Status.OK]
        member.wait_entered(1)
    assert engine.states()[0].errors == 0
    for gate in gates:
        gate.set()
    assert eventually(lambda: engine.states()[0].stuck == 0)
    assert state(engine) == "up"
    for outcome in stuck:
        assert outcome.wait().statuses == [Status.TIMED_OUT]
        assert outcome.came_late.wait(PATIENCE_S)


def test_a_member_of_which_too_much_is_stuck_is_not_up() -> None:
    engine, lanes, _ = stalled_engine(reads=MAX_STUCK + 1)
    engine._probe = lambda _, member: member
    expire(engine)
    engine.probe(0)
    assert (state(engine), engine.states()[0].stuck) == ("suspect", MAX_STUCK + 1)
    lanes.release()
    assert state(engine) == "up"


def test_counters_of_a_member_outlive_its_lanes() -> None:
    engine, lanes, _ = stalled_engine()
    engine._probe = lambda _, member: member
    expire(engine)
    member = engine.member(0)
    assert isinstance(member, MemoryMember)
    engine._slots[0].health.note_error(OSError(errno.EIO, "before"))
    engine.probe(0)
    assert (state(engine), engine.states()[0].errors) == ("up", 1)
    lanes.release()


@pytest.mark.parametrize("same", [False, True], ids=["another", "same"])
def test_a_member_that_returns_while_threads_lack_is_tried_again(same: bool) -> None:
    old = MemoryMember(MIB)
    lacks = 0

    def attempt() -> None:
        nonlocal lacks
        new = old if same else Closable(MIB)
        engine._slots[0].health.note_probe(works=False)
        engine._slots[0].health.note_stuck()
        engine._probe = lambda _, __: new
        engine.probe(0)
        if state(engine) != "up":
            lacks += 1
            assert same or new.closes == 1  # type: ignore[attr-defined]
            assert engine.member(0) is not new or same

    options = EngineOptions(reader_threads=2, writer_threads=1, native=False, probe_interval_s=1e6)
    for number in range(20):
        engine = LaneEngine([old], options)
        before = Footprint.now()
        with lacking("threads", number) as failed:
            attempt()
        assert (state(engine) == "up") != bool(failed)
        if not failed:
            break
        assert not before.left_by()
        attempt()
        assert state(engine) == "up"
        engine.close(0.0)
    engine.close(0.0)
    assert lacks == 6


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
    stuck = start(engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)], within_s=0.3)
    old.wait_entered(1)
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


def test_unaligned_reads_are_served_in_waves(make_engine: MakeEngine) -> None:
    """B46: 118 reads share the few bounce buffers; none waits for memory for ever."""
    member = GatedMember()
    engine = make_engine([member], reader_threads=8)
    write_at(engine, 0, buffer_of(pattern(118 * 4096)))
    target = buffer_of(bytes(118 * 4096), shift=64)
    transfers = [Transfer(0, n * 4096, target, n * 4096, 4096) for n in range(118)]
    assert start(engine, transfers).wait().statuses == [Status.OK] * 118
    assert bytes(target.view[: 118 * 4096]) == pattern(118 * 4096)
    assert member.most_in_flight <= 8
