"""The native lane alone: what only threads in C can get wrong."""

import contextlib
import gc
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.engine.native_lane import NativeLane
from fx100_lmcache.members.base import Member
from support import SUPPORT
from support.engine import (
    KIB,
    MIB,
    PATIENCE_S,
    MakeEngine,
    Outcome,
    buffer_of,
    eventually,
    file_member,
    needs_native,
    pattern,
    read_at,
    start,
    write_at,
)

pytestmark = needs_native


def test_unaligned_memory_takes_the_python_lane(make_engine: MakeEngine, tmp_path: Path) -> None:
    member = file_member(tmp_path / "member")
    engine = make_engine([member], native=True)
    slot = engine._slots[0]
    aligned = Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)
    shifted = Transfer(0, 0, buffer_of(bytes(4096), shift=64), 0, 4096)
    Job(False, [aligned, shifted], 0.0, lambda _: None)
    assert isinstance(engine._lane_for(slot, aligned), NativeLane)
    if member.logical_block_bytes > 64:
        assert not isinstance(engine._lane_for(slot, shifted), NativeLane)


def test_a_closed_descriptor_is_an_error(make_engine: MakeEngine, tmp_path: Path) -> None:
    member = file_member(tmp_path / "member")
    engine = make_engine([member], native=True)
    member.close()
    found = read_at(engine, 0, buffer_of(bytes(4096)))
    assert found.statuses == [Status.ERROR]


def test_a_truncated_file_is_an_error(make_engine: MakeEngine, tmp_path: Path) -> None:
    """B39: whatever the buffer held before is never taken for data."""
    path = tmp_path / "member"
    member = file_member(path)
    engine = make_engine([member], native=True)
    checksum = write_at(engine, 0, buffer_of(pattern(2 * MIB))).transfers[0].checksum
    os.truncate(path, MIB)
    found = read_at(engine, 0, buffer_of(pattern(2 * MIB)), checksum)
    assert found.statuses == [Status.ERROR]
    assert str(path) in str(found.transfers[0].error)


