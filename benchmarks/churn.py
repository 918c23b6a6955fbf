"""Measure loads and disk use after ten times the capacity was stored, with LMCache's evictor on.

A contender that evicts keeps to its capacity, and still has the newest session. Stores are paced,
since LMCache's evictor looks once a second and drops a fifth of what is there.
"""

from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks import options
from benchmarks.backends import Sizing
from benchmarks.bounded import opened, shrunk, used_bytes
from benchmarks.child import Child
from benchmarks.common import drop_caches, publish
from benchmarks.replay import available

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    backend: options.Backends = None,
    model: options.Model = options.DEFAULT_MODEL,
    shrink: options.Shrink = 8,
    capacity_chunks: Annotated[int, typer.Option(help="Chunks that fit.")] = 240,
    session_chunks: Annotated[int, typer.Option(help="Chunks of a session.")] = 24,
    times: Annotated[int, typer.Option(help="Capacities stored.")] = 10,
    pace_s: Annotated[float, typer.Option(help="Least time for one capacity.")] = 8.0,
    runs: Annotated[int, typer.Option(help="Loads of the newest session.")] = 5,
    directory: options.Directory = options.DISK,
    memory: options.Memory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
) -> None:
    """Run the command."""
    sizing = shrunk(model, shrink, capacity_chunks)
    rows = []
    for name in track(available(backend), description="churn"):
        with opened(name, sizing, session_chunks, directory, memory) as (child, home):
            row = _churn(child, sizing, session_chunks, times, pace_s, runs)
            row["disk of capacity"] = used_bytes(home) / sizing.capacity_bytes
            rows.append({"backend": name, **row})
    method = {"model": model, "shrink": shrink, "capacity_bytes": sizing.capacity_bytes}
    method |= {"times": times, "pace_s": pace_s, "runs": runs, "caches_dropped": drop_caches()}
    publish(f"{times} capacities of {sizing.capacity_bytes} bytes stored", rows, method, json_path)


def _churn(
    child: Child, sizing: Sizing, session: int, times: int, pace_s: float, runs: int
) -> dict[str, Any]:
    size, capacity_chunks = sizing.chunk_bytes, sizing.capacity_bytes // sizing.chunk_bytes
    count = capacity_chunks * times
    child.call("store", range(session))
    fresh = [child.call("load", [range(session)], "idle") for _ in range(runs)]
    done = child.call("churn", session, count, pace_s / capacity_chunks)
    newest = range(count, session + count)
    child.call("store", newest)
    aged = [child.call("load", [newest], "idle", True) for _ in range(runs)]
    return {
        "taken": done["stored"] / count,
        "claimed of capacity": done["claimed_bytes"] / sizing.capacity_bytes,
        "newest found": aged[-1]["loaded"] / session,
        "wrong": sum(one["wrong"] for one in aged),
        "fresh GB/s": max(one["loaded"] * size / one["wall_s"] for one in fresh) / 1e9,
        "after GB/s": max(one["loaded"] * size / one["wall_s"] for one in aged) / 1e9,
    }


if __name__ == "__main__":
    app()
