"""What is there, from memory alone: no device is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fx100_lmcache.catalog.index import Rows
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta
from fx100_lmcache.store.state import Core

Flags = npt.NDArray[np.bool_]


def lookup(
    core: Core,
    digests: Sequence[bytes],
    *,
    pin_s: float,
    prefix: bool,
    accept: Callable[[ChunkMeta], bool] | None,
) -> Flags:
    """Say which objects could be loaded now; see :meth:`Store.lookup`.

    Parameters
    ----------
    pin_s : float
        How long pins on what is found last; 0 takes none.
    """
    if not digests:
        return np.zeros(0, np.bool_)
    with core.lock:
        rows = core.catalog.find(digests)
        hits = rows >= 0
        found = rows[hits]
        good = core.catalog.readable(found, core.engine.down_mask())
        if accept is not None and len(found):
            good &= _accepted(core, found, accept)
        hits[hits] = good
        if prefix:
            hits = np.logical_and.accumulate(hits)
            found = rows[hits]
        else:
            found = found[good]
        if len(found):
            core.catalog.touch(found)
            if pin_s:
                now = core.engine.now()
                core.catalog.pin(found, now, int(now + pin_s) + 1)
        core.counts["lookup_hits"] += len(found)
        core.counts["lookup_misses"] += len(digests) - len(found)
    return hits


def _accepted(core: Core, rows: Rows, accept: Callable[[ChunkMeta], bool]) -> Flags:
    catalog = core.catalog
    numbers = catalog.meta_numbers(rows)
    good = np.ones(len(rows), np.bool_)
    for number in np.unique(numbers).tolist():
        if not accept(core.meta(number)):
            core.counts["lookup_layout_mismatches"] += 1
            good[numbers == number] = False
    return good


def describe(core: Core, digests: Sequence[bytes]) -> list[tuple[int, int] | None]:
    """Return ``(length, meta number)`` of each object, None for those that are not there."""
    if not digests:
        return []
    with core.lock:
        rows = core.catalog.find(digests)
        there = rows[rows >= 0]
        lengths = core.catalog.lengths(there).tolist()
        numbers = core.catalog.meta_numbers(there).tolist()
    found = iter(zip(lengths, numbers, strict=True))
    return [next(found) if row >= 0 else None for row in rows.tolist()]


def touch(core: Core, digests: Sequence[bytes]) -> Flags:
    """Mark objects as just used, the first most recently; return which are there."""
    if not digests:
        return np.zeros(0, np.bool_)
    with core.lock:
        rows = core.catalog.find(digests)
        there = rows >= 0
        core.catalog.touch(rows[there])
    return there


def unpin(core: Core, digests: Sequence[bytes]) -> int:
    """Give back one pin for each digest; return how many were held."""
    if not digests:
        return 0
    with core.lock:
        rows = core.catalog.find(digests)
        given = core.catalog.unpin(rows[rows >= 0])
        core.counts["unpins_of_nothing"] += len(digests) - given
    return given
