"""G2, one node: our engine against fio, sessions at once, restart, and whether it would work."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fx100_lmcache.accept import fio
from fx100_lmcache.accept.bench import Bench, judge_findings
from fx100_lmcache.accept.gate import Gate
from fx100_lmcache.accept.objects import (
    Contents,
    Loads,
    load,
    opened,
    ours_in,
    put,
    refuse_full,
    remove_ours,
)
from fx100_lmcache.accept.plots import plots_step
from fx100_lmcache.accept.steps import (
    CannotRunError,
    Chart,
    Outcome,
    Step,
    Table,
    Verdict,
    thinned,
)
from fx100_lmcache.buffers import IoBuffer, aligned_buffer
from fx100_lmcache.config.values import format_size
from fx100_lmcache.members.base import Member
from fx100_lmcache.store import Store

DOCTOR, STORE, RESTART = "doctor", "store sessions", "restart"
SEQUENTIAL, LOAD, ENGINE = "sequential baseline", "load sessions", "engine against fio"
VERIFY, CLEAN = "verify", "clear up"
_SEQUENTIAL_S = 10.0
_GUESS_BYTES_PER_S = 1e9
"""For the plan: slower than an array, about what a local disk does."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How much is moved at this scale.

    Attributes
    ----------
    sessions : int
        As many as come at once at most.
    chunks : int
        Objects of one session.
    window : int
        Objects of one session in memory at a time.
    """

    sessions: int
    chunks: int
    window: int
    object_bytes: int
    concurrency: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Of all sessions together."""
        return self.sessions * self.chunks * self.object_bytes

    def numbers(self, session: int) -> list[int]:
        """Return the objects of one session."""
        return list(range(session * self.chunks, (session + 1) * self.chunks))


