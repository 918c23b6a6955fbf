"""Replay a trace in Mooncake's JSONL form: hit rate and load time under a bounded capacity.

Requests come in groups of the given concurrency; each loads the prefix that is found and stores
the rest. LMCache's own evictor runs beside. Timestamps are ignored: this is a closed loop. Chunks
are as many as in the trace, and smaller than a real model's by the factor stated.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.backends import BACKENDS, Sizing
from benchmarks.child import Child, Setup
from benchmarks.common import drop_caches, publish, scratch
from benchmarks.replay import available
from benchmarks.sessions import Request, parse_trace, percentile
from fx100_lmcache.planning import MODELS

CHUNK_TOKENS = 256

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    trace: Annotated[Path, typer.Argument(help="JSONL file.", exists=True)],
    backend: Annotated[list[str] | None, typer.Option(help="Contender; all if left out.")] = None,
    model: Annotated[str, typer.Option(help="KV shape, of one rank.")] = "qwen3-coder-480b-tp8",
    shrink: Annotated[int, typer.Option(help="Chunks are smaller by this factor.")] = 31,
    requests: Annotated[int, typer.Option(help="Requests replayed, from the start.")] = 1000,
    capacity: Annotated[float, typer.Option(help="Capacity as a share of all its chunks.")] = 0.5,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    directory: Annotated[Path, typer.Option(help="On the disk to be measured.")] = Path(".cache"),
    memory: Annotated[Path, typer.Option(help="A tmpfs for the memory loaded into.")] = Path(
        "/dev/shm"
    ),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
) -> None:
    """Run the command."""
    with trace.open() as lines:
        asked = [one for one in parse_trace(lines, CHUNK_TOKENS, requests) if one.chunks]
    chunk_bytes = -(-MODELS[model].chunk_bytes() // shrink // 4096) * 4096
    distinct = len({chunk for one in asked for chunk in one.chunks})
    sizing = Sizing(chunk_bytes, max(64, int(distinct * capacity)) * chunk_bytes)
    rows = []
    for name in available(backend):
        with scratch(directory) as home, scratch(memory) as shared:
            rows.append(_replay(name, asked, concurrency, sizing, home, shared))
    method = {"trace": trace.name, "requests": len(asked), "distinct_chunks": distinct}
    method |= {"model": model, "shrink": shrink, "best_hit_rate": best_hit_rate(asked)}
    method |= {"capacity_bytes": sizing.capacity_bytes, "caches_dropped": drop_caches()}
    title = (
        f"{trace.name}, {len(asked)} requests, {distinct} chunks of {chunk_bytes} bytes, capacity "
        f"{capacity:g} of them; hit rate without limit {best_hit_rate(asked):.3f}"
    )
    publish(title, rows, method, json_path)


def best_hit_rate(requests: list[Request]) -> float:
    """Share of the chunks that an endless cache would serve, one request after the other."""
    seen: set[int] = set()
    hits = asked = 0
    for one in requests:
        fresh = [chunk not in seen for chunk in one.chunks]
        hits += fresh.index(True) if True in fresh else len(fresh)
        asked += len(fresh)
        seen.update(one.chunks)
    return hits / asked if asked else 0.0


def _replay(
    name: str,
    requests: list[Request],
    concurrency: int,
    sizing: Sizing,
    home: Path,
    shared: Path,
) -> dict[str, Any]:
    BACKENDS[name].prepare(home, sizing)
    slots = concurrency * max(len(one.chunks) for one in requests)
    child = Child(Setup(name, home, sizing, shared / "l1", slots, evict=True))
    served: list[tuple[float, int, int]] = []
    started = time.perf_counter()
    try:
        for at in track(range(0, len(requests), concurrency), description=name):
            group = [one.chunks for one in requests[at : at + concurrency]]
            served += child.call("replay", group)
        wall = time.perf_counter() - started
        return _row(name, served, sizing, wall, used_bytes(home))
    finally:
        child.close()


def _row(
    name: str, served: list[tuple[float, int, int]], sizing: Sizing, wall_s: float, used: int
) -> dict[str, Any]:
    times = [second for second, _, loaded in served if loaded] or [0.0]
    speeds = [loaded * sizing.chunk_bytes / s / 1e9 for s, _, loaded in served if loaded] or [0.0]
    return {
        "backend": name,
        "hit rate": sum(hit for _, _, hit in served) / sum(asked for _, asked, _ in served),
        "p50 s": percentile(times, 50),
        "p95 s": percentile(times, 95),
        "p99 s": percentile(times, 99),
        "GB/s of a request": statistics.median(speeds),
        "requests/s": len(served) / wall_s,
        "disk of capacity": used / sizing.capacity_bytes,
    }


def used_bytes(home: Path) -> int:
    """Bytes of the disk under a directory."""
    return sum(path.stat().st_blocks * 512 for path in home.rglob("*") if path.is_file())


if __name__ == "__main__":
    app()
