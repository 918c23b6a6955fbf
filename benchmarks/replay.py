"""Measure how long returning sessions take to load after a restart: ours beside LMCache's own.

Each contender stores the sessions in a process of its own, is killed with SIGKILL, and loads
them in a new process, through LMCache's L2 adapter interface and into the same memory. Runs of
the contenders alternate. Loads are verified page by page once, outside the measured time.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks import fio, options
from benchmarks.backends import BACKENDS, Sizing
from benchmarks.child import Child, Setup
from benchmarks.common import drop_caches, publish, scratch
from benchmarks.plots import bars
from benchmarks.sessions import full_load_s, percentile, returning_sessions
from fx100_lmcache.sizing import MODELS

MODES = ("idle", "busy", "stores")

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Matrix:
    """What is measured."""

    backends: tuple[str, ...]
    modes: tuple[str, ...]
    concurrency: tuple[int, ...]
    runs: int


@app.command(help=__doc__)
def main(
    backend: options.Backends = None,
    model: options.Model = options.DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Context of a session.")] = 29_800,
    scale: Annotated[float, typer.Option(help="Share of a session's chunks really used.")] = 0.125,
    concurrency: Annotated[str, typer.Option(help="Sessions at once.")] = "1,4,8,16",
    mode: Annotated[str, typer.Option(help="Of idle, busy, stores.")] = ",".join(MODES),
    runs: Annotated[int, typer.Option(help="Alternating runs of each cell.")] = 5,
    directory: options.Directory = options.DISK,
    memory: options.Memory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
    plot: options.Plot = None,
) -> None:
    """Run the command."""
    counts = tuple(options.numbers(concurrency))
    matrix = Matrix(available(backend), tuple(mode.split(",")), counts, runs)
    sessions = returning_sessions(max(counts), tokens, 256, scale)
    chunk_bytes = MODELS[model].chunk_bytes()
    with scratch(directory) as home, scratch(memory) as shared:
        rows, method = measure(matrix, sessions, chunk_bytes, home, shared)
    for row in rows:
        row["whole session s"] = full_load_s(row["p50 s"], scale, MODELS[model])
    method |= {"model": model, "tokens": tokens, "scale": scale, "directory": str(directory)}
    title = f"{model}, {len(sessions[0])} chunks of {chunk_bytes} bytes a session (x{scale:g})"
    publish(title, rows, method, json_path)
    if plot is not None:
        shown = [row for row in rows if row["mode"] == "idle"]
        bars(shown, "backend", "concurrency", "p50 s", title, plot)


def available(wanted: list[str] | None) -> tuple[str, ...]:
    """Check names of contenders, and leave out what is not installed here."""
    names = wanted or list(BACKENDS)
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(BACKENDS)}")
    for name in names:
        if gone := BACKENDS[name].missing():
            typer.echo(f"left out: {gone}", err=True)
    return tuple(name for name in names if not BACKENDS[name].missing())


def measure(
    matrix: Matrix, sessions: list[range], chunk_bytes: int, home: Path, shared: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Store, kill, reopen and load; return a row for each cell, and the method."""
    total = sum(map(len, sessions)) * chunk_bytes
    sizing = Sizing(chunk_bytes, total * 5 // 4 + 64 * chunk_bytes)
    slots = sum(map(len, sessions)) + 8
    cells: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    ceiling: list[float] = []
    facts: dict[str, Any] = {}
    children: dict[str, Child] = {}
    work = len(matrix.modes) * len(matrix.concurrency) * matrix.runs * len(matrix.backends)
    try:
        with Progress() as progress:
            filling = progress.add_task("store, kill, reopen", total=len(matrix.backends))
            for name in matrix.backends:
                setup = Setup(name, home / name, sizing, shared / "l1", slots)
                children[name], facts[name] = restart(setup, sessions)
                progress.advance(filling)
            reader = _Ceiling(home, total)
            loading = progress.add_task("load", total=work)
            for mode, count in [(m, c) for m in matrix.modes for c in matrix.concurrency]:
                for _ in range(matrix.runs):
                    drop_caches()
                    ceiling.append(reader.read())
                    for name in matrix.backends:
                        result = children[name].call("load", sessions[:count], mode)
                        cells.setdefault((name, mode, count), []).append(result)
                        progress.advance(loading)
    finally:
        for child in children.values():
            child.close()
    method = {"backends": facts, "fio_gb_per_s": ceiling, "fio_depth": reader.depth}
    method |= {"caches_dropped": drop_caches(), "runs": matrix.runs}
    best = statistics.median(ceiling)
    rows = [summary(key, cell, chunk_bytes, best, facts[key[0]]) for key, cell in cells.items()]
    compare_with_idle(rows)
    return rows, method


def compare_with_idle(rows: list[dict[str, Any]]) -> None:
    """Add each cell's p95 as a multiple of the same contender's idle one, where that was run."""
    idle = {(r["backend"], r["concurrency"]): r["p95 s"] for r in rows if r["mode"] == "idle"}
    for row in rows:
        base = idle.get((row["backend"], row["concurrency"]))
        row["p95 to idle"] = row["p95 s"] / base if base else "-"


def restart(setup: Setup, sessions: list[range]) -> tuple[Child, dict[str, Any]]:
    """Store sessions, SIGKILL the process, open again, and check every byte."""
    setup.home.mkdir(parents=True)
    BACKENDS[setup.backend].prepare(setup.home, setup.sizing)
    child = Child(setup)
    chunks = [chunk for session in sessions for chunk in session]
    acknowledged = child.call("store", chunks)
    time.sleep(BACKENDS[setup.backend].settle_s)
    killed = child.kill()
    drop_caches()
    child = Child(setup)
    facts = child.call("facts")
    facts["kill_to_first_hit_s"] = child.call("first_hit", chunks[0]) - killed
    facts |= {"acknowledged": acknowledged, "settle_s": BACKENDS[setup.backend].settle_s}
    checked = child.call("load", sessions, "idle", True)
    facts |= {"found": checked["loaded"], "wrong": checked["wrong"], "stored": len(chunks)}
    flags = child.call("io_flags", sessions[0])
    facts["direct_io"] = bool(flags) and all(flags.values())
    return child, facts


class _Ceiling:
    """What fio reads from files of the same size beside the contenders'."""

    def __init__(self, home: Path, total_bytes: int) -> None:
        self._paths = [home / f"fio-{number}" for number in range(4)]
        self._total = max(total_bytes, 64 << 20)
        self.depth = 0
        if fio.available():
            fio.lay_out(self._paths, self._total)
            self.depth = fio.best_depth(self._paths, self._total, 0)

    def read(self) -> float:
        """GB/s of one reading of all files; 0 without fio."""
        if not self.depth:
            return 0.0
        return fio.read_gb_per_s(self._paths, self._total, self.depth, 0)


def summary(
    key: tuple[str, str, int],
    results: list[dict[str, Any]],
    chunk_bytes: int,
    ceiling_gb_per_s: float,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Make the row of one cell of all its runs; times are those of single sessions."""
    name, mode, count = key
    times = [second for result in results for second in result["session_s"]]
    speeds = [one["loaded"] * chunk_bytes / one["wall_s"] / 1e9 for one in results]
    moved = sum(one["loaded"] for one in results) * chunk_bytes
    return {
        "backend": name,
        "mode": mode,
        "concurrency": count,
        "p50 s": percentile(times, 50),
        "p95 s": percentile(times, 95),
        "p99 s": percentile(times, 99),
        "GB/s": statistics.median(speeds),
        "min..max": f"{min(speeds):.2f}..{max(speeds):.2f}",
        "of fio": statistics.median(speeds) / ceiling_gb_per_s if ceiling_gb_per_s else "no fio",
        "CPU s/GB": _cpu_s_per_gb(results, moved) if mode == "idle" else "-",
        "hit rate": sum(one["loaded"] for one in results) / sum(one["asked"] for one in results),
        "from device": sum(one["device_read_bytes"] for one in results) / moved if moved else 0.0,
        "stored beside GB/s": statistics.median(one["stored_beside_per_s"] for one in results)
        * chunk_bytes
        / 1e9,
        "direct": facts["direct_io"],
        "kill to hit s": facts["kill_to_first_hit_s"],
        "of it open s": facts["open_s"],
    }


def _cpu_s_per_gb(results: list[dict[str, Any]], moved_bytes: int) -> float:
    return sum(one["cpu_s"] for one in results) / (moved_bytes / 1e9) if moved_bytes else 0.0


if __name__ == "__main__":
    app()
