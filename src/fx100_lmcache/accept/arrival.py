"""G1, arrival: is it what was bought, is it healthy, and is every member as fast as the others."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from fx100_lmcache.accept import devices, fio
from fx100_lmcache.accept.bench import Bench
from fx100_lmcache.accept.fio import Cell, Measured
from fx100_lmcache.accept.gate import Gate
from fx100_lmcache.accept.paths import pull_each
from fx100_lmcache.accept.plots import plots_step
from fx100_lmcache.accept.steps import Chart, Outcome, Step, Table, not_run, thinned
from fx100_lmcache.config.values import format_size

IDENTITY, PATHS, CHECK, SMART = "identity", "paths", "nvme check", "SMART"
READ, WRITE, PULL = "fio reads", "fio writes", "pull every path"
ALL = "all"
_MIB = 1 << 20
_LABELS_BYTES = 4 * _MIB
"""Reads begin behind a member's labels, so that they are of data."""
_BLOCK_BYTES = 4096


def gate(bench: Bench) -> Gate:
    """Return the gate's steps for this configuration."""
    members = len(bench.config.volume.members)
    reads, writes = len(_cells(bench, ["read"])), len(_cells(bench, ["write", "mixed"]))
    each_s = _cell_s(bench) + 1
    named = ", ".join(map(str, bench.destroy)) or "nothing, since --destroy names nothing"
    steps = (
        Step(IDENTITY, "controllers and namespaces are what was bought", devices.identity, 2),
        Step(PATHS, "every path is live, with jumbo frames and full speed", devices.paths, 2),
        Step(CHECK, "time-outs, queues and policies suit the job", devices.nvme_check, 3),
        Step(SMART, "no member has errors or wear", devices.smart, 3),
        Step(
            READ,
            f"{reads} cells on each of {members} members and on all together; members alike",
            _reads,
            reads * (members + 1) * each_s,
            tools=("fio",),
        ),
        Step(
            WRITE,
            f"{writes} cells of writes and of 70/30 on what may be destroyed",
            _writes,
            writes * each_s * max(1, len(bench.destroy)),
            writes=named,
            tools=("fio",),
        ),
        Step(PULL, "reads go on without each path, and it comes back", pull_each, 60),
        plots_step(),
    )
    return Gate("g1", "G1 arrival", steps)


def _cell_s(bench: Bench) -> float:
    return bench.scaled_s(bench.criteria.g1.fio.cell_s, 0.3)


def _cells(bench: Bench, directions: Sequence[str]) -> list[Cell]:
    wanted, scale = bench.criteria.g1.fio, bench.scale
    return fio.cells(
        thinned(wanted.patterns, max(scale, 0.05)),
        directions,
        thinned(wanted.block_bytes, scale),
        thinned(wanted.depths, scale),
    )


