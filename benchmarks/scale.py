"""Measure how the store scales: with entries, chunk size, members, and processes on one volume."""

import itertools
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, track

from benchmarks import options
from benchmarks.common import Series, publish, scratch, timed
from benchmarks.plots import lines
from benchmarks.subjects import Arena, FsNative, OurStore, StoreSubject, Subject
from benchmarks.volume_image import digest_of, write_image

KIB = 1024
LOOKUPS = 10_000

ChunkBytes = Annotated[int, typer.Option(help="Size of a chunk.")]
Count = Annotated[int, typer.Option(help="Chunks in one load, over all processes.")]

app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Load:
    """What is loaded at each point of a sweep, and how often."""

    chunk_bytes: int
    count: int
    runs: int


@app.command()
def entries(
    counts: Annotated[str, typer.Option(help="Entries.")] = "1000,10000,100000,1000000",
    directory: options.Directory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
    plot: options.Plot = None,
) -> None:
    """Recover volumes of so many entries of eight pieces each, and look 10,000 of them up."""
    rows = []
    for count in options.numbers(counts):
        with scratch(directory) as home:
            with Progress() as progress:
                task = progress.add_task(f"write {count} inodes", total=count)
                paths = write_image(home, count, partial(progress.advance, task))
            rows.append(_in_process(_recover, paths, count))
    for before, row in itertools.pairwise(rows):
        step = math.log(row["entries"] / before["entries"])
        row["slope"] = math.log(row["recovery CPU s"] / before["recovery CPU s"]) / step
    title = "recovery and lookup over entries of 8 pieces (slope 1: linear)"
    publish(title, rows, {"directory": str(directory), "lookups": LOOKUPS}, json_path)
    if plot is not None:
        for row in rows:
            row["_series"] = "recovery"
        lines(rows, "_series", "entries", "recovery CPU s", title, plot, log=True)


