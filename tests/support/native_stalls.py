"""Scenarios of a native lane whose reads hang or are slow; run in a process of its own."""

import ctypes
import os
import sys
import time
from pathlib import Path

from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.members.device import open_member
from support.batches import read_batch
from support.engine import MIB, PATIENCE_S, Outcome, buffer_of, eventually, pattern, start, write_at

BUDGET_BYTES = 3 * 4096
PRELOADED = os.environ["LD_PRELOAD"].split()[-1]


def reads(engine: LaneEngine, count: int, within_s: float, *, hold: bool = False) -> list[Outcome]:
    return [
        start(
            engine, [Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)], within_s=within_s, hold=hold
        )
        for _ in range(count)
    ]


def late(engine: LaneEngine, stall: Path) -> None:
    """Those in the kernel come late, those in the queue are cancelled, held ones wait."""
    stall.touch()
    held = reads(engine, 1, 0.3, hold=True)[0]
    free = reads(engine, 3, 0.3)
    for outcome in free:
        assert outcome.wait().statuses == [Status.TIMED_OUT]
    in_kernel = [o for o in free if o.transfers[0].in_kernel]
    assert len(in_kernel) == 1, "two threads: one has the held read, one of the others is in"
    assert held.reports == 0
    assert engine.states()[0].state == "suspect"
    stall.unlink()
    assert held.wait().statuses == [Status.OK]
    assert in_kernel[0].came_late.wait(PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while engine.states()[0].stuck and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.states()[0].state == "up"
    assert [(o.reports, len(o.late)) for o in free] == [(1, int(o in in_kernel)) for o in free]
    assert engine.close(PATIENCE_S) == 0


def batch(engine: LaneEngine, stall: Path) -> None:
    """A batch at its deadline: queued reads are cancelled, those in the kernel are waited for."""
    checksum = write_at(engine, 0, buffer_of(pattern(4096))).transfers[0].checksum
    for hold in (True, False):
        stall.touch()
        objects = [(buffer_of(bytes(4096)), [(0, 0, 4096, checksum)]) for _ in range(6)]
        described, outcome = read_batch(objects, engine.now() + 0.3, hold=hold)
        engine.read([described])
        assert eventually(lambda o=outcome, h=hold: len(o.reports) == (4 if h else 6))
        assert {s for statuses in outcome.jobs.values() for s in statuses} == {Status.TIMED_OUT}
        assert engine.states()[0].state == "suspect"
        assert engine.states()[0].stuck == 2
        assert len(outcome.in_kernel) == (0 if hold else 2)
        stall.unlink()
        outcome.wait()
        assert len(outcome.ok) == (2 if hold else 0)
        assert eventually(lambda o=outcome, h=hold: h or sorted(o.late) == sorted(o.in_kernel))
        assert eventually(lambda: engine.states()[0].state == "up")
    assert engine.close(PATIENCE_S) == 0


def closing_batch(engine: LaneEngine, stall: Path) -> None:
    """Close keeps its deadline with a batch in the kernel."""
    stall.touch()
    objects = [(buffer_of(bytes(4096)), [(0, 0, 4096, 0)]) for _ in range(6)]
    described, outcome = read_batch(objects, engine.now() + 60.0, hold=False)
    engine.read([described])
    time.sleep(0.2)
    assert engine.close(0.2) == 2
    assert outcome.wait().ok == set()
    assert len(outcome.in_kernel) == 2


def closing(engine: LaneEngine, stall: Path) -> None:
    """Close keeps its deadline, the process ends although threads hang in the kernel."""
    stall.touch()
    outcomes = reads(engine, 5, 60.0)
    time.sleep(0.2)
    assert engine.close(0.2) == 2
    for outcome in outcomes:
        assert outcome.wait().statuses == [Status.TIMED_OUT]


def slow(engine: LaneEngine, stall: Path) -> None:
    """Two threads work while reads come from memory, all of them as soon as these take time."""
    most_at_once = ctypes.CDLL(PRELOADED).most_at_once
    for _ in range(64):
        reads(engine, 1, PATIENCE_S)[0].wait()
    most_at_once()
    for outcome in reads(engine, 200, PATIENCE_S):
        assert outcome.wait().statuses == [Status.OK]
    assert most_at_once() <= 2
    Path(os.environ["SLOW_FILE"]).touch()
    for outcome in reads(engine, 200, PATIENCE_S):
        assert outcome.wait().statuses == [Status.OK]
    assert most_at_once() == 6
    assert engine.close(PATIENCE_S) == 0


def depth(engine: LaneEngine, stall: Path) -> None:
    """The kernel has no more than the budget at a time, and one call whatever its size."""
    most_at_once = ctypes.CDLL(PRELOADED).most_at_once
    Path(os.environ["SLOW_FILE"]).touch()
    most_at_once()
    for outcome in reads(engine, 60, PATIENCE_S):
        assert outcome.wait().statuses == [Status.OK]
    assert most_at_once() == BUDGET_BYTES // 4096
    large = [
        start(engine, [Transfer(0, 0, buffer_of(bytes(MIB)), 0, MIB)], within_s=PATIENCE_S)
        for _ in range(5)
    ]
    for outcome in large:
        assert outcome.wait().statuses == [Status.OK]
    assert most_at_once() == 1
    assert engine.close(PATIENCE_S) == 0


def forgiven(engine: LaneEngine, stall: Path) -> None:
    """A member that answers its probe is as good as new, whatever hung calls still hold of it."""
    checksum = write_at(engine, 8 * 4096, buffer_of(pattern(4096))).transfers[0].checksum
    os.environ["STALL_BELOW"] = str(4096)
    stall.touch()
    held = reads(engine, 6, 0.2, hold=True)  # all threads, and all of the budget
    assert eventually(lambda: engine.states()[0].stuck == BUDGET_BYTES // 4096)
    assert engine.states()[0].state == "suspect"
    engine.probe(0)
    assert (engine.states()[0].state, engine.states()[0].stuck) == ("up", 3)
    for _ in range(2):
        objects = [(buffer_of(bytes(4096)), [(0, 8 * 4096, 4096, checksum)]) for _ in range(6)]
        described, outcome = read_batch(objects, engine.now() + PATIENCE_S)
        engine.read([described])
        assert outcome.wait().ok == set(range(6))
    stall.unlink()
    assert eventually(lambda: engine.states()[0].stuck == 0)
    assert sum(o.wait().statuses == [Status.OK] for o in held) == 3, "the others were cancelled"
    assert engine.close(PATIENCE_S) == 0


OPTIONS = {
    "forgiven": EngineOptions(
        reader_threads=6, read_in_flight_bytes=BUDGET_BYTES, probe_interval_s=1e6
    ),
    "slow": EngineOptions(reader_threads=6),
    "depth": EngineOptions(reader_threads=6, read_in_flight_bytes=BUDGET_BYTES),
}


def main() -> None:
    scenario, path, stall = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    member = open_member(path)
    options = OPTIONS.get(scenario, EngineOptions(reader_threads=2))
    engine = LaneEngine([member], options, lambda _, found: found)
    assert engine.kind == "native"
    write_at(engine, 0, buffer_of(pattern(4096)))
    scenarios = {
        "late": late,
        "closing": closing,
        "batch": batch,
        "closing_batch": closing_batch,
        "slow": slow,
        "depth": depth,
        "forgiven": forgiven,
    }
    scenarios[scenario](engine, stall)
    print("passed", flush=True)


main()
