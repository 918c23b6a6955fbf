"""A close from another thread, at every line that the engine executes."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Job, Transfer
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.members.base import Member
from fx100_lmcache.members.device import DeviceMember
from fx100_lmcache.testing.interpose import Interposed, at_every_line
from fx100_lmcache.testing.memory import MemoryMember
from support.batches import BatchOutcome, Piece, read_batch
from support.engine import (
    PATIENCE_S,
    Outcome,
    buffer_of,
    eventually,
    file_member,
    needs_native,
    pattern,
    write_at,
)

ENGINE = ("engine",)
BLOCK = 4096
THREADS = EngineOptions(reader_threads=2, writer_threads=1, probe_interval_s=1e6)
PYTHON = EngineOptions(reader_threads=2, writer_threads=1, probe_interval_s=1e6, native=False)


@pytest.fixture
def members() -> Iterator[list[DeviceMember]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-members-") as folder:
        opened = [file_member(Path(folder) / f"m{n}", 64 * BLOCK) for n in range(2)]
        yield opened
        for member in opened:
            member.close()


def our_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("fx100-")}


def all_gone(before: set[threading.Thread]) -> bool:
    return eventually(lambda: our_threads() <= before)


class Contents:
    """Objects of two blocks, one on each member."""

    def __init__(self, members: list[DeviceMember]) -> None:
        engine = LaneEngine(members, PYTHON)
        self.pieces: list[list[Piece]] = []
        for number in range(4):
            data = pattern(BLOCK, number)
            sums = [
                write_at(engine, number * BLOCK, buffer_of(data), m).transfers[0].checksum
                for m in range(2)
            ]
            self.pieces.append([(m, number * BLOCK, BLOCK, sums[m]) for m in range(2)])
        assert engine.close(PATIENCE_S) == 0

    def spoil(self) -> None:
        """Have one piece look damaged, so that its object needs a job of its own."""
        member, offset, length, checksum = self.pieces[1][0]
        self.pieces[1][0] = (member, offset, length, checksum ^ 1)

    def batch(self, engine: LaneEngine) -> Callable[[], BatchOutcome]:
        objects = [(buffer_of(bytes(2 * BLOCK)), pieces) for pieces in self.pieces]
        described, outcome = read_batch(objects, engine.now() + PATIENCE_S)

        def read() -> BatchOutcome:
            engine.read([described])
            return outcome

        return read


@pytest.mark.parametrize("options", [pytest.param(THREADS, marks=needs_native), PYTHON])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_close_at_every_line_of_a_batch_reports_each_object_once(
    members: list[DeviceMember], options: EngineOptions, damaged: bool
) -> None:
    contents = Contents(members)
    if damaged:
        contents.spoil()

    def scenario(points: Interposed) -> None:
        engines: list[LaneEngine] = []
        outcomes: list[BatchOutcome] = []

        def operate() -> None:
            engines.append(LaneEngine(members, options))  # here, so that its threads are traced
            points.armed = True
            outcomes.append(contents.batch(engines[0])())
            outcomes[0].done.wait(0.2)  # if it is not closed, all of it is seen

        def close() -> None:
            engines[0].close(0.0)

        before = our_threads()
        points.run(operate, close)
        outcomes[0].wait()
        assert engines[0].close(PATIENCE_S) == 0
        assert engines[0].open_jobs == 0
        assert all_gone(before)

    for _ in at_every_line(ENGINE, scenario):
        pass


@pytest.mark.parametrize("options", [pytest.param(THREADS, marks=needs_native), PYTHON])
def test_a_close_at_every_line_of_a_job_reports_it_once(
    members: list[DeviceMember], options: EngineOptions
) -> None:
    """Writes, reads, unaligned memory, and an error that is tried again in smaller calls."""

    def scenario(points: Interposed) -> None:
        engines: list[LaneEngine] = []
        outcomes = [Outcome() for _ in range(3)]

        def operate() -> None:
            engines.append(LaneEngine(members, options))
            points.armed = True
            end = engines[0].now() + PATIENCE_S
            jobs = []
            for number, outcome in enumerate(outcomes):
                buffer = buffer_of(bytes(BLOCK), shift=64 if number == 1 else 0)
                moves = [Transfer(m, number * BLOCK, buffer, 0, BLOCK) for m in range(2)]
                jobs.append(Job(number == 2, moves, end, outcome.on_done, hold=number == 0))
            engines[0].submit(jobs)
            for outcome in outcomes:
                outcome.done.wait(0.2)

        def close() -> None:
            engines[0].close(0.0)

        before = our_threads()
        points.run(operate, close)
        for outcome in outcomes:
            assert outcome.wait().reports == 1
        assert engines[0].close(PATIENCE_S) == 0
        assert engines[0].open_jobs == 0
        assert all_gone(before)

    for _ in at_every_line(ENGINE, scenario):
        pass


class Refusing(MemoryMember):
    """Takes no call of more than 128 KiB, and tells when it is used after it was closed."""

    def __init__(self) -> None:
        super().__init__(1 << 20, max_io_bytes=128 * 1024)
        self.closes = 0

    def close(self) -> None:
        self.closes += 1

    def read_into(self, offset: int, buffer: memoryview) -> int:
        assert not self.closes, "used after it was closed"
        return super().read_into(offset, buffer)


def test_a_close_at_every_line_of_a_retry_reports_the_job_once() -> None:
    def scenario(points: Interposed) -> None:
        engines: list[LaneEngine] = []
        outcome = Outcome()
        member = Refusing()

        def operate() -> None:
            engines.append(LaneEngine([member], PYTHON))
            points.armed = True
            buffer = buffer_of(bytes(1 << 20))
            move = Transfer(0, 0, buffer, 0, 1 << 20)
            end = engines[0].now() + PATIENCE_S
            engines[0].submit([Job(False, [move], end, outcome.on_done, hold=True)])
            outcome.done.wait(0.2)

        def close() -> None:
            if engines[0].close(0.0) == 0:
                member.close()

        before = our_threads()
        points.run(operate, close)
        assert outcome.wait().reports == 1
        assert engines[0].close(PATIENCE_S) == 0
        assert all_gone(before)

    for _ in at_every_line(ENGINE, scenario):
        pass


@pytest.mark.parametrize("same", [False, True])
def test_a_close_at_every_line_of_a_probe_leaves_no_thread_and_no_member_open(same: bool) -> None:
    def scenario(points: Interposed) -> None:
        old, new = Refusing(), Refusing()
        found: Member = old if same else new
        before = our_threads()
        engine = LaneEngine([old], PYTHON, lambda _, __: found)
        slot = engine._slots[0]
        slot.health.note_stuck()
        left: list[int] = []

        points.armed = True
        points.run(lambda: engine.probe(0), lambda: left.append(engine.close(0.0)))
        slot.health.note_returned(works=True)
        if not left[0]:
            engine.member(0).close()
        assert engine.close(0.0) == 0
        assert all_gone(before)
        in_force = engine.member(0)
        assert in_force.closes == 0  # type: ignore[attr-defined]
        if not same:
            other = old if in_force is new else new
            assert other.closes <= 1
            assert new.closes == (in_force is not new)

    for _ in at_every_line(ENGINE, scenario):
        pass


def test_what_the_kernel_gives_back_after_a_close_is_reported_then(
    members: list[DeviceMember],
) -> None:
    """A job on hold: its buffer is the kernel's until then."""
    gate, entered = threading.Event(), threading.Event()

    class Slow(MemoryMember):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            entered.set()
            assert gate.wait(PATIENCE_S)
            return super().read_into(offset, buffer)

    before = our_threads()
    engine = LaneEngine([Slow(1 << 20)], PYTHON)
    outcome = Outcome()
    move = Transfer(0, 0, buffer_of(bytes(BLOCK)), 0, BLOCK)
    engine.submit([Job(False, [move], engine.now() + 60, outcome.on_done, hold=True)])
    assert entered.wait(PATIENCE_S)
    assert engine.close(0.0) == 1
    assert outcome.reports == 0
    gate.set()
    assert outcome.wait().reports == 1
    assert all_gone(before)


def test_time_is_not_lost_in_a_close_that_has_nothing_to_wait_for() -> None:
    engine = LaneEngine([MemoryMember(1 << 20)], PYTHON)
    started = time.monotonic()
    assert engine.close(PATIENCE_S) == 0
    assert time.monotonic() - started < PATIENCE_S / 2
