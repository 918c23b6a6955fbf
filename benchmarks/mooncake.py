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

from benchmarks import options
from benchmarks.backends import Sizing
from benchmarks.bounded import opened, shrunk, used_bytes
from benchmarks.child import Child
from benchmarks.common import drop_caches, publish
from benchmarks.replay import available
from benchmarks.sessions import Request, parse_trace, percentile

CHUNK_TOKENS = 256

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    trace: Annotated[Path, typer.Argument(help="JSONL file.", exists=True)],
    backend: options.Backends = None,
    model: options.Model = options.DEFAULT_MODEL,
    shrink: options.Shrink = 31,
    requests: Annotated[int, typer.Option(help="Requests replayed, from the start.")] = 1000,
    capacity: Annotated[float, typer.Option(help="Capacity as a share of all its chunks.")] = 0.5,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    directory: options.Directory = options.DISK,
    memory: options.Memory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
) -> None:
    """Run the command."""
    with trace.open() as lines:
        asked = [one for one in parse_trace(lines, CHUNK_TOKENS, requests) if one.chunks]
    distinct = len({chunk for one in asked for chunk in one.chunks})
    sizing = shrunk(model, shrink, max(64, int(distinct * capacity)))
    slots = concurrency * max(len(one.chunks) for one in asked)
    rows = []
    for name in available(backend):
        with opened(name, sizing, slots, directory, memory) as (child, home):
            row = _replay(child, name, asked, concurrency, sizing)
            row["disk of capacity"] = used_bytes(home) / sizing.capacity_bytes
            rows.append(row)
    method = {"trace": trace.name, "requests": len(asked), "distinct_chunks": distinct}
    method |= {"model": model, "shrink": shrink, "best_hit_rate": best_hit_rate(asked)}
    method |= {"capacity_bytes": sizing.capacity_bytes, "caches_dropped": drop_caches()}
    title = (
        f"{trace.name}, {len(asked)} requests, {distinct} chunks of {sizing.chunk_bytes} bytes, "
        f"capacity {capacity:g} of them; hit rate without limit {best_hit_rate(asked):.3f}"
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
    child: Child, name: str, requests: list[Request], concurrency: int, sizing: Sizing
) -> dict[str, Any]:
    served: list[tuple[float, int, int]] = []
    started = time.perf_counter()
    for at in track(range(0, len(requests), concurrency), description=name):
        served += child.call("replay", [one.chunks for one in requests[at : at + concurrency]])
    wall = time.perf_counter() - started
    times = [second for second, _, loaded in served if loaded] or [0.0]
    speeds = [loaded * sizing.chunk_bytes / s / 1e9 for s, _, loaded in served if loaded] or [0.0]
    return {
        "backend": name,
        "hit rate": sum(hit for _, _, hit in served) / sum(asked for _, asked, _ in served),
        "p50 s": percentile(times, 50),
        "p95 s": percentile(times, 95),
        "p99 s": percentile(times, 99),
        "GB/s of a request": statistics.median(speeds),
        "requests/s": len(served) / wall,
    }


if __name__ == "__main__":
    app()