def sizes_of(bench: Bench) -> Sizes:
    """Return how much is moved at this scale."""
    wanted, size = bench.criteria.g2, bench.config.volume.object_bytes
    chunks = bench.scaled_bytes(wanted.session_bytes, size, least=4) // size
    counts = tuple(sorted(wanted.concurrency))
    return Sizes(
        max(counts), chunks, min(chunks, max(1, wanted.window_bytes // size)), size, counts
    )


def gate(bench: Bench) -> Gate:
    """Return the gate's steps for this configuration."""
    sizes, wanted = sizes_of(bench), bench.criteria.g2
    total = sizes.total_bytes
    once_s = total / _GUESS_BYTES_PER_S
    share = sum(sizes.concurrency) / sizes.sessions
    text = format_size(total // _MIB * _MIB or total)
    steps = (
        Step(DOCTOR, "the configuration would really work, in the mode to be used", _doctor, 15),
        Step(
            STORE,
            f"{sizes.sessions} sessions of {sizes.chunks} objects are stored",
            _store,
            once_s + 2,
            writes=f"{text} of objects of its own into the free space of the volume",
        ),
        Step(
            RESTART,
            "all of them are found again after a restart, soon enough",
            _restart,
            5,
            needs=STORE,
        ),
        Step(
            SEQUENTIAL,
            "what one member read one chunk at a time brings",
            _sequential,
            bench.scaled_s(_SEQUENTIAL_S),
            needs=STORE,
        ),
        Step(
            LOAD,
            f"load time of a session, {', '.join(map(str, sizes.concurrency))} at once; every byte",
            _load_sessions,
            once_s * (share * wanted.runs + 1) + 2,
            needs=STORE,
        ),
        Step(
            ENGINE,
            "the engine is as fast as fio on the same members",
            _engine,
            once_s * 2 * wanted.runs + 10,
            tools=("fio",),
            needs=STORE,
        ),
        verify_step(once_s + 2),
        clear_step(),
        plots_step(),
    )
    return Gate("g2", "G2 single node", steps)


def verify_step(about_s: float) -> Step:
    """Return the step that reads all of the volume back."""
    return Step(VERIFY, "every entry's checksum is right", _verify, about_s)


def clear_step() -> Step:
    """Return the step that removes what the kit stored."""
    return Step(
        CLEAN,
        "what this gate stored is removed",
        _clear,
        3,
        writes="removes its own objects from the volume",
        always=True,
    )


def _doctor(bench: Bench) -> Outcome:
    mode = bench.criteria.g2.mode
    code, answer = bench.fx100("doctor", str(bench.config_path), "--mode", mode)
    outcome = Outcome(raw={"findings": answer["findings"]})
    judge_findings(outcome, code, answer["findings"], ("warning",))
    return outcome


def _store(bench: Bench) -> Outcome:
    sizes, contents = sizes_of(bench), Contents(bench.config.volume.object_bytes)
    outcome = Outcome()
    with opened(bench.config) as mounted:
        store = mounted.store
        there = ours_in(store)
        numbers = [n for s in range(sizes.sessions) for n in sizes.numbers(s) if n not in there]
        refuse_full(store, len(numbers) * sizes.object_bytes)
        started = time.perf_counter()
        refused = put(store, contents, numbers)
        took_s = time.perf_counter() - started
    found = f"{len(numbers) - len(refused)} of {len(numbers)}"
    found += f"; not stored: {', '.join(sorted(set(refused)))}" if refused else ""
    outcome.judge("objects stored", found, "all", not refused)
    if numbers:
        rate = len(numbers) * sizes.object_bytes / took_s / 1e9
        outcome.note("bandwidth, bytes made up meanwhile", f"{rate:.2f} GB/s")
    return outcome


def _restart(bench: Bench) -> Outcome:
    sizes, limit_s = sizes_of(bench), bench.criteria.g2.max_recovery_s
    started = time.perf_counter()
    with opened(bench.config) as mounted:
        open_s = time.perf_counter() - started
        recovery_s, entries = mounted.store.recovery_s, len(mounted.store)
        here = len(ours_in(mounted.store))
    outcome = Outcome(raw={"open_s": open_s, "recovery_s": recovery_s, "entries": entries})
    wanted = sizes.sessions * sizes.chunks
    outcome.judge("objects found again", f"{here} of {wanted}", "all", here >= wanted)
    outcome.judge(
        f"recovery of {entries} entries",
        f"{recovery_s:.3f} s",
        f"at most {limit_s:g} s",
        recovery_s <= limit_s,
    )
    outcome.note("opening altogether", f"{open_s:.3f} s")
    return outcome


def _sequential(bench: Bench) -> Outcome:
    sizes, limit_s = sizes_of(bench), bench.scaled_s(_SEQUENTIAL_S)
    share = sizes.total_bytes // len(bench.config.volume.members)
    with opened(bench.config) as mounted:
        member = mounted.volume.members[0]
        start = mounted.volume.geometry.block_offset(0, 0)
        speed = _one_by_one(member, start, share, sizes.object_bytes, limit_s)
    outcome = Outcome(raw={"gb_per_s": speed})
    outcome.note("one member, one chunk at a time", f"{speed:.2f} GB/s")
    return outcome


def _one_by_one(
    member: Member, start: int, share_bytes: int, object_bytes: int, limit_s: float
) -> float:
    """Read a member from ``start`` on, one call at a time; return GB/s."""
    size = max(4096, object_bytes // 4096 * 4096)
    end = min(start + max(share_bytes, size), member.size_bytes // 4096 * 4096)
    at, moved, started = start, 0, time.perf_counter()
    with aligned_buffer(size) as buffer:
        while at + size <= end and time.perf_counter() - started < limit_s:
            count = member.read_into(at, buffer)
            if count <= 0:
                raise OSError(f"{member.name} gave nothing at {at}")
            moved, at = moved + count, at + size
    return moved / (time.perf_counter() - started) / 1e9


def _load_sessions(bench: Bench) -> Outcome:
    sizes, contents = sizes_of(bench), Contents(bench.config.volume.object_bytes)
    outcome = Outcome()
    rows, line = [], []
    with opened(bench.config) as mounted:
        windows = [[contents.buffer() for _ in range(sizes.window)] for _ in range(sizes.sessions)]
        first = _at_once(mounted.store, contents, sizes, sizes.sessions, windows, check=True)
        _judge_bytes(outcome, sizes, first)
        for count in sizes.concurrency:
            walls, speeds = [], []
            for _ in range(bench.criteria.g2.runs):
                started = time.perf_counter()
                found = _at_once(mounted.store, contents, sizes, count, windows, check=False)
                took_s = time.perf_counter() - started
                speeds.append(count * sizes.chunks * sizes.object_bytes / took_s / 1e9)
                walls += [each.wall_s for each in found]
            p50, p95 = statistics.median(walls), sorted(walls)[int(0.95 * (len(walls) - 1))]
            rows.append((count, round(p50, 4), round(p95, 4), round(statistics.median(speeds), 3)))
            line.append((float(count), p50))
    outcome.tables.append(
        Table("load of whole sessions", ("at once", "p50 s", "p95 s", "GB/s all"), tuple(rows))
    )
    outcome.charts.append(
        Chart("load time of one session", "sessions at once", "p50, seconds", {"ours": line}, True)
    )
    outcome.raw["rows"] = [list(row) for row in rows]
    _judge_load(bench, outcome, rows[-1])
    return outcome


def _at_once(
    store: Store,
    contents: Contents,
    sizes: Sizes,
    count: int,
    windows: list[list[IoBuffer]],
    *,
    check: bool,
) -> list[Loads]:
    def one(session: int) -> Loads:
        return load(store, contents, sizes.numbers(session), windows[session], check=check)

    with ThreadPoolExecutor(count, thread_name_prefix="fx100-accept") as pool:
        return list(pool.map(one, range(count)))


def _judge_bytes(outcome: Outcome, sizes: Sizes, loads: list[Loads]) -> None:
    missed = {number: reason for each in loads for number, reason in each.missed.items()}
    wrong = [number for each in loads for number in each.wrong]
    total = sizes.sessions * sizes.chunks
    found = f"{len(missed)} of {total}"
    found += f" ({', '.join(sorted(set(missed.values())))})" if missed else ""
    outcome.judge("objects that were misses", found, "none", not missed)
    outcome.judge("objects with other bytes", f"{len(wrong)} of {total}", "none", not wrong)


def _judge_load(bench: Bench, outcome: Outcome, last: tuple[int, float, float, float]) -> None:
    wanted = bench.criteria.g2
    count, p50, p95, speed = last
    outcome.judge(
        f"p95 over p50, {count} at once",
        f"{p95 / p50:.2f}",
        f"at most {wanted.fairness:g}",
        p95 / p50 <= wanted.fairness,
    )
    earlier = bench.earlier.get(SEQUENTIAL)
    if earlier is None or earlier.verdict is not Verdict.PASSED:
        return
    ratio = speed / earlier.raw["gb_per_s"]
    outcome.judge(
        f"{count} at once over the sequential baseline",
        f"{ratio:.2f} times",
        f"at least {wanted.parallel_to_sequential:g} times",
        ratio >= wanted.parallel_to_sequential,
    )


def _engine(bench: Bench) -> Outcome:
    sizes, wanted = sizes_of(bench), bench.criteria.g2
    contents = Contents(sizes.object_bytes)
    cell_s = max(1.0, bench.scaled_s(10.0))
    with opened(bench.config) as mounted:
        members = [member.name for member in mounted.volume.members]
        start = mounted.volume.geometry.block_offset(0, 0)
    share = max(_MIB, sizes.total_bytes // len(members) // _MIB * _MIB)
    todo = fio.cells(["sequential"], ["read"], [_MIB], thinned(wanted.fio_depths, bench.scale))
    text = fio.job_file(
        [Path(name) for name in members],
        todo,
        engine=bench.criteria.g1.fio.engine,
        cell_s=cell_s,
        offset_bytes=-(-start // _MIB) * _MIB,
        region_bytes=share,
    )
    theirs, ours = [], []
    for run in range(wanted.runs):
        found = fio.measure(bench, f"g2-fio-{run}", text, todo, cell_s)
        theirs.append(max(each.gb_per_s for each in found))
        ours.append(_our_speed(bench, contents, sizes))
    best, mine = statistics.median(theirs), statistics.median(ours)
    outcome = Outcome(raw={"fio_gb_per_s": theirs, "ours_gb_per_s": ours})
    rows = tuple(zip(range(1, len(ours) + 1), theirs, [round(x, 3) for x in ours], strict=True))
    outcome.tables.append(Table("alternating runs", ("run", "fio GB/s", "ours GB/s"), rows))
    outcome.judge(
        "ours over fio, medians",
        f"{mine / best:.2f} ({mine:.2f} and {best:.2f} GB/s)",
        f"at least {wanted.engine_to_fio:g}",
        mine / best >= wanted.engine_to_fio,
    )
    return outcome


def _our_speed(bench: Bench, contents: Contents, sizes: Sizes) -> float:
    count = sizes.sessions
    with opened(bench.config) as mounted:
        windows = [[contents.buffer() for _ in range(sizes.window)] for _ in range(count)]
        for window in windows:  # the first touch of memory is not what is measured
            for buffer in window:
                contents.fill(buffer, 0)
        started = time.perf_counter()
        found = _at_once(mounted.store, contents, sizes, count, windows, check=False)
        took_s = time.perf_counter() - started
    missed = sum(len(each.missed) for each in found)
    if missed:
        raise CannotRunError(f"{missed} objects were misses, so there is no speed to compare")
    return sizes.total_bytes / took_s / 1e9


def _verify(bench: Bench) -> Outcome:
    code, answer = bench.fx100("verify", str(bench.config_path), timeout_s=24 * 3600)
    outcome = Outcome(raw=answer)
    bad = answer.get("bad", [])
    outcome.judge("bad pieces", str(len(bad)), "none", code == 0 and not bad)
    return outcome


def _clear(bench: Bench) -> Outcome:
    outcome = Outcome()
    with opened(bench.config) as mounted:
        outcome.note("objects removed", str(remove_ours(mounted.store)))
        left = len(ours_in(mounted.store))
    outcome.judge("objects left", str(left), "none", left == 0)
    return outcome
