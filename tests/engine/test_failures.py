"""Memory lacks at any call of the engine: every object of a batch is answered once."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from fx100_lmcache.buffers import IoBuffer
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.engine.member_slot import EngineOptions, ThreadedLanes
from fx100_lmcache.engine.native_batch import NativeBatch
from fx100_lmcache.engine.native_lane import NativeLane, NativeReaper
from fx100_lmcache.members.device import DeviceMember
from fx100_lmcache.testing.clock import SimulatedClock
from fx100_lmcache.testing.failures import FailingCall, each_failing_call
from support.batches import BatchOutcome, Piece, read_batch
from support.engine import (
    Outcome,
    buffer_of,
    eventually,
    file_member,
    needs_native,
    pattern,
    start,
)

pytestmark = needs_native

BLOCK = 4096
OBJECTS = 4
OPTIONS = EngineOptions(reader_threads=2, writer_threads=1)
SPARED = {
    # small steps of the answer itself: what they call may fail, but not that they are called
    *("guard", "__init__", "__enter__", "__exit__", "caught", "_add", "now", "begin", "end"),
    *("finish", "_settle", "_report", "_read_batch", "submit", "_hand_over", "give_up"),
    *(
        "read",
        "expire_due",
        "_expire_all",
        "pop",
        "heappop",
        "close",
        "close_pool",
        "_leave_lanes",
        "wake",
    ),
    "__post_init__",  # the caller's
}


class Stepped:
    """A native engine whose completions and deadlines come when the test says so."""

    def __init__(self, members: list[DeviceMember]) -> None:
        self.defects = Defects()
        self.clock = SimulatedClock()
        lanes = ThreadedLanes(OPTIONS, self.defects)
        assert lanes._reaper is not None
        self._reaper = lanes._reaper
        self.engine = LaneEngine(
            members, OPTIONS, lanes=lanes, clock=self.clock, defects=self.defects
        )

    def drain(self) -> None:
        with self.defects.guard("drain"):
            self._reaper._drain_all()

    def expire(self) -> None:
        self.clock.advance(60.0)
        with self.defects.guard("expire"):
            self.engine.expire_due()

    def close(self) -> None:
        assert self.engine.close(0.0) == 0
        self.drain()
        assert all(slot.idle for slot in self.engine._slots)
        assert self.engine.open_jobs == 0
        os.close(self._reaper._event_fd)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceMember]]:
    monkeypatch.setattr(NativeReaper, "_run", lambda _: None)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-members-") as folder:
        opened = [file_member(Path(folder) / f"m{n}", 64 * BLOCK) for n in range(2)]
        for number, member in enumerate(opened):
            for at in range(OBJECTS):
                buffer = buffer_of(pattern(BLOCK, at + number), room=0)
                assert member.write_from(at * BLOCK, buffer.view) == BLOCK
        yield opened
        for member in opened:
            member.close()


def pieces(members: list[DeviceMember], *, damaged: bool) -> list[list[Piece]]:
    def checksum(number: int, member: int) -> int:
        wrong = damaged and (number, member) == (1, 0)
        return int(xxhash.xxh3_64_intdigest(pattern(BLOCK, number + member))) ^ wrong

    return [
        [(member, number * BLOCK, BLOCK, checksum(number, member)) for member in range(2)]
        for number in range(OBJECTS)
    ]


def check(outcome: BatchOutcome, buffers: list[IoBuffer], why: str) -> None:
    assert dict(outcome.reports) == dict.fromkeys(range(OBJECTS), 1), why
    for number in outcome.ok:
        wanted = pattern(BLOCK, number) + pattern(BLOCK, number + 1)
        assert bytes(buffers[number].view[: 2 * BLOCK]) == wanted, why


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["in time", "at the deadline"])
def test_a_failure_at_any_call_of_a_batch_answers_each_object_once(
    members: list[DeviceMember], damaged: bool, late: bool
) -> None:
    def scenario(failing: FailingCall) -> None:
        stepped = Stepped(members)
        buffers = [buffer_of(bytes(2 * BLOCK)) for _ in range(OBJECTS)]
        objects = list(zip(buffers, pieces(members, damaged=damaged), strict=True))
        batch, outcome = read_batch(objects, stepped.clock() + 50.0)
        if late:  # nothing is read: the threads have gone home
            for slot in stepped.engine._slots:
                assert isinstance(slot.reads, NativeLane)
                slot.reads.module.close_pool(slot.reads.pool)
        with failing:
            stepped.engine.read([batch])
            for _ in range(4):
                time.sleep(0.001)  # what is read comes with one of these
                stepped.drain()
            if late:
                stepped.expire()
        if late:
            stepped.expire()  # what found no memory is tried again
        else:

            def all_there() -> bool:
                stepped.drain()
                return outcome.done.is_set()

            assert eventually(all_there), failing.failed
        check(outcome, buffers, failing.failed)
        assert not failing.failed or stepped.defects.count, failing.failed
        stepped.close()

    failed = list(each_failing_call(("engine",), SPARED, scenario))
    assert len(failed) > 15


def test_a_failure_at_any_call_of_a_submission_reports_each_job_once(
    members: list[DeviceMember],
) -> None:
    def scenario(failing: FailingCall) -> None:
        stepped = Stepped(members)
        outcomes: list[Outcome] = []
        with failing:
            for shift in (0, 64):  # straight, and through a bounce buffer
                buffer = buffer_of(bytes(2 * BLOCK), shift=shift)
                moves = [Transfer(m, m * BLOCK, buffer, m * BLOCK, BLOCK) for m in range(2)]
                outcomes.append(start(stepped.engine, moves, hold=True))
            for _ in range(4):
                time.sleep(0.001)
                stepped.drain()

        def all_there() -> bool:
            stepped.drain()
            return all(outcome.done.is_set() for outcome in outcomes)

        assert eventually(all_there), failing.failed
        assert [outcome.reports for outcome in outcomes] == [1, 1]
        failures = {s for outcome in outcomes for s in outcome.statuses} - {Status.OK}
        assert failures <= {Status.ERROR}
        assert not failing.failed or stepped.defects.count, failing.failed
        stepped.close()

    assert len(list(each_failing_call(("engine",), SPARED, scenario))) > 15


def test_a_batch_that_cannot_be_taken_apart_at_its_deadline_is_tried_again(
    members: list[DeviceMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = Stepped(members)
    for slot in stepped.engine._slots:
        assert isinstance(slot.reads, NativeLane)
        slot.reads.module.close_pool(slot.reads.pool)
    buffers = [buffer_of(bytes(2 * BLOCK)) for _ in range(OBJECTS)]
    objects = list(zip(buffers, pieces(members, damaged=False), strict=True))
    batch, outcome = read_batch(objects, stepped.clock() + 1.0)
    stepped.engine.read([batch])
    with monkeypatch.context() as lacking:

        def no_memory(*_: object) -> None:
            raise MemoryError

        lacking.setattr(NativeBatch, "_note_good", no_memory)
        stepped.expire()
        stepped.expire()
        assert (stepped.defects.count, outcome.reports) == (2, {})
    stepped.expire()
    check(outcome, buffers, "")
    stepped.close()


@pytest.mark.parametrize("fails", range(40))
def test_what_has_ended_is_told_later_where_memory_lacks(
    members: list[DeviceMember], fails: int
) -> None:
    memory = pytest.importorskip("_testcapi")
    stepped = Stepped(members)
    lane = stepped.engine._slots[0].reads
    assert isinstance(lane, NativeLane)
    drain, pool = lane.module.drain, lane.pool
    buffer = buffer_of(bytes(BLOCK))
    outcomes = [start(stepped.engine, [Transfer(0, 0, buffer, 0, BLOCK)]) for _ in range(5)]
    told: list[tuple[int, int, int]] = []
    time.sleep(0.02)  # most have ended
    memory.set_nomemory(fails, fails + 1)
    try:
        drain(pool, told)
    except MemoryError:
        pass  # told what there was memory for
    finally:
        memory.remove_mem_hooks()

    def all_told() -> bool:
        drain(pool, told)
        return len(told) == len(outcomes)

    assert eventually(all_told), "an operation that had ended was forgotten"
    assert len({ticket for ticket, _, _ in told}) == len(outcomes)
    for found in told:
        lane._tell(*found)
    assert [outcome.reports for outcome in outcomes] == [1] * len(outcomes)
    stepped.close()
