"""Which recovered inodes claim the same blocks, and which of them win. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fx100_lmcache.ondisk.geometry import Geometry
from fx100_lmcache.ondisk.location import (
    MAX_BLOCK,
    blocks_of,
    members_of,
    starts_of,
    unpack_location,
)

_STRETCH = 16_384  # entries worked on at once: their temporary arrays stay in the CPU's cache

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def contested_entries(locations: U64, candidates: Flags, age: I64, geometry: Geometry) -> list[int]:
    """Entries, oldest first, that share a block with another candidate (or with themselves).

    Most entries have their frames to themselves; only the others are compared block by block.

    Parameters
    ----------
    locations : uint64 array of shape (entries, widest)
        Packed locations, zero where an entry has no more pieces.
    candidates : bool array
        Entries that count. Their pieces lie inside the data areas.
    age : int64 array
        Order of the entries.
    """
    suspects = _in_crowded_frames(locations, candidates, geometry)
    contested = suspects[_overlapping(locations[suspects])]
    oldest_first: list[int] = contested[np.argsort(age[contested])].tolist()
    return oldest_first


def _in_crowded_frames(locations: U64, candidates: Flags, geometry: Geometry) -> I64:
    """Candidates with a piece in a frame that another piece is in, too."""
    span = geometry.shards * max(m.frames_per_shard for m in geometry.members) + 1
    change = np.zeros(span * len(geometry.members), np.int32)
    for _, first, end in _frames(locations, candidates, span, geometry.frame_blocks):
        np.add.at(change, first, np.int32(1))
        np.add.at(change, end, np.int32(-1))
    crowded = np.cumsum(change, out=change) > 1
    if not crowded.any():
        return np.zeros(0, np.int64)
    crowded_before = np.concatenate(([0], np.cumsum(crowded)))
    found = [
        start + np.flatnonzero((crowded_before[first] < crowded_before[end]).any(axis=1))
        for start, first, end in _frames(locations, candidates, span, geometry.frame_blocks)
    ]
    return np.concatenate(found)


def _frames(
    locations: U64, candidates: Flags, span: int, frame_blocks: int
) -> Iterator[tuple[int, I64, I64]]:
    """Yield stretches as ``(first entry, first frames, ends)``; no piece is an empty run."""
    for start in range(0, len(locations), _STRETCH):
        part = locations[start : start + _STRETCH]
        counts = candidates[start : start + _STRETCH]
        if not counts.all():
            part = np.where(counts[:, None], part, np.uint64(0))
        base = members_of(part) * np.uint64(span)
        first = starts_of(part)
        end = first + blocks_of(part) + np.uint64(frame_blocks - 1)
        unit = np.uint64(frame_blocks)
        yield start, (base + first // unit).view(np.int64), (base + end // unit).view(np.int64)


def _overlapping(locations: U64) -> I64:
    """Entries of these that share a block, by sorting all their pieces."""
    entry, column = np.nonzero(locations)
    packed = locations[entry, column]
    start = members_of(packed) * np.uint64(MAX_BLOCK + 1) + starts_of(packed)
    order = np.argsort(start)
    start, packed, entry = start[order], packed[order], entry[order]
    end = start + blocks_of(packed)
    fresh = np.ones(len(start), np.bool_)
    fresh[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    group = np.cumsum(fresh) - 1
    crowded = np.bincount(group, minlength=1) > 1
    found: I64 = np.unique(entry[crowded[group]])
    return found


def resolve(locations: U64, contested: list[int]) -> list[int]:
    """Return the losers: newest first, the first claim on a block wins."""
    taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    losers = []
    for index in reversed(contested):
        runs = []
        for packed in locations[index].tolist():
            if packed:
                member, block, blocks = unpack_location(packed)
                runs.append((member, block, block + blocks))
        runs.sort()
        if _cross(runs) or any(_is_taken(taken[m], first, end) for m, first, end in runs):
            losers.append(index)
        else:
            for member, first, end in runs:
                bisect.insort(taken[member], (first, end))
    return losers


def _cross(runs: list[tuple[int, int, int]]) -> bool:
    """Whether runs, in order, overlap each other."""
    return any(
        one == other and end > first
        for (one, _, end), (other, first, _) in itertools.pairwise(runs)
    )


def _is_taken(runs: list[tuple[int, int]], first: int, end: int) -> bool:
    at = bisect.bisect_left(runs, (end, 0))
    return at > 0 and runs[at - 1][1] > first
