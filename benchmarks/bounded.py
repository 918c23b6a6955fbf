"""What `mooncake` and `churn` share: a contender of bounded capacity with LMCache's evictor on."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.backends import BACKENDS, Sizing
from benchmarks.child import Child, Setup
from benchmarks.common import scratch
from fx100_lmcache.sizing import MODELS


def shrunk(model: str, shrink: int, capacity_chunks: int) -> Sizing:
    """Size a contender for chunks that are smaller than the model's, in whole pages."""
    chunk_bytes = -(-MODELS[model].chunk_bytes() // shrink // 4096) * 4096
    return Sizing(chunk_bytes, capacity_chunks * chunk_bytes)


@contextlib.contextmanager
def opened(
    name: str, sizing: Sizing, slots: int, directory: Path, memory: Path
) -> Iterator[tuple[Child, Path]]:
    """Open a contender in a process of its own; yield it and the directory of its files.

    Parameters
    ----------
    slots : int
        Chunks that the memory loaded into holds.
    """
    with scratch(directory) as home, scratch(memory) as shared:
        BACKENDS[name].prepare(home, sizing)
        child = Child(Setup(name, home, sizing, shared / "l1", slots, evict=True))
        try:
            yield child, home
        finally:
            child.close()


def used_bytes(home: Path) -> int:
    """Bytes of the disk under a directory."""
    return sum(path.stat().st_blocks * 512 for path in home.rglob("*") if path.is_file())