def _in_process(work: Any, *args: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(work, args)


def _recover(paths: list[Path], count: int) -> dict[str, Any]:
    from fx100_lmcache.engine.engine import LaneEngine
    from fx100_lmcache.engine.member_slot import EngineOptions
    from fx100_lmcache.members.device import open_member
    from fx100_lmcache.store import Store
    from fx100_lmcache.volume.volume import assemble

    volume = assemble([open_member(path) for path in paths])
    engine = LaneEngine(volume.members, EngineOptions())
    memory, started, cpu = _resident_bytes(), time.perf_counter(), time.process_time()
    store = Store(volume, engine)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    memory = _resident_bytes() - memory
    assert len(store) == count, f"{len(store)} of {count} entries recovered"
    wanted = [digest_of(number * 7919 % count) for number in range(LOOKUPS)]
    absent = [digest_of(count + number) for number in range(LOOKUPS)]
    hit_ms = min(_lookup_ms(store, wanted, True) for _ in range(5))
    miss_ms = min(_lookup_ms(store, absent, False) for _ in range(5))
    store.close()
    return {
        "entries": count,
        "recovery s": wall,
        "recovery CPU s": cpu,
        "bytes/entry": memory / count,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "10,000 hits ms": hit_ms,
        "10,000 misses ms": miss_ms,
    }


def _lookup_ms(store: Any, digests: list[bytes], expected: bool) -> float:
    started = time.perf_counter()
    found = store.lookup(digests)
    taken = time.perf_counter() - started
    assert bool(found.all() if expected else not found.any()), "a lookup was wrong"
    return taken * 1000


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@app.command()
def chunks(
    sizes: Annotated[str, typer.Option(help="Chunk sizes, KiB.")] = "32,128,512,1024,8192,65536",
    total_mib: Annotated[int, typer.Option(help="MiB in one load.")] = 512,
    runs: options.Runs = 5,
    directory: options.Directory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
    plot: options.Plot = None,
) -> None:
    """Load the same bytes in chunks of 32 KiB to 64 MiB: ours beside `fs_native`."""
    rows = []
    for size in track([part * KIB for part in options.numbers(sizes)], description="chunk sizes"):
        count = max(1, (total_mib << 20) // size)
        with scratch(directory) as home:
            source, target = Arena(count, size), Arena(count, size)
            source.fill()
            subjects: list[Subject] = [
                OurStore("ours", home / "ours", source, target),
                FsNative(home / "fs", source, target, 4),
                FsNative(home / "fs", source, target, 32),
            ]
            rows += [{"chunk KiB": size // KIB, **row} for row in _compare(subjects, source, runs)]
            assert target.view == source.view, "loaded bytes differ"
    title = f"load of {total_mib} MiB over chunk size, {directory}"
    publish(title, rows, {"directory": str(directory), "runs": runs}, json_path)
    if plot is not None:
        lines(rows, "contender", "chunk KiB", "GB/s", title, plot)


@app.command()
def members(
    counts: Annotated[str, typer.Option(help="Members.")] = "1,2,4,8,16",
    chunk_bytes: ChunkBytes = 8_126_464,
    count: Count = 64,
    runs: options.Runs = 5,
    directory: options.Directory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
) -> None:
    """Load the same chunks from 1 to 16 members."""
    _sweep("members", counts, Load(chunk_bytes, count, runs), directory, json_path, _from_members)


def _from_members(home: Path, number: int, load: Load) -> list[dict[str, Any]]:
    source, target = Arena(load.count, load.chunk_bytes), Arena(load.count, load.chunk_bytes)
    source.fill()
    ours = OurStore("ours", home / "ours", source, target, members=number)
    rows = _compare([ours], source, load.runs)
    assert target.view == source.view, "loaded bytes differ"
    return rows


def _sweep(
    what: str,
    counts: str,
    load: Load,
    directory: Path,
    json_path: Path | None,
    point: Callable[[Path, int, Load], list[dict[str, Any]]],
) -> None:
    """Measure the same load for each number of ``what``, each in a directory of its own."""
    rows = []
    for number in track(options.numbers(counts), description=what):
        with scratch(directory) as home:
            rows += [{what: number, **row} for row in point(home, number, load)]
    method = {"directory": str(directory), **asdict(load)}
    publish(f"load of {load.count} chunks over {what}, {directory}", rows, method, json_path)


def _compare(subjects: list[Subject], source: Arena, runs: int) -> list[dict[str, Any]]:
    """Store once, load in alternation; one row for each contender."""
    total = len(source.buffers) * source.object_bytes
    series = {subject.name: Series(subject.name) for subject in subjects}
    for subject in subjects:
        subject.store_all()
        subject.load_all()  # the first load also faults the target's pages in
    for _ in range(runs):
        for subject in subjects:
            with timed(total, series[subject.name]):
                subject.load_all()
    for subject in subjects:
        subject.close()
    return [
        {
            "contender": one.name,
            "GB/s": one.median("gb_per_s"),
            "min..max": "{:.2f}..{:.2f}".format(*one.spread("gb_per_s")),
            "CPU s/GB": one.median("cpu_s_per_gb"),
            "us/chunk": one.median("wall_s") / len(source.buffers) * 1e6,
        }
        for one in series.values()
    ]


@app.command()
def processes(
    counts: Annotated[str, typer.Option(help="Processes.")] = "1,2,4,8",
    chunk_bytes: ChunkBytes = 8_126_464,
    count: Count = 64,
    runs: options.Runs = 5,
    directory: options.Directory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
) -> None:
    """Load from 1 to 8 processes at once, each owning one shard of the same volume."""
    load = Load(chunk_bytes, count, runs)
    _sweep("processes", counts, load, directory, json_path, _from_processes)


def _from_processes(home: Path, number: int, load: Load) -> list[dict[str, Any]]:
    share = load.count // number
    config = _sharded_volume(home, number, load.chunk_bytes, load.count)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(number) as pool:
        barrier = manager.Barrier(number)
        jobs = [(config, n, load.chunk_bytes, share, load.runs, barrier) for n in range(number)]
        spans = pool.starmap(_own_shard, jobs, chunksize=1)
    wall = [
        max(end for _, end in at) - min(start for start, _ in at) for at in zip(*spans, strict=True)
    ]
    speeds = [share * number * load.chunk_bytes / one / 1e9 for one in wall]
    return [
        {
            "GB/s": statistics.median(speeds),
            "min..max": f"{min(speeds):.2f}..{max(speeds):.2f}",
        }
    ]


def _sharded_volume(home: Path, shards: int, chunk_bytes: int, count: int) -> Path:
    from fx100_lmcache.testing.volumes import file_volume

    size_kib = (count * chunk_bytes * 5 // 4 // 4 + (64 << 20)) // KIB
    told = {"object": chunk_bytes, "shards": shards}
    return file_volume(home, members=4, size=f"{size_kib}KiB", volume=told)


def _own_shard(
    config: Path, shard: int, chunk_bytes: int, count: int, runs: int, barrier: Any
) -> list[tuple[float, float]]:
    """Store to one shard, then load when all are ready; return begin and end of each run."""
    from fx100_lmcache import config as settings
    from fx100_lmcache.mount import mount

    source, target = Arena(count, chunk_bytes), Arena(count, chunk_bytes)
    source.fill()
    mounted = mount(settings.load(config), shards=[shard])
    ours = StoreSubject(f"shard {shard}", mounted.store, source, target)
    ours.store_all()
    ours.load_all()
    spans = []
    for _ in range(runs):
        barrier.wait()
        started = time.monotonic()
        ours.load_all()
        spans.append((started, time.monotonic()))
    assert target.view == source.view, "loaded bytes differ"
    mounted.close()
    return spans


if __name__ == "__main__":
    app()
