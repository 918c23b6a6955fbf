"""Batches of reads: whatever happens, each object is reported once, as itself or as a job."""

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fx100_lmcache.buffers import IoBuffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Status
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.members.base import Member
from support.batches import BatchOutcome, Piece, read_batch
from support.engine import (
    KIB,
    MIB,
    PATIENCE_S,
    MakeEngine,
    buffer_of,
    eventually,
    file_member,
    needs_native,
    pattern,
    state,
    write_at,
)

PIECE = 64 * KIB
Setup = Callable[..., LaneEngine]


def two_members(folder: Path) -> list[Member]:
    return [file_member(folder / f"member{n}") for n in range(2)]


class Written:
    """Objects of two pieces each, on two members, and what they must read as."""

    def __init__(self, engine: LaneEngine, objects: int = 10, tail: int = 0) -> None:
        self.engine = engine
        self.contents = [pattern(2 * PIECE - tail, seed) for seed in range(objects)]
        self.pieces: list[list[Piece]] = []
        for number, whole in enumerate(self.contents):
            pieces = []
            for part in range(2):
                data = whole[part * PIECE : (part + 1) * PIECE]
                member, offset = (number + part) % 2, number * PIECE
                checksum = write_at(engine, offset, buffer_of(data), member).transfers[0].checksum
                pieces.append((member, offset, len(data), checksum))
            self.pieces.append(pieces)

    def buffers(self, shift: int = 0) -> list[IoBuffer]:
        return [buffer_of(bytes(len(whole)), shift=shift) for whole in self.contents]

    def read(
        self, buffers: list[IoBuffer], within_s: float = PATIENCE_S, *, hold: bool = True
    ) -> BatchOutcome:
        objects = list(zip(buffers, self.pieces, strict=True))
        batch, outcome = read_batch(objects, self.engine.now() + within_s, hold=hold)
        self.engine.read([batch])
        return outcome

    def check(self, outcome: BatchOutcome, buffers: list[IoBuffer]) -> None:
        for number in outcome.ok:
            whole = self.contents[number]
            assert bytes(buffers[number].view[: len(whole)]) == whole


@pytest.mark.parametrize("tail", [0, 1000])
def test_all_objects_of_a_batch_are_read(setup: Setup, tail: int) -> None:
    engine = setup(2)
    written = Written(engine, tail=tail)
    buffers = written.buffers()
    outcome = written.read(buffers).wait()
    assert outcome.ok == set(range(10))
    written.check(outcome, buffers)
    if engine.kind == "native":
        assert not outcome.made, "no job while all goes well"
    assert engine.open_jobs == 0


def test_several_batches_at_once(setup: Setup) -> None:
    engine = setup(2)
    written = Written(engine)
    targets = [written.buffers() for _ in range(5)]
    made = [
        read_batch(list(zip(buffers, written.pieces, strict=True)), engine.now() + PATIENCE_S)
        for buffers in targets
    ]
    engine.read([batch for batch, _ in made])
    for buffers, (_, outcome) in zip(targets, made, strict=True):
        assert outcome.wait().ok == set(range(10))
        written.check(outcome, buffers)


def test_unaligned_memory_is_read_through_a_bounce_buffer(setup: Setup) -> None:
    engine = setup(2)
    written = Written(engine)
    buffers = written.buffers(shift=64)
    outcome = written.read(buffers).wait()
    assert outcome.ok == set(range(10))
    written.check(outcome, buffers)


@pytest.mark.parametrize("bad", [(0, 0), (4, 1), (9, 1)])
def test_one_wrong_checksum_is_one_mismatch(setup: Setup, bad: tuple[int, int]) -> None:
    engine = setup(2)
    written = Written(engine)
    number, part = bad
    member, offset, length, checksum = written.pieces[number][part]
    written.pieces[number][part] = (member, offset, length, checksum ^ 1)
    buffers = written.buffers()
    outcome = written.read(buffers).wait()
    assert outcome.ok == set(range(10)) - {number}
    assert outcome.jobs[number][part] is Status.MISMATCH
    assert outcome.jobs[number][1 - part] is Status.OK
    written.check(outcome, buffers)
    assert [state(engine, m) for m in range(2)] == ["up", "up"]


def test_a_batch_after_its_deadline_times_out(setup: Setup) -> None:
    written = Written(setup(2))
    outcome = written.read(written.buffers(), within_s=-1.0).wait()
    assert {s for statuses in outcome.jobs.values() for s in statuses} == {Status.TIMED_OUT}


def test_a_batch_after_close_is_refused(setup: Setup) -> None:
    engine = setup(2)
    written = Written(engine)
    engine.close(PATIENCE_S)
    outcome = written.read(written.buffers()).wait()
    assert {s for statuses in outcome.jobs.values() for s in statuses} == {Status.ERROR}
    assert engine.open_jobs == 0


