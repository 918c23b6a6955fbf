"""What all benchmarks share: timing, load, facts of the machine, results as table and JSON."""

import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fx100_lmcache import __version__
from fx100_lmcache.accept.facts import cpu_name

GB = 1e9


@dataclass(slots=True)
class Sample:
    """One timed run.

    Attributes
    ----------
    wall_s, cpu_s : float
        CPU seconds are those of the whole process, less what the spinning thread took.
    moved_bytes : int
    spun : float
        Share of one CPU that the spinning thread got; 0 where there is none.
    """

    wall_s: float
    cpu_s: float
    moved_bytes: int
    spun: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Bandwidth in 1e9 bytes per second."""
        return self.moved_bytes / self.wall_s / GB

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds of the process for 1e9 bytes."""
        return self.cpu_s / (self.moved_bytes / GB)


@dataclass(slots=True)
class Series:
    """Runs of one contender."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    def median(self, what: str) -> float:
        """Return the median of a property of the samples."""
        return float(statistics.median(getattr(sample, what) for sample in self.samples))

    def spread(self, what: str) -> tuple[float, float]:
        """Return the least and the greatest value of a property."""
        values = [getattr(sample, what) for sample in self.samples]
        return min(values), max(values)


class Spinner:
    """A Python thread of this process that spins, as a busy server does."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1

    def cpu_s(self) -> float:
        """CPU seconds that the thread has taken."""
        ident = self._thread.ident
        assert ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(ident))

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def timed(moved_bytes: int, into: Series, spinner: Spinner | None = None) -> Iterator[None]:
    """Time a block that moves so many bytes."""
    spun = spinner.cpu_s() if spinner else 0.0
    wall, cpu = time.perf_counter(), _cpu_s()
    yield
    wall_s, cpu_s = time.perf_counter() - wall, _cpu_s() - cpu
    spun_s = spinner.cpu_s() - spun if spinner else 0.0
    into.samples.append(Sample(wall_s, cpu_s - spun_s, moved_bytes, spun_s / wall_s))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def busy_thread(on: bool) -> Iterator[Spinner | None]:
    """Keep a Python thread of this process spinning, if asked to."""
    spinner = Spinner() if on else None
    try:
        yield spinner
    finally:
        if spinner:
            spinner.stop()


def machine() -> dict[str, Any]:
    """Facts that a number means nothing without."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "fx100_lmcache": __version__,
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def report(title: str, series: list[Series], extra: dict[str, Any], json_path: Path | None) -> None:
    """Print a row for each contender; write JSON on request."""
    rows = []
    for one in series:
        low, high = one.spread("gb_per_s")
        rows.append(
            {
                "contender": one.name,
                "GB/s": one.median("gb_per_s"),
                "min..max": f"{low:.2f}..{high:.2f}",
                "CPU s/GB": one.median("cpu_s_per_gb"),
                **({"spinner's CPU": spun} if (spun := one.median("spun")) else {}),
                "runs": len(one.samples),
                "_gb_per_s": [round(sample.gb_per_s, 4) for sample in one.samples],
            }
        )
    publish(title, rows, extra, json_path)


def publish(
    title: str, rows: Sequence[dict[str, Any]], method: dict[str, Any], json_path: Path | None
) -> None:
    """Print rows as a table, with the facts of the machine; write JSON on request."""
    facts = machine()
    columns = list(dict.fromkeys(key for row in rows for key in row if not key.startswith("_")))
    table = Table(title=title, caption=", ".join(f"{k} {v}" for k, v in facts.items()))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell(row.get(column, "")) for column in columns))
    Console().print(table)
    if json_path is not None:
        result = {"title": title, "machine": facts, "method": method, "rows": list(rows)}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1, default=str) + "\n")


def cell(value: Any) -> str:
    """Write a value as short as its meaning allows."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """Make a directory for one run, and remove it whatever happens, SIGTERM included."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    directory.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="fx100-bench-", dir=directory.resolve()))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)  # a killed child may still be letting go


def drop_caches() -> bool:
    """Have the kernel forget clean pages; return whether it was allowed to."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
