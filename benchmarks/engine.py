"""Measure our engine against LMCache's C++ `fs_native`, with checksums, idle and busy.

All contenders load the same objects from memory-fast files, in alternation in one process: first
idle, then with a Python thread of the process spinning, as in a busy server. Where the kernel
puts a file in memory alone makes it up to a fifth faster or slower, so this is done in several
rounds, each on new files, made in another order. In the busy case the table says what
share of one CPU the spinning thread got: threads without Python take it from that thread, so a
contender with many of them loads faster and lets the server do less.
"""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.common import Series, busy_thread, report, scratch, timed
from benchmarks.subjects import Arena, FsNative, OurStore, Subject
from fx100_lmcache.engine.member_slot import EngineOptions

app = typer.Typer(add_completion=False)

CONTENDERS = (
    "ours, native",
    "ours, Python threads",
    "fs_native, 4 workers",
    "fs_native, 32 workers",
)
IDLE, BUSY = "idle", "one Python thread spinning"
ORDERS = tuple(itertools.permutations(CONTENDERS))
_STEP = 7  # through the 24 orders: another contender first nearly every time


@app.command(help=__doc__)
def main(
    object_bytes: Annotated[int, typer.Option(help="Size of one object.")] = 8_126_464,
    objects: Annotated[int, typer.Option(help="Objects in one load.")] = 117,
    rounds: Annotated[int, typer.Option(help="Rounds on new files, in another order each.")] = 12,
    runs: Annotated[int, typer.Option(help="Runs of each contender in a round.")] = 5,
    directory: Annotated[Path, typer.Option(help="Where the files go; memory-fast.")] = Path(
        "/dev/shm"
    ),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
) -> None:
    """Run the command."""
    series = {(what, name): Series(name) for what in (IDLE, BUSY) for name in CONTENDERS}
    method: dict[str, Any] = {"directory": str(directory), "rounds": rounds, "runs": runs}
    with Progress() as progress:
        task = progress.add_task("rounds", total=rounds)
        for number in range(rounds):
            with scratch(directory) as home:
                # every neighbour and every place, since both matter to where files lie
                names = ORDERS[number * _STEP % len(ORDERS)]
                method["io_modes"] = _round(home, names, object_bytes, objects, runs, series)
            progress.advance(task)
    for what in (IDLE, BUSY):
        suffix = "idle" if what == IDLE else "busy"
        report(
            f"load of {objects} objects of {object_bytes} bytes, {what}",
            [one for (when, _), one in series.items() if when == what],
            method,
            json_path and json_path.with_stem(f"{json_path.stem}-{suffix}"),
        )


def _round(
    home: Path,
    names: tuple[str, ...],
    object_bytes: int,
    objects: int,
    runs: int,
    series: dict[tuple[str, str], Series],
) -> list[str]:
    """Measure all contenders on new files; return the I/O modes of our members."""
    source, target = Arena(objects, object_bytes), Arena(objects, object_bytes)
    source.fill()
    subjects = [_make(name, home, source, target) for name in names]
    for subject in subjects:
        subject.store_all()
        subject.load_all()  # the first load also faults the target's pages in
        assert target.view == source.view, "loaded bytes differ"
    for what in (IDLE, BUSY):
        with busy_thread(what == BUSY) as spinner:
            for _ in range(runs):
                for subject in subjects:
                    with timed(objects * object_bytes, series[what, subject.name], spinner):
                        subject.load_all()
    for subject in subjects:
        subject.close()
    return next(s.io_modes for s in subjects if isinstance(s, OurStore))


def _make(name: str, home: Path, source: Arena, target: Arena) -> Subject:
    if name == "ours, native":
        return OurStore(name, home / "native", source, target)
    if name == "ours, Python threads":
        python = EngineOptions(native=False, reader_threads=8)
        return OurStore(name, home / "python", source, target, engine=python)
    workers = int(name.split()[1])
    return FsNative(home / f"fs{workers}", source, target, workers)


if __name__ == "__main__":
    app()
