"""What the adapter has in hand, and what it hears about it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fx100_lmcache.lmcache.buffers import fits, io_buffer, layout_of
from fx100_lmcache.lmcache.compat.memory import MemoryObj
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.store import LoadItem, LoadResult, PutResult

if TYPE_CHECKING:  # the plugin uses what is here, too, and in-process these need not be there
    from fx100_lmcache.lmcache.compat.mp import Bitmap, ObjectKey

PART = 80
"""Objects of a load that the store is given at once; it reads so many as one batch."""


@dataclass(slots=True, eq=False)
class StoreTask:
    """A store task: all of it succeeds or it failed.

    Attributes
    ----------
    objects : list of MemoryObj
        LMCache's to reuse when the result is out, and not before.
    waiting : set of int
        Places of the objects whose fate is not known.
    reasons : Counter
        Why objects were not stored.
    """

    number: int
    keys: list[ObjectKey]
    objects: list[MemoryObj]
    waiting: set[int] = field(default_factory=set)
    written: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, place: int, result: PutResult) -> bool:
        """Note the fate of one object, once; True if it was the last to be known."""
        with self.lock:
            if place not in self.waiting:
                return False
            self.waiting.discard(place)
            self.written += result.written
            if not result.stored:
                self.reasons[result.reason] += 1
            return not self.waiting


@dataclass(slots=True, eq=False)
class LoadTask:
    """A load task. It is over when every part that the store was given has come back.

    Attributes
    ----------
    bitmap : Bitmap
        The result: what was loaded.
    places : list of int
        Which of the keys were asked of the store; the others have no usable buffer.
    parts : list of list of LoadItem
        What is asked of the store, in the order of `places`.
    results : dict of int to list of LoadResult
        Those of the parts that came back, by the number of the part.
    """

    number: int
    keys: list[ObjectKey]
    objects: list[MemoryObj]
    bitmap: Bitmap
    places: list[int] = field(default_factory=list)
    parts: list[list[LoadItem]] = field(default_factory=list)
    results: dict[int, Sequence[LoadResult]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def come_back(self, part: int, results: Sequence[LoadResult]) -> bool:
        """Note that a part came back, once; True if it was the last to do so."""
        with self.lock:
            if part in self.results:
                return False
            self.results[part] = results
            return len(self.results) == len(self.parts)

    def loaded(self) -> list[tuple[int, int]]:
        """Return place and length of each object that the store has loaded, in order."""
        answers: list[LoadResult] = []
        for part, items in enumerate(self.parts):
            results = self.results.get(part, ())
            whole = len(results) == len(items)
            answers += results if whole else [LoadResult(0)] * len(items)
        return [(p, r.length) for p, r in zip(self.places, answers, strict=True) if r.length]


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


@dataclass(slots=True)
class Deleted:
    """LMCache deleted these ``(digest, length)``.

    Attributes
    ----------
    keys : dict of bytes to ObjectKey
        By digest; others may be among them.
    """

    keys: dict[bytes, ObjectKey]
    removed: Sequence[tuple[bytes, int]]


@dataclass(slots=True)
class Touched:
    """LMCache used these keys without loading them."""

    keys: list[ObjectKey]


@dataclass(slots=True)
class Evicted:
    """The store dropped these ``(digest, length, meta number)`` by itself."""

    entries: Sequence[tuple[bytes, int, int]]


def listed(values: Any) -> list[Any]:
    """Make a list of what a caller gave; an empty one if there is nothing in it."""
    with contextlib.suppress(Exception):
        return list(values)
    return []


def plan_load(task: LoadTask, digests: Sequence[bytes], boundary: ErrorBoundary) -> None:
    """Say where the objects of a task go; one that cannot be written to is left out.

    Raises
    ------
    ValueError
        If there are not as many objects as keys.
    """
    items: list[LoadItem] = []
    places: list[int] = []
    for place, (digest, obj) in enumerate(zip(digests, task.objects, strict=True)):
        with boundary.caught("load_buffers_refused", "the destination of a load was refused"):
            buffer, layout = io_buffer(obj), layout_of(obj)
            if buffer.view.readonly:
                raise ValueError("destination cannot be written to")
            items.append(LoadItem(digest, buffer, partial(fits, layout, buffer.length)))
            places.append(place)
    task.places = places
    task.parts = in_parts(items)


def in_parts(items: Sequence[LoadItem]) -> list[list[LoadItem]]:
    """Divide what a load asks of the store into calls, of about the same size."""
    parts = -(-len(items) // PART)
    ends = [len(items) * part // max(1, parts) for part in range(parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]


def size_objects(task: LoadTask, boundary: ErrorBoundary) -> None:
    """Tell each object that was loaded how much of it is used, and set its bit."""
    for place, length in task.loaded():
        # an object of LMCache's may raise; without a result its request would hang
        with boundary.caught("load_errors", "an object that was loaded is reported as a miss"):
            obj = task.objects[place]
            if length < obj.get_size():
                obj.set_used_size(length)
            task.bitmap.set(place)


def stored_now(events: Iterable[PutDone]) -> list[tuple[ObjectKey, int]]:
    """Return key and size of what was not there before."""
    return [
        (event.task.keys[event.place], event.result.written)
        for event in events
        if event.result.stored and event.result.written
    ]
