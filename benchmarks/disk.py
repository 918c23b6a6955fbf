"""Measure how close cold reads from file members come to fio on the same files.

Both use direct I/O, so nothing comes from the page cache. fio reads with io_uring in 1 MiB
blocks at its best depth of 1 to 32; runs alternate.
"""

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from benchmarks import fio
from benchmarks.common import Sample, Series, report, scratch, timed
from benchmarks.subjects import Arena, OurStore

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option(help="A directory on the disk to be measured.")] = Path(
        ".cache"
    ),
    object_bytes: Annotated[int, typer.Option(help="Size of one object.")] = 8_126_464,
    objects: Annotated[int, typer.Option(help="Objects in one load.")] = 117,
    runs: Annotated[int, typer.Option(help="Alternating runs.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
) -> None:
    """Run the command."""
    if not fio.available():
        raise typer.BadParameter("fio is not installed (apt install fio)")
    with scratch(directory) as home:
        _run(home, object_bytes, objects, runs, json_path)


def _run(home: Path, object_bytes: int, objects: int, runs: int, json_path: Path | None) -> None:
    source, target = Arena(objects, object_bytes), Arena(objects, object_bytes)
    source.fill()
    ours = OurStore("ours", home / "members", source, target)
    if set(ours.io_modes) != {"direct"}:
        raise typer.BadParameter(f"no direct I/O in {home.parent}: {ours.io_modes}")
    ours.store_all()
    total = objects * object_bytes
    start = ours.store.volume.geometry.block_offset(0, 0)
    start = -(-start // (1 << 20)) * (1 << 20)
    depth = fio.best_depth(ours.member_paths, total, start)
    ceiling, mine = Series(f"fio, io_uring, 1 MiB, depth {depth}"), Series("ours")
    ours.load_all()  # the first load also faults the target's pages in
    ratios = []
    for _ in track(range(runs), description="alternating"):
        speed = fio.read_gb_per_s(ours.member_paths, total, depth, start)
        ceiling.samples.append(Sample(total / speed / 1e9, 0.0, total))
        with timed(total, mine):
            ours.load_all()
        ratios.append(mine.samples[-1].gb_per_s / speed)
    ratio = mine.median("gb_per_s") / ceiling.median("gb_per_s")
    extra = {"ratio_of_medians": ratio, "median_of_ratios": statistics.median(ratios)}
    report(f"cold reads of {total} bytes in {home.parent}", [ceiling, mine], extra, json_path)
    typer.echo(f"ours / fio: {ratio:.2f} (of medians), {statistics.median(ratios):.2f} (median)")
    assert target.view == source.view, "loaded bytes differ"
    ours.close()


if __name__ == "__main__":
    app()