@needs_native
def test_a_truncated_member_fails_only_what_was_there(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """B39: what the buffers held before is never taken for data."""
    members = two_members(tmp_path)
    engine = make_engine(members, native=True)
    written = Written(engine)
    os.truncate(tmp_path / "member1", 8 * PIECE)
    buffers = written.buffers()
    outcome = written.read(buffers).wait()
    assert outcome.ok == set(range(8))
    written.check(outcome, buffers)
    for number in (8, 9):
        assert Status.ERROR in outcome.jobs[number]
    assert engine.states()[1].errors == 2


@needs_native
def test_objects_on_a_member_that_is_down_are_refused(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    members = two_members(tmp_path)
    engine = make_engine(members, native=True)
    written = Written(engine)
    written.pieces = [
        [(number % 2, *p[1:]) for p in written.pieces[number]] for number in range(10)
    ]
    members[1].close()
    first = written.read(written.buffers()).wait()
    assert first.ok <= {0, 2, 4, 6, 8}
    assert eventually(lambda: state(engine, 1) == "down")
    second = written.read(written.buffers()).wait()
    assert all(set(second.jobs[n]) == {Status.ERROR} for n in (1, 3, 5, 7, 9))


@needs_native
def test_a_lane_with_a_batch_in_flight_is_not_idle(make_engine: MakeEngine, tmp_path: Path) -> None:
    """A replaced member's descriptor is closed when its lanes are idle, and not before."""
    engine = make_engine([file_member(tmp_path / "member")] * 2, native=True)
    written = Written(engine)
    slot = engine._slots[0]
    slot.reads.close()  # as if its threads hung: what comes stays in the queue
    time.sleep(0.05)
    outcome = written.read(written.buffers(), within_s=0.3)
    assert not slot.idle
    assert outcome.wait().ok == set()
    assert slot.idle


@needs_native
def test_a_failing_handler_of_a_batch_is_logged(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    engine = make_engine([file_member(tmp_path / "member")] * 2, native=True)
    written = Written(engine)
    objects = list(zip(written.buffers(), written.pieces, strict=True))
    batch, outcome = read_batch(objects, engine.now() + PATIENCE_S)

    def fail(_: int) -> None:
        raise RuntimeError("a bug in the caller")

    outcome.report = fail  # type: ignore[method-assign]
    engine.read([batch])
    assert eventually(lambda: "a completion handler failed" in caplog.text)
    assert eventually(lambda: engine.open_jobs == 0)
    assert written.read(written.buffers()).wait().ok == set(range(10))


@needs_native
def test_stress_of_batches(tmp_path: Path) -> None:
    """Short deadlines, wrong checksums, truncation: each object once, and never wrong bytes."""
    members = two_members(tmp_path)
    engine = LaneEngine(members, EngineOptions(reader_threads=3, writer_threads=2))
    written = Written(engine, objects=40)
    seen = {"all good": 0, "timed out": 0, "mismatch": 0}
    problems: list[str] = []
    stop = time.monotonic() + 3.0

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < stop and not problems:
            chosen = rng.choices(range(40), k=rng.randrange(1, 60))
            pieces = [list(written.pieces[number]) for number in chosen]
            if wrong := rng.random() < 0.3:
                member, offset, length, checksum = pieces[0][1]
                pieces[0][1] = (member, offset, length, checksum ^ 4)
            buffers = [buffer_of(bytes(2 * PIECE)) for _ in chosen]
            within = rng.choice((0.0003, 0.001, 0.003, 30.0))
            batch, outcome = read_batch(
                list(zip(buffers, pieces, strict=True)),
                engine.now() + within,
                hold=rng.random() < 0.5,
            )
            engine.read([batch])
            if not outcome.done.wait(PATIENCE_S):
                problems.append(f"never reported: {set(range(len(chosen))) - set(outcome.reports)}")
                return
            check(chosen, buffers, outcome, wrong)

    def check(
        chosen: list[int], buffers: list[IoBuffer], outcome: BatchOutcome, wrong: bool
    ) -> None:
        if set(outcome.reports.values()) != {1}:
            problems.append(f"reported {outcome.reports}")
        if wrong and 0 in outcome.ok:
            problems.append("a wrong checksum was taken for good")
        for place in outcome.ok:
            if bytes(buffers[place].view[: 2 * PIECE]) != written.contents[chosen[place]]:
                problems.append("wrong bytes")
        statuses = {status for each in outcome.jobs.values() for status in each}
        seen["all good"] += len(outcome.good) == len(chosen)
        seen["timed out"] += Status.TIMED_OUT in statuses
        seen["mismatch"] += Status.MISMATCH in statuses

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert problems == []
    assert min(seen.values()) > 0, f"the mix missed a case: {seen}"
    assert engine.close(PATIENCE_S) == 0
    assert engine.open_jobs == 0
    for slot in engine._slots:
        assert slot.reads.idle
    for member in members:
        member.close()


def test_a_large_member_of_one(setup: Setup) -> None:
    engine = setup(1, 8 * MIB)
    data = pattern(4 * MIB)
    checksum = write_at(engine, MIB, buffer_of(data)).transfers[0].checksum
    buffer = buffer_of(bytes(4 * MIB))
    batch, outcome = read_batch([(buffer, [(0, MIB, 4 * MIB, checksum)])], engine.now() + 30)
    engine.read([batch])
    assert outcome.wait().ok == {0}
    assert bytes(buffer.view[: 4 * MIB]) == data
