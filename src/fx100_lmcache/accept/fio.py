"""fio: job files that anybody can run again, and what its JSON says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fx100_lmcache.accept.bench import Bench
from fx100_lmcache.accept.steps import CannotRunError
from fx100_lmcache.config.values import format_size
from fx100_lmcache.errors import FX100Error

_MODES = {
    ("sequential", "read"): "read",
    ("random", "read"): "randread",
    ("sequential", "write"): "write",
    ("random", "write"): "randwrite",
    ("sequential", "mixed"): "rw",
    ("random", "mixed"): "randrw",
}
PERCENTILES = ("50.000000", "95.000000", "99.000000", "99.900000")
READ_SHARE = 70
"""Of the mixed load: 70 % reads, 30 % writes."""
_START_S = 3.0
"""fio needs about this long around each job."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    pattern: str
    direction: str
    block_bytes: int
    depth: int

    @property
    def name(self) -> str:
        """Name of the job."""
        size = format_size(self.block_bytes)
        return f"{self.pattern}-{self.direction}-{size}-depth{self.depth}"


@dataclass(frozen=True)
class Measured:
    """What fio said of one cell.

    Attributes
    ----------
    gb_per_s : float
        Reads and writes together, 10^9 bytes.
    latency_ms : dict
        Completion latency by percentile, of reads where there are some.
    """

    cell: Cell
    gb_per_s: float
    iops: float
    latency_ms: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        cell = self.cell
        return {
            "pattern": cell.pattern,
            "direction": cell.direction,
            "block_bytes": cell.block_bytes,
            "depth": cell.depth,
            "gb_per_s": self.gb_per_s,
            "iops": self.iops,
            "latency_ms": self.latency_ms,
        }


def cells(
    patterns: Iterable[str], directions: Iterable[str], sizes: Iterable[int], depths: Iterable[int]
) -> list[Cell]:
    """Return every combination."""
    return [Cell(*each) for each in itertools.product(patterns, directions, sizes, depths)]


def job_file(
    paths: Sequence[Path],
    wanted: Sequence[Cell],
    *,
    engine: str,
    cell_s: float,
    offset_bytes: int,
    region_bytes: int,
) -> str:
    """Write the job file of some cells on one member, or on several together.

    Parameters
    ----------
    offset_bytes, region_bytes : int
        Which bytes of each member.
    """
    names = ":".join(str(path).replace(":", "\\:") for path in paths)
    lines = [
        *("[global]", f"ioengine={engine}", "direct=1", "time_based=1", f"runtime={cell_s:g}"),
        *("allow_file_create=0", "invalidate=1", "randrepeat=1", "group_reporting=1"),
        *(f"filename={names}", "file_service_type=roundrobin"),
        *(f"offset={offset_bytes}", f"size={region_bytes}", "percentile_list=50:95:99:99.9"),
    ]
    for cell in wanted:
        lines += ["", f"[{cell.name}]", "stonewall", f"rw={_MODES[cell.pattern, cell.direction]}"]
        lines += [f"bs={cell.block_bytes}", f"iodepth={cell.depth}"]
        lines += [f"rwmixread={READ_SHARE}"] if cell.direction == "mixed" else []
    return "\n".join(lines) + "\n"


def measure(
    bench: Bench, name: str, text: str, wanted: Sequence[Cell], cell_s: float
) -> list[Measured]:
    """Run a job file; it only reads unless a cell writes.

    Raises
    ------
    CannotRunError
        If fio is not there, or its I/O engine is not allowed here.
    FX100Error
        If fio failed, with what it said.
    """
    job = bench.raw / f"{name}.fio"
    job.write_text(text)
    reads_only = all(cell.direction == "read" for cell in wanted)
    argv = ["fio", *(["--readonly"] if reads_only else []), "--output-format=json", str(job)]
    ended = bench.run(argv, name, 60 + len(wanted) * (cell_s + _START_S) * 2)
    said = ended.stderr.decode(errors="replace").strip()
    if ended.code:
        if "io_uring" in said or "Operation not permitted" in said:
            raise CannotRunError(
                f"fio failed: {said[-400:]}", remedy="set g1.fio.engine: libaio in the criteria"
            )
        raise FX100Error(f"fio ended with code {ended.code}: {said[-400:]}")
    return parse(ended.stdout.decode(errors="replace"), wanted)


def parse(text: str, wanted: Sequence[Cell]) -> list[Measured]:
    """Read fio's JSON, one job for each cell.

    Raises
    ------
    FX100Error
        If it is none, or a job failed or is missing.
    """
    try:
        jobs = {job["jobname"]: job for job in json.loads(text[text.index("{") :])["jobs"]}
        return [_measured(cell, jobs[cell.name]) for cell in wanted]
    except (ValueError, KeyError, TypeError) as problem:
        raise FX100Error(f"fio's answer cannot be read: {problem!r}") from problem


def _measured(cell: Cell, job: Mapping[str, Any]) -> Measured:
    if job.get("error"):
        raise FX100Error(f"fio: {cell.name} failed with error {job['error']}")
    sides = [job[side] for side in ("read", "write") if job[side]["io_bytes"]]
    if not sides:
        raise FX100Error(f"fio: {cell.name} moved nothing")
    percentiles = sides[0]["clat_ns"].get("percentile", {})
    return Measured(
        cell,
        round(sum(side["io_bytes"] / max(1, side["runtime"]) for side in sides) / 1e6, 4),
        round(sum(side["iops"] for side in sides), 1),
        {f"{float(key):g}": percentiles[key] / 1e6 for key in PERCENTILES if key in percentiles},
    )
