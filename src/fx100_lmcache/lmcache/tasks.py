"""What the adapter has in hand, and what it hears about it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryObj

from fx100_lmcache.lmcache.buffers import fits, io_buffer, layout_of
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.store import LoadItem, LoadResult, PutResult

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StoreTask:
    """A store task: all of it succeeds or it failed."""

    number: int
    keys: list[ObjectKey]
    objects: list[MemoryObj]  # LMCache's until the result is out
    left: int
    written: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class LoadTask:
    """A load task.

    Attributes
    ----------
    places : list of int
        Which of the keys were asked of the store; the others have no usable buffer.
    """

    number: int
    keys: list[ObjectKey]
    objects: list[MemoryObj]
    places: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PutDone:
    """The store is done with one object of a task."""

    task: StoreTask
    place: int
    result: PutResult


@dataclass(slots=True)
class LoadDone:
    """The kernel is done with all buffers of a task."""

    task: LoadTask
    results: list[LoadResult]


@dataclass(slots=True)
class Deleted:
    """LMCache deleted these keys."""

    keys: list[ObjectKey]
    sizes: list[int]


@dataclass(slots=True)
class Evicted:
    """The store dropped these ``(digest, length, meta number)`` by itself."""

    entries: Sequence[tuple[bytes, int, int]]


def load_items(task: LoadTask, digests: Sequence[bytes], counts: Counts) -> list[LoadItem]:
    """Say where the objects of a task go; one that cannot be written to is left out."""
    items = []
    for place, (digest, obj) in enumerate(zip(digests, task.objects, strict=True)):
        try:
            buffer, layout = io_buffer(obj), layout_of(obj)
            if buffer.view.readonly:
                raise ValueError("destination cannot be written to")
        except Exception:
            counts.add("load_buffers_refused")
            log.exception("destination of a load refused")
            continue
        items.append(LoadItem(digest, buffer, partial(fits, layout, buffer.length)))
        task.places.append(place)
    return items


def sized_objects(task: LoadTask, results: Sequence[LoadResult]) -> list[int]:
    """Tell each object that was loaded how much of it is used; return their places."""
    loaded = []
    for place, result in zip(task.places, results, strict=False):
        if result.length:
            obj = task.objects[place]
            if result.length < obj.get_size():
                obj.set_used_size(result.length)
            loaded.append(place)
    return loaded
