"""Measure loads and disk use after ten times the capacity was stored, with LMCache's evictor on.

A contender that evicts keeps to its capacity, and still has the newest session. Stores are paced,
since LMCache's evictor looks once a second and drops a fifth of what is there.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.backends import BACKENDS, Sizing
from benchmarks.child import Child, Setup
from benchmarks.common import drop_caches, publish, scratch
from benchmarks.mooncake import used_bytes
from benchmarks.replay import available
from fx100_lmcache.planning import MODELS

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    backend: Annotated[list[str] | None, typer.Option(help="Contender; all if left out.")] = None,
    model: Annotated[str, typer.Option(help="KV shape, of one rank.")] = "qwen3-coder-480b-tp8",
    shrink: Annotated[int, typer.Option(help="Chunks are smaller by this factor.")] = 8,
    capacity_chunks: Annotated[int, typer.Option(help="Chunks that fit.")] = 240,
    session_chunks: Annotated[int, typer.Option(help="Chunks of a session.")] = 24,
    times: Annotated[int, typer.Option(help="Capacities stored.")] = 10,
    pace_s: Annotated[float, typer.Option(help="Least time for one capacity.")] = 8.0,
    runs: Annotated[int, typer.Option(help="Loads of the newest session.")] = 5,
    directory: Annotated[Path, typer.Option(help="On the disk to be measured.")] = Path(".cache"),
    memory: Annotated[Path, typer.Option(help="A tmpfs for the memory loaded into.")] = Path(
        "/dev/shm"
    ),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
) -> None:
    """Run the command."""
    chunk_bytes = -(-MODELS[model].chunk_bytes() // shrink // 4096) * 4096
    sizing = Sizing(chunk_bytes, capacity_chunks * chunk_bytes)
    rows = []
    for name in track(available(backend), description="churn"):
        with scratch(directory) as home, scratch(memory) as shared:
            setup = Setup(name, home, sizing, shared / "l1", session_chunks, evict=True)
            rows.append(_churn(setup, capacity_chunks, times, pace_s, runs))
    method = {"model": model, "shrink": shrink, "capacity_bytes": sizing.capacity_bytes}
    method |= {"times": times, "pace_s": pace_s, "runs": runs, "caches_dropped": drop_caches()}
    publish(f"{times} capacities of {sizing.capacity_bytes} bytes stored", rows, method, json_path)


def _churn(
    setup: Setup, capacity_chunks: int, times: int, pace_s: float, runs: int
) -> dict[str, Any]:
    count = capacity_chunks * times
    BACKENDS[setup.backend].prepare(setup.home, setup.sizing)
    child = Child(setup)
    session, size = setup.slots, setup.sizing.chunk_bytes
    try:
        child.call("store", range(session))
        fresh = [child.call("load", [range(session)], "idle") for _ in range(runs)]
        done = child.call("churn", session, count, pace_s / capacity_chunks)
        newest = range(session + count - session, session + count)
        child.call("store", newest)
        aged = [child.call("load", [newest], "idle", True) for _ in range(runs)]
    finally:
        child.close()
    return {
        "backend": setup.backend,
        "taken": done["stored"] / count,
        "disk of capacity": used_bytes(setup.home) / setup.sizing.capacity_bytes,
        "claimed of capacity": done["claimed_bytes"] / setup.sizing.capacity_bytes,
        "newest found": aged[-1]["loaded"] / session,
        "wrong": sum(one["wrong"] for one in aged),
        "fresh GB/s": max(one["loaded"] * size / one["wall_s"] for one in fresh) / 1e9,
        "after GB/s": max(one["loaded"] * size / one["wall_s"] for one in aged) / 1e9,
    }


if __name__ == "__main__":
    app()
