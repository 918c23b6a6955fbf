"""Which recovered inodes claim the same blocks, and which of them win. Pure."""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from fx100_lmcache.ondisk.inode import MAX_BLOCK, unpack_location

U64 = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


def contested_entries(locations: U64, candidates: Flags) -> list[int]:
    """Entries, oldest first, that share a block with another candidate (or with themselves).

    Parameters
    ----------
    locations : uint64 array of shape (entries, widest)
        Packed locations, zero where an entry has no more pieces.
    candidates : bool array
        Entries that count.
    """
    entry, column = np.nonzero((locations != 0) & candidates[:, None])
    packed = locations[entry, column]
    start = (packed >> np.uint64(56) << np.uint64(40)) | (packed & np.uint64(MAX_BLOCK))
    order = np.argsort(start)
    start, packed, entry = start[order], packed[order], entry[order]
    end = start + (packed >> np.uint64(40) & np.uint64(0xFFFF))
    reach = np.maximum.accumulate(end) if len(end) else end
    fresh = np.ones(len(start), np.bool_)
    fresh[1:] = start[1:] >= reach[:-1]
    group = np.cumsum(fresh) - 1
    crowded = np.bincount(group) > 1 if len(group) else np.zeros(0, np.bool_)
    return sorted(set(entry[crowded[group]].tolist())) if len(group) else []


def resolve(locations: U64, contested: list[int]) -> list[int]:
    """Return the losers: newest first, the first claim on a block wins."""
    taken: dict[int, list[tuple[int, int]]] = {}
    losers = []
    for index in reversed(contested):
        runs = []
        for packed in locations[index].tolist():
            if packed:
                member, block, blocks = unpack_location(packed)
                runs.append((member, block, block + blocks))
        claimed: list[tuple[int, int, int]] = []
        for member, first, end in runs:
            if _is_taken(taken.setdefault(member, []), first, end):
                break
            bisect.insort(taken[member], (first, end))
            claimed.append((member, first, end))
        else:
            continue
        for member, first, end in claimed:
            taken[member].remove((first, end))
        losers.append(index)
    return losers


def _is_taken(runs: list[tuple[int, int]], first: int, end: int) -> bool:
    at = bisect.bisect_left(runs, (end, 0))
    return at > 0 and runs[at - 1][1] > first
