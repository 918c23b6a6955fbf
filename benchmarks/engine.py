"""Measure our engine against LMCache's C++ `fs_native`, with checksums, idle and busy.

Both load the same objects from memory-fast files, in alternation in one process: first idle,
then with a Python thread of the process spinning, as in a busy server.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from benchmarks.common import Series, busy_thread, report, scratch, timed
from benchmarks.subjects import Arena, FsNative, OurStore, Subject
from fx100_lmcache.engine.slot import EngineOptions

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    object_bytes: Annotated[int, typer.Option(help="Size of one object.")] = 8_126_464,
    objects: Annotated[int, typer.Option(help="Objects in one load.")] = 117,
    runs: Annotated[int, typer.Option(help="Runs of each contender.")] = 7,
    directory: Annotated[Path, typer.Option(help="Where the files go; memory-fast.")] = Path(
        "/dev/shm"
    ),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
) -> None:
    """Run the command."""
    with scratch(directory) as home:
        _run(home, object_bytes, objects, runs, json_path)


def _run(home: Path, object_bytes: int, objects: int, runs: int, json_path: Path | None) -> None:
    source, target = Arena(objects, object_bytes), Arena(objects, object_bytes)
    source.fill()
    ours = OurStore("ours, native", home / "native", source, target)
    python = EngineOptions(native=False, reader_threads=8)
    subjects: list[Subject] = [
        ours,
        OurStore("ours, Python threads", home / "python", source, target, engine=python),
        FsNative(home / "fs", source, target, 4),
        FsNative(home / "fs", source, target, 32),
    ]
    for subject in subjects:
        subject.store_all()
        subject.load_all()  # the first load also faults the target's pages in
    for busy in (False, True):
        series = {subject.name: Series(subject.name) for subject in subjects}
        with busy_thread(busy):
            for _ in track(range(runs), description="busy" if busy else "idle"):
                for subject in subjects:
                    with timed(objects * object_bytes, series[subject.name]):
                        subject.load_all()
        what = "one Python thread spinning" if busy else "idle"
        path = json_path and json_path.with_stem(f"{json_path.stem}-{'busy' if busy else 'idle'}")
        report(
            f"load of {objects} objects of {object_bytes} bytes, {what}",
            list(series.values()),
            {"io_modes": ours.io_modes, "directory": str(home.parent)},
            path,
        )
    assert target.view == source.view, "loaded bytes differ"
    for subject in subjects:
        subject.close()


if __name__ == "__main__":
    app()