def test_a_failing_handler_loses_no_other_completion(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    engine = make_engine([file_member(tmp_path / "member")], native=True)

    def broken(_: Job) -> None:
        raise RuntimeError("a bug in the caller")

    outcomes, jobs = [], []
    for number in range(40):
        transfer = Transfer(0, number * 4096, buffer_of(bytes(4096)), 0, 4096)
        outcome = Outcome()
        outcomes.append(outcome)
        jobs.append(
            Job(False, [transfer], engine.now() + 30, outcome.on_done if number % 2 else broken)
        )
    engine.submit(jobs)
    for outcome in outcomes[1::2]:
        assert outcome.wait().statuses == [Status.OK]
    assert "a completion handler failed" in caplog.text
    assert engine.close(PATIENCE_S) == 0


def test_engines_give_back_descriptors_threads_and_memory(tmp_path: Path) -> None:
    """B16: the counts are those of before."""
    member = file_member(tmp_path / "member")

    def use_one() -> weakref.ref[LaneEngine]:
        engine = LaneEngine([member], EngineOptions(reader_threads=4, probe_interval_s=0.01))
        read_at(engine, 0, buffer_of(bytes(4096)))
        assert engine.close(PATIENCE_S) == 0
        return weakref.ref(engine)

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208

    use_one()
    time.sleep(0.3)
    before = counts()
    engines = [use_one() for _ in range(10)]
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        gc.collect()
        if counts() <= before and not any(ref() for ref in engines):
            break
        time.sleep(0.05)
    assert counts() <= before
    assert [ref() for ref in engines] == [None] * 10
    member.close()


def count_transfers() -> int:
    gc.collect()
    return sum(type(thing) is Transfer for thing in gc.get_objects())


def test_stress_with_cancellation(tmp_path: Path) -> None:
    """Many threads, short deadlines: every job is reported once, nothing is wrong or left over."""
    members: list[Member] = [file_member(tmp_path / f"member{n}", 4 * MIB) for n in range(2)]
    engine = LaneEngine(members, EngineOptions(reader_threads=3, writer_threads=2))
    contents = pattern(64 * KIB)
    checksum = 0
    for member in range(2):
        for at in range(0, 4 * MIB, 64 * KIB):
            checksum = write_at(engine, at, buffer_of(contents), member).transfers[0].checksum
    before = count_transfers()
    problems: list[str] = []
    totals = {Status.OK: 0, Status.TIMED_OUT: 0}
    stop = time.monotonic() + 3.0

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < stop:
            outcomes = [one(rng) for _ in range(rng.randrange(1, 12))]
            for outcome in outcomes:
                if not outcome.done.wait(PATIENCE_S):
                    problems.append("never reported")
                    return
                check(outcome)

    def one(rng: random.Random) -> Outcome:
        pieces = rng.randrange(1, 6)
        buffer = buffer_of(bytes(pieces * 64 * KIB), shift=rng.choice((0, 0, 0, 64)))
        write = rng.random() < 0.2
        transfers = []
        for n in range(pieces):
            if write:
                buffer.view[n * 64 * KIB : (n + 1) * 64 * KIB] = contents
            at = rng.randrange(64) * 64 * KIB
            expected = None if write else checksum
            transfer = Transfer(rng.randrange(2), at, buffer, n * 64 * KIB, 64 * KIB, expected)
            transfers.append(transfer)
        within = rng.choice((0.0002, 0.001, 0.01, 30.0))
        return start(engine, transfers, write=write, within_s=within, hold=rng.random() < 0.5)

    def check(outcome: Outcome) -> None:
        if outcome.reports != 1:
            problems.append(f"reported {outcome.reports} times")
        for transfer in outcome.transfers:
            # a refusal: the member was suspect for a moment
            if transfer.status in totals:
                totals[transfer.status] += 1
            elif transfer.status is not Status.ERROR:
                problems.append(f"{transfer.status}")
            if transfer.status is Status.OK and transfer.checksum != checksum:
                problems.append("wrong bytes")

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert problems == []
    assert min(totals.values()) > 0, f"the mix missed a case: {totals}"
    assert engine.close(PATIENCE_S) == 0
    del threads
    assert count_transfers() <= before
    for member in members:
        member.close()


def test_operations_of_a_replaced_member_do_not_touch_its_successor(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Tickets of two pools are alike: an expiry must go to the pool that the transfer is in."""
    old, new = file_member(tmp_path / "old"), file_member(tmp_path / "new")
    engine = make_engine([old], native=True)
    slot = engine._slots[0]
    expired = Outcome()
    transfer = Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)
    job = Job(False, [transfer], engine.now() + 0.3, expired.on_done, expired.on_late)
    slot.reads.close()  # as if every thread of the old device hung: it stays in the queue
    time.sleep(0.05)
    engine.submit([job])
    engine._slots[0] = engine._equip(0, new)
    outcomes = [
        start(engine, [Transfer(0, 0, buffer_of(bytes(MIB)), 0, MIB)], hold=True) for _ in range(50)
    ]
    assert expired.wait().statuses == [Status.TIMED_OUT]
    assert not transfer.in_kernel
    for outcome in outcomes:
        assert outcome.wait().statuses == [Status.OK]


@pytest.fixture(scope="module")
def stalling_pread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the preloaded pread")
    library = tmp_path_factory.mktemp("preload") / "stalling_pread.so"
    source = str(SUPPORT / "stalling_pread.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), source, "-ldl"], check=True)
    return library


def run_scenario(scenario: str, folder: Path, preload: Path) -> None:
    """Run a scenario in a process of its own, whose `pread` is not that of the kernel."""
    with contextlib.closing(file_member(folder / "member")):
        pass
    stall, slow = folder / "stall", folder / "slow"
    # a sanitizer's runtime, if there is one, must stay the first
    preloads = f"{os.environ.get('LD_PRELOAD', '')} {preload}".strip()
    found = subprocess.run(
        [sys.executable, "-m", "support.native_stalls", scenario, folder / "member", stall],
        env=os.environ | {"LD_PRELOAD": preloads, "STALL_FILE": str(stall), "SLOW_FILE": str(slow)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=False,
    )
    assert (found.returncode, found.stdout) == (0, "passed\n"), found.stderr


@pytest.mark.parametrize("scenario", ["late", "closing", "batch", "closing_batch", "forgiven"])
def test_reads_that_hang(scenario: str, stalling_pread: Path, tmp_path: Path) -> None:
    run_scenario(scenario, tmp_path, stalling_pread)


@pytest.mark.parametrize("scenario", ["slow", "depth"])
def test_threads_at_work(scenario: str, stalling_pread: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-members-") as memory:
        run_scenario(scenario, Path(memory), stalling_pread)


def test_completions_are_heard_of_in_their_order(make_engine: MakeEngine, tmp_path: Path) -> None:
    """What comes after a failure says whether the member works again; not what came before."""
    engine = make_engine([file_member(tmp_path / "member")], native=True, reader_threads=1)
    order: list[int] = []
    jobs = []

    def note(number: int, _: Job) -> None:
        order.append(number)
        if number == 0:
            time.sleep(0.2)  # meanwhile the others end

    for number in range(500):
        transfer = Transfer(0, number % 64 * 4096, buffer_of(bytes(4096)), 0, 4096)
        jobs.append(Job(False, [transfer], engine.now() + PATIENCE_S, partial(note, number)))
    engine.submit(jobs)
    assert eventually(lambda: len(order) == 500)
    assert order == sorted(order)


class WithoutMemory:
    """The extension as it is when Python has no memory for what has ended."""

    def __init__(self, module: ModuleType, failures: int) -> None:
        self._module = module
        self.left = failures

    def drain(self, *arguments: object) -> object:
        if self.left:
            self.left -= 1
            raise MemoryError
        return self._module.drain(*arguments)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def test_the_reaper_outlives_want_of_memory_and_loses_nothing(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine([file_member(tmp_path / "member")], native=True)
    lane = engine._slots[0].reads
    assert isinstance(lane, NativeLane)
    without = WithoutMemory(lane.module, 3)
    lane.module = without  # type: ignore[assignment]
    outcomes = [
        start(engine, [Transfer(0, n * 4096, buffer_of(bytes(4096)), 0, 4096)]) for n in range(20)
    ]
    assert [outcome.wait().statuses for outcome in outcomes] == [[Status.OK]] * 20
    assert without.left == 0
