"""Measure bandwidth over concurrency on an emulated array, one by one and in parallel.

Each member has the latency and bandwidth stated, made by nbdkit; fio on the same devices is the
ceiling. The published baseline is one member, one chunk at a time.
"""

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks import fio, options
from benchmarks.backends import BACKENDS, Sizing
from benchmarks.child import Child, Setup
from benchmarks.common import publish, scratch
from benchmarks.emulated import Emulation, emulated_array, missing
from benchmarks.plots import lines
from benchmarks.sessions import returning_sessions
from fx100_lmcache.sizing import MODELS

CONTENDERS = {
    "ours-one-by-one": "one member, one chunk at a time",
    "ours-4-members-one-by-one": "four members, one chunk at a time",
    "ours": "four members, parallel",
    "ours-width1": "four members, parallel, width 1",
    "raw_block-io_uring": "raw_block io_uring, one member",
}
FIRST_DATA_BYTES = 16 << 20
"""fio reads from here on: past labels and tables."""

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    delay_ms: Annotated[int, typer.Option(help="Latency of a read.")] = 3,
    mbit_per_s: Annotated[int, typer.Option(help="Bandwidth of a member, Mbit/s.")] = 800,
    model: options.Model = options.DEFAULT_MODEL,
    session_chunks: Annotated[int, typer.Option(help="Chunks of a session.")] = 3,
    concurrency: Annotated[str, typer.Option(help="Sessions at once.")] = "1,2,4,8,16",
    runs: options.Runs = 5,
    directory: Annotated[Path, typer.Option(help="For mount points.")] = Path(".cache"),
    memory: options.Memory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
    plot: options.Plot = None,
) -> None:
    """Run the command."""
    if gap := missing():
        raise typer.BadParameter(gap)
    counts = options.numbers(concurrency)
    chunk_bytes = MODELS[model].chunk_bytes()
    sessions = returning_sessions(max(counts), session_chunks, 1, 1.0)
    total = sum(map(len, sessions)) * chunk_bytes
    like = Emulation((total * 5 // 4 + (64 << 20)) // 4096 * 4096, delay_ms, mbit_per_s)
    rows: list[dict[str, Any]] = []
    with (
        scratch(directory) as home,
        scratch(memory) as shared,
        emulated_array(home, 4, like) as devices,
    ):
        sizing = Sizing(chunk_bytes, total * 5 // 4, tuple(devices))
        for name in track(CONTENDERS, description="contenders"):
            if BACKENDS[name].missing():
                continue
            setup = Setup(name, home / name, sizing, shared / "l1", sum(map(len, sessions)))
            rows += _curve(setup, sessions, counts, runs)
    baseline = next(row["GB/s"] for row in rows if row["concurrency"] == counts[0])
    for row in rows:
        row["of baseline"] = row["GB/s"] / baseline
    title = f"4 members of {mbit_per_s} Mbit/s, {delay_ms} ms; chunks of {chunk_bytes} bytes"
    method = {"emulation": like, "model": model, "session_chunks": session_chunks, "runs": runs}
    publish(title, rows, method, json_path)
    if plot is not None:
        lines(rows, "contender", "concurrency", "GB/s", title, plot)


def _curve(
    setup: Setup, sessions: list[range], counts: list[int], runs: int
) -> list[dict[str, Any]]:
    """Measure one contender at each concurrency, and fio on its devices in between."""
    setup.home.mkdir()
    BACKENDS[setup.backend].prepare(setup.home, setup.sizing)
    child = Child(setup)
    size = setup.sizing.chunk_bytes
    members = 1 if setup.backend in ("ours-one-by-one", "raw_block-io_uring") else 4
    try:
        child.call("store", [chunk for session in sessions for chunk in session])
        child.call("load", sessions, "idle", True)
        rows = []
        for count in counts:
            results = [child.call("load", sessions[:count], "idle") for _ in range(runs)]
            speeds = [one["loaded"] * size / one["wall_s"] / 1e9 for one in results]
            rows.append(_row(setup.backend, count, speeds))
    finally:
        child.close()
    ceiling = _fio(setup.sizing.devices[:members], sum(map(len, sessions)) * size)
    for row in rows:
        row |= {"fio GB/s": ceiling, "of fio": row["GB/s"] / ceiling if ceiling else "no fio"}
    return rows


def _row(name: str, count: int, speeds: list[float]) -> dict[str, Any]:
    return {
        "contender": CONTENDERS[name],
        "concurrency": count,
        "GB/s": statistics.median(speeds),
        "min..max": f"{min(speeds):.3f}..{max(speeds):.3f}",
    }


def _fio(devices: tuple[str, ...], total_bytes: int) -> float:
    """Read as many bytes with fio at its best depth; 0 without fio."""
    if not fio.available():
        return 0.0
    paths = [Path(device) for device in devices]
    speeds = [
        fio.read_gb_per_s(paths, total_bytes * len(paths) // 4, depth, FIRST_DATA_BYTES)
        for depth in (4, 16, 32)
    ]
    return max(speeds)


if __name__ == "__main__":
    app()
