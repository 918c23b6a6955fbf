"""G4, stability: mixed load for days, killed and cut off on a schedule, every byte checked."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fx100_lmcache.accept.bench import Bench, Command
from fx100_lmcache.accept.devices import fabric_controllers, snapshot_of
from fx100_lmcache.accept.gate import Gate
from fx100_lmcache.accept.node import clear_step, verify_step
from fx100_lmcache.accept.paths import until_back
from fx100_lmcache.accept.plots import plots_step
from fx100_lmcache.accept.steps import (
    CannotRunError,
    Chart,
    Outcome,
    Step,
    Table,
)
from fx100_lmcache.config.values import format_size

DRIFT = "drift"
MAX_SEGMENTS = 1000
_SAMPLES = 40
"""In each segment, about."""
_MIB = 1 << 20
_END_S = 30.0


@dataclass
class Segment:
    """What the load said between its start and its end.

    Attributes
    ----------
    ready_s : float or None
        From the start of the process until it had looked for all that must be there.
    lost : int
        Objects that were acknowledged before the last kill and are not there.
    expected : list of int
        What must be there after this segment's kill.
    troubled : list of (float, float)
        When a path was away: misses are no failure then.
    """

    started: float
    ready_s: float | None = None
    lost: int = 0
    wrong: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    troubled: list[tuple[float, float]] = field(default_factory=list)
    failure: str = ""

    def counts(self) -> Counter[str]:
        """Return what was counted; misses while a path was away are ``excused``."""
        total: Counter[str] = Counter(wrong=self.wrong)
        before = self.started
        for sample in self.samples:
            found = Counter(sample["counts"])
            if any(before <= end and begin <= sample["at"] for begin, end in self.troubled):
                found["excused"] += found.pop("misses", 0) + found.pop("refused", 0)
            total += found
            before = sample["at"]
        return total

    def quarter(self, which: int, key: str) -> float | None:
        """Return the median of a value in a quarter of the segment, 0 to 3."""
        at, step = which * len(self.samples) / 4, len(self.samples) / 4
        part = self.samples[int(at) : max(int(at) + 1, int(at + step))]
        values = [sample[key] for sample in part if sample.get(key) is not None]
        return statistics.median(values) if values else None


def gate(bench: Bench) -> Gate:
    """Return the gate's steps for this configuration."""
    count, each_s = segments(bench)
    size = bench.criteria.g4.objects * bench.config.volume.object_bytes
    text = format_size(max(_MIB, size // _MIB * _MIB))
    steps = [
        Step(
            name(at),
            "load, faults, SIGKILL; what was stored before the last one is all there",
            lambda bench, at=at: _segment(bench, at),  # type: ignore[misc]
            each_s + 5,
            writes=f"{text} of objects of its own into the volume's free space, again and again",
        )
        for at in range(count)
    ]
    drift = Step(DRIFT, "memory, descriptors and latency stay what they were", _drift)
    return Gate("g4", "G4 stability", (*steps, drift, verify_step(60), clear_step(), plots_step()))


def segments(bench: Bench) -> tuple[int, float]:
    """Return how many segments there are, and how long each is."""
    wanted = bench.criteria.g4
    total_s = wanted.hours * 3600 * min(1.0, bench.scale)
    each_s = min(wanted.segment_s, max(4.0, total_s / 3))
    return min(MAX_SEGMENTS, max(2, math.ceil(total_s / each_s))), each_s


def name(at: int) -> str:
    """Name of a segment's step."""
    return f"segment {at + 1}"


def _segment(bench: Bench, at: int) -> Outcome:
    _, each_s = segments(bench)
    before = bench.earlier.get(name(at - 1))
    if before is not None and "expected" not in before.raw:
        raise CannotRunError(f"{name(at - 1)} did not get as far as a kill")
    expected = before.raw["expected"] if before is not None else []
    found = _run_load(bench, at, each_s, expected)
    outcome = Outcome(raw={"expected": found.expected, "samples": found.samples})
    outcome.raw["ready_s"] = found.ready_s
    if found.failure and found.ready_s is None:
        raise CannotRunError(f"the load did not start: {found.failure}")
    _judge_promises(bench, outcome, found, at)
    _judge_growth(bench, outcome, found)
    outcome.note("operations", ", ".join(f"{n} {key}" for key, n in found.counts().items()))
    return outcome


def _judge_promises(bench: Bench, outcome: Outcome, found: Segment, at: int) -> None:
    counts, wanted = found.counts(), bench.criteria.g4
    said = found.failure or "ran until it was killed"
    outcome.judge("the load", said, "runs until it is killed", not found.failure)
    outcome.judge("loads with other bytes", str(counts["wrong"]), "none", not counts["wrong"])
    outcome.judge("misses of what is stored", str(counts["misses"]), "none", not counts["misses"])
    outcome.judge("refused puts", str(counts["refused"]), "none", not counts["refused"])
    outcome.judge("loads that were hits", str(counts["hits"]), "some", counts["hits"] > 0)
    if at:
        outcome.judge("stored, and gone after the kill", str(found.lost), "none", not found.lost)
    took_s = found.ready_s if found.ready_s is not None else math.inf
    outcome.judge(
        "from start to all looked for",
        f"{took_s:.1f} s",
        f"at most {wanted.restart_s:g} s",
        took_s <= wanted.restart_s,
    )
    for begin, end in found.troubled:
        back = end < math.inf
        outcome.judge(
            "the path that was pulled",
            f"back after {end - begin:.0f} s in all" if back else "did not come back",
            f"back within {wanted.path_back_s:g} s of its return",
            back,
        )


def _judge_growth(bench: Bench, outcome: Outcome, found: Segment) -> None:
    wanted = bench.criteria.g4
    for key, what, limit, unit in (
        ("memory_bytes", "memory", wanted.memory_growth_bytes / _MIB, _MIB),
        ("descriptors", "descriptors", float(wanted.descriptor_growth), 1),
    ):
        early, late = found.quarter(1, key), found.quarter(3, key)
        if early is None or late is None:
            continue
        grown = (late - early) / unit
        text = "MiB" if unit == _MIB else ""
        outcome.judge(
            f"growth of {what}, second quarter to last",
            f"{grown:.1f} {text}".strip(),
            f"at most {limit:g} {text}".strip(),
            grown <= limit,
        )


def _run_load(bench: Bench, at: int, each_s: float, expected: Sequence[int]) -> Segment:
    """Run the load's process for one segment, pull a path meanwhile, and kill it."""
    wanted = bench.criteria.g4
    file, log = bench.raw / f"segment-{at + 1}.jsonl", bench.raw / f"segment-{at + 1}.log"
    must = bench.raw / "expected.json"
    must.write_text(json.dumps(list(expected)))
    words = [str(bench.config_path), str(wanted.objects), str(wanted.threads)]
    argv = [*bench.load, *words, f"{max(0.1, each_s / _SAMPLES):g}", str(must)]
    found = Segment(bench.now())
    with file.open("wb") as output, log.open("wb") as errors:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            found.failure = _ended_within(process, each_s / 2)
            if not found.failure:
                _pull_one(bench, at, found)
                left_s = max(0.5, each_s - (bench.now() - found.started))
                found.failure = _ended_within(process, left_s)
        finally:
            process.kill()
            process.wait(_END_S)
    took_s = bench.now() - found.started
    line = Command(
        " ".join(argv), -signal.SIGKILL, round(took_s, 3), str(file.relative_to(bench.out))
    )
    bench.commands.append(line)
    _read(file, found, expected)
    if found.failure:
        found.failure += f": {log.read_text(errors='replace')[-300:].strip()}"
    return found


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for the load, which should outlive it; return how it ended, or nothing."""
    try:
        return f"ended with code {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        return ""


def _pull_one(bench: Bench, at: int, found: Segment) -> None:
    """Take one path away for a while; each segment another one."""
    if bench.paths is None:
        return
    live = sum(each.state == "live" for each in fabric_controllers(snapshot_of(bench)))
    names = bench.paths.names()
    path = names[at % len(names)]
    begin = bench.now()
    bench.paths.down(path)
    try:
        bench.pause(bench.scaled_s(bench.criteria.g4.path_down_s, 2.0))
    finally:
        bench.paths.up(path)
    back = until_back(bench, live, bench.criteria.g4.path_back_s)
    found.troubled.append((begin, math.inf if back is None else bench.now()))


def _read(file: Path, found: Segment, expected: Sequence[int]) -> None:
    """Read what the load said; afterwards the file has its samples alone."""
    stored, kept = dict.fromkeys(expected), []
    for line in _lines(file):
        if "stored" in line:
            stored[line["stored"]] = None
            continue
        kept.append(json.dumps(line))
        if "removing" in line:
            kept.pop()
            stored.pop(line["removing"], None)
        elif "ready" in line:
            found.ready_s = line["ready"] - found.started
            found.lost, found.wrong = line["lost"], line["wrong"]
        elif "at" in line:
            found.samples.append(line)
        else:
            found.failure = str(line.get("failure") or line.get("cannot") or line)
    found.expected = list(stored)
    file.write_text("".join(f"{line}\n" for line in kept))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open() as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # the last one may be cut off by the kill
                yield json.loads(line)


def _drift(bench: Bench) -> Outcome:
    """Compare segments with each other: the first third with the last."""
    count, _ = segments(bench)
    done = [bench.earlier[name(at)] for at in range(count)]
    ran = [each.raw for each in done if each.raw.get("samples")]
    if len(ran) < count:
        raise CannotRunError(f"{count - len(ran)} of {count} segments have no samples")
    outcome, rows = Outcome(), []
    for at, (raw, each) in enumerate(zip(ran, done, strict=True)):
        rows.append((at + 1, each.verdict, *_medians(raw["samples"]), round(raw["ready_s"], 2)))
    columns = ("segment", "verdict", "load p50 ms", "memory MiB", "descriptors", "restart s")
    outcome.tables.append(Table("medians of each segment", columns, tuple(rows)))
    part = max(1, count // 3)
    early = statistics.median(row[2] for row in rows[:part])
    late = statistics.median(row[2] for row in rows[-part:])
    limit = bench.criteria.g4.latency_growth
    outcome.judge(
        "p50 of loads, last third over first",
        f"{late / early:.2f} ({early:.2f} and {late:.2f} ms)",
        f"at most {limit:g}",
        late / early <= limit,
    )
    outcome.charts += _charts(ran)
    return outcome


def _medians(samples: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    def middle(key: str) -> float:
        values = [each[key] for each in samples if each.get(key) is not None]
        return statistics.median(values) if values else math.nan

    memory = middle("memory_bytes") / _MIB
    return round(middle("p50_ms"), 3), round(memory, 1), middle("descriptors")


def _charts(ran: Sequence[dict[str, Any]]) -> list[Chart]:
    samples = [sample for raw in ran for sample in raw["samples"]]
    begin = samples[0]["at"]
    charts = []
    for key, title, unit, scale in (
        ("p50_ms", "latency of loads", "p50, milliseconds", 1.0),
        ("memory_bytes", "memory of the load's process", "MiB", 1 / _MIB),
        ("descriptors", "open descriptors", "descriptors", 1.0),
    ):
        points = [
            ((each["at"] - begin) / 60, each[key] * scale)
            for each in samples
            if each.get(key) is not None
        ]
        charts.append(Chart(title, "minutes", unit, {title: points}))
    return charts