def _region(bench: Bench, path: Path, offset: int) -> int:
    size = bench.scaled_bytes(bench.criteria.g1.fio.region_bytes, _MIB, least=16 * _MIB)
    with path.open("rb") as file:
        there = file.seek(0, 2) - offset
    return max(_BLOCK_BYTES, min(size, there) // _MIB * _MIB)


def _measure(
    bench: Bench, name: str, paths: Sequence[Path], cells: Sequence[Cell], offset: int
) -> list[Measured]:
    bench.say(f"{name}: {len(cells)} cells of {_cell_s(bench):g} s")
    text = fio.job_file(
        paths,
        cells,
        engine=bench.criteria.g1.fio.engine,
        cell_s=_cell_s(bench),
        offset_bytes=offset,
        region_bytes=min(_region(bench, path, offset) for path in paths),
    )
    return fio.measure(bench, name, text, cells, _cell_s(bench))


def _reads(bench: Bench) -> Outcome:
    cells, members = _cells(bench, ["read"]), devices.member_files(bench)
    found = {
        str(path): _measure(bench, f"g1-read-{at}", [path], cells, _LABELS_BYTES)
        for at, path in enumerate(members)
    }
    found[ALL] = _measure(bench, "g1-read-all", members, cells, _LABELS_BYTES)
    outcome = Outcome(raw={name: [each.plain() for each in some] for name, some in found.items()})
    outcome.tables.append(_table("reads", found))
    outcome.charts += _charts("reads", found, bench)
    judge_spread(outcome, {k: v for k, v in found.items() if k != ALL}, bench)
    _judge_latency(outcome, found, bench)
    best, wanted = max(each.gb_per_s for each in found[ALL]), bench.criteria.g1.min_gb_per_s
    if wanted is None:
        outcome.note("best of all members together", f"{best:.2f} GB/s")
    else:
        outcome.judge(
            "best of all members together",
            f"{best:.2f} GB/s",
            f"at least {wanted:g} GB/s",
            best >= wanted,
        )
    return outcome


def judge_spread(outcome: Outcome, found: Mapping[str, Sequence[Measured]], bench: Bench) -> None:
    """Compare members: each one's bandwidth over the median of all, typical of its cells."""
    if len(found) < 2:
        outcome.note("members alike", "there is only one")
        return
    middle = [
        statistics.median(each.gb_per_s for each in cell)
        for cell in zip(*found.values(), strict=True)
    ]
    limit = bench.criteria.g1.member_spread
    for name, some in found.items():
        share = statistics.median(
            one.gb_per_s / typical for one, typical in zip(some, middle, strict=True)
        )
        outcome.judge(
            f"{name} against the median member",
            f"{share:.2f}",
            f"at least {1 - limit:.2f}",
            share >= 1 - limit,
        )


def _judge_latency(outcome: Outcome, found: Mapping[str, Sequence[Measured]], bench: Bench) -> None:
    limit = bench.criteria.g1.max_p99_ms
    for name, some in found.items():
        if name == ALL:
            continue
        small = min(some, key=lambda each: (each.cell.depth, each.cell.block_bytes))
        p99 = small.latency_ms.get("99")
        if p99 is not None:
            outcome.judge(
                f"{name}: p99 of {small.cell.name}",
                f"{p99:.2f} ms",
                f"at most {limit:g} ms",
                p99 <= limit,
            )


def _writes(bench: Bench) -> Outcome:
    if not bench.destroy:
        return not_run("--destroy names no scratch file or namespace, so nothing was written")
    cells, outcome = _cells(bench, ["write", "mixed"]), Outcome()
    found = {
        str(path): _measure(bench, f"g1-write-{at}", [path], cells, 0)
        for at, path in enumerate(bench.destroy)
    }
    outcome.raw = {name: [each.plain() for each in some] for name, some in found.items()}
    outcome.tables.append(_table("writes and 70/30", found))
    outcome.charts += _charts("writes", found, bench)
    judge_spread(outcome, found, bench)
    return outcome


def _table(title: str, found: Mapping[str, Sequence[Measured]]) -> Table:
    rows = []
    for name, some in found.items():
        for each in some:
            cell, late = each.cell, each.latency_ms
            ms = (round(late.get(key, 0.0), 3) for key in ("50", "95", "99", "99.9"))
            size = format_size(cell.block_bytes)
            load = f"{cell.pattern} {cell.direction}"
            rows.append((name, load, size, cell.depth, round(each.gb_per_s, 3), *ms))
    columns = ("member", "load", "block", "depth", "GB/s", "p50 ms", "p95 ms", "p99 ms", "p99.9 ms")
    return Table(title, columns, tuple(rows))


def _charts(what: str, found: Mapping[str, Sequence[Measured]], bench: Bench) -> list[Chart]:
    """Draw bandwidth over depth, at the block size nearest to 1 MiB."""
    sizes = {each.cell.block_bytes for some in found.values() for each in some}
    size = min(sizes, key=lambda each: abs(each - _MIB))
    pattern = bench.criteria.g1.fio.patterns[0]
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, some in found.items():
        for each in some:
            if each.cell.block_bytes == size and each.cell.pattern == pattern:
                many = name if what == "reads" else f"{name} {each.cell.direction}"
                lines[many].append((float(each.cell.depth), each.gb_per_s))
    title = f"{pattern} {what}, {format_size(size)}"
    return [Chart(title, "requests in flight", "GB/s", dict(lines), log_x=True)]
