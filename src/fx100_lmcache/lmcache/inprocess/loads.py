"""Loads: take host memory from LMCache, read into it, hand out what was read whole.

Memory is taken without waiting for others, except for puts of ours that are about to give some
back. An object whose read is stuck in the kernel is a miss, and is kept until the kernel has let
go of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch

from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.lmcache.buffers import fits, io_buffer
from fx100_lmcache.lmcache.compat.memory import MemoryFormat, MemoryObj
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.lmcache.events import EventThread, Handler
from fx100_lmcache.lmcache.inprocess.puts import PutQueue
from fx100_lmcache.lmcache.mp.tasks import in_parts
from fx100_lmcache.ondisk.chunk_meta import Layout
from fx100_lmcache.store import LoadItem, LoadResult, Store

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""After its deadline the engine reports a load; this long we wait for the report."""


class Allocator(Protocol):
    """Where host memory comes from: LMCache's ``LocalCPUBackend``."""

    def allocate(
        self, shapes: Any, dtypes: Any, fmt: Any, *, eviction: bool, busy_loop: bool
    ) -> MemoryObj | None:
        """Return an object with one reference, or None when memory is short."""
        ...


@dataclass(frozen=True, slots=True)
class _Kind:
    """What to allocate for the objects of one layout; the lists are LMCache's to read only.

    The size is None where a dtype is not known.
    """

    layout: Layout
    size_bytes: int | None
    shapes: list[torch.Size]
    dtypes: list[torch.dtype | None]
    fmt: MemoryFormat


class _Batch:
    """Objects that are being filled. Whoever asked takes them, or leaves them to be freed."""

    def __init__(self, count: int, notify: Callable[[], None], boundary: ErrorBoundary) -> None:
        self._notify = notify
        self._boundary = boundary
        self._lock = threading.Lock()
        self._objects: list[MemoryObj | None] = [None] * count
        self._places: list[int] = []
        self._parts: list[list[int]] = []
        self._out: set[int] = set()
        self._done = False
        self._left = False

    def add(self, place: int, obj: MemoryObj) -> None:
        """Note the destination of one key."""
        self._objects[place] = obj
        self._places.append(place)

    def begin(self, sizes: Sequence[int]) -> None:
        """Note how many objects, in the order in which they were added, each part has."""
        places = iter(self._places)
        self._parts = [list(islice(places, size)) for size in sizes]
        self._out = set(range(len(sizes)))
        if not sizes:
            self._end()

    def finish(self, part: int, results: Sequence[LoadResult]) -> None:
        """Sort good from bad in a part that came back; called by the store, from any thread."""
        with self._lock:
            if part not in self._out:
                return
        bad = []
        for place, result in zip(self._parts[part], results, strict=True):
            if not result.length:
                obj, self._objects[place] = self._objects[place], None
                if not result.in_kernel:
                    bad.append(obj)
        release(bad, self._boundary)
        with self._lock:
            self._out.discard(part)
            over = not self._out
        if over:
            self._end()

    def fail(self) -> None:
        """Nothing was asked of the store: free everything."""
        objects, self._objects = self._objects, [None] * len(self._objects)
        release(objects, self._boundary)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._done = True
            left = self._left
        if left:
            release(self.take(), self._boundary)
        self._notify()

    def take(self) -> list[MemoryObj | None]:
        """Take the objects, once, or leave them if they are not there yet."""
        nothing: list[MemoryObj | None] = [None] * len(self._objects)
        with self._lock:
            if not self._done:
                self._left = True
                return nothing
            objects, self._objects = self._objects, nothing
        return objects


class Loads:
    """Reads objects. Thread-safe; never raises.

    Parameters
    ----------
    load_s : float
        Deadline of a request, memory included.
    puts : PutQueue
        Whose objects in flight will give host memory back.
    """

    def __init__(self, store: Store, counts: Counts, load_s: float, puts: PutQueue) -> None:
        self._store = store
        self._counts = counts
        self._boundary = ErrorBoundary(counts)
        self._load_s = load_s
        self._puts = puts
        self._kinds: dict[int, _Kind | None] = {}
        self._short = BurstLog(log, "chunks were not loaded")
        start = Handler(each=lambda start: start())
        self._events = EventThread(
            {partial: start}, lambda: False, self._boundary, name="fx100-loads"
        )
        self._events.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs that starts loads of the event loop."""
        return self._events.alive

    def get(self, digests: Sequence[bytes], allocator: Allocator) -> list[MemoryObj | None]:
        """Load objects and wait; None for each that is not there or failed."""
        done = threading.Event()
        batch = _Batch(len(digests), done.set, self._boundary)
        self._start(batch, digests, allocator, time.monotonic() + self._load_s)
        if not done.wait(self._load_s + GRACE_S):
            self._counts.add("loads_abandoned")
        return batch.take()

    async def get_async(
        self, digests: Sequence[bytes], allocator: Allocator
    ) -> list[MemoryObj | None]:
        """Load objects without ever blocking the event loop; otherwise as :meth:`get`."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(ready.set)
            except RuntimeError:  # the loop was closed: nobody will take them
                release(batch.take(), self._boundary)

        batch = _Batch(len(digests), notify, self._boundary)
        until = time.monotonic() + self._load_s
        self._events.post(partial(self._start, batch, digests, allocator, until))
        try:
            await asyncio.wait_for(ready.wait(), self._load_s + GRACE_S)
        except TimeoutError:
            self._counts.add("loads_abandoned")
        except asyncio.CancelledError:
            release(batch.take(), self._boundary)
            raise
        return batch.take()

    def _start(
        self, batch: _Batch, digests: Sequence[bytes], allocator: Allocator, until: float
    ) -> None:
        caught = self._boundary.caught("load_errors", f"a load of {len(digests)} chunks failed")
        items = None
        with caught:
            items = self._items(batch, digests, allocator, until)
        if items is None:
            batch.fail()
            return
        parts = in_parts(items)
        batch.begin([len(part) for part in parts])
        for number, part in enumerate(parts):
            done, failed = partial(batch.finish, number), True
            with caught:
                deadline_s = max(0.01, until - time.monotonic())
                self._store.load(part, done, hold=False, deadline_s=deadline_s)
                failed = False
            if failed:  # before anything of this part was begun
                done([LoadResult(0)] * len(part))

    def _items(
        self, batch: _Batch, digests: Sequence[bytes], allocator: Allocator, until: float
    ) -> list[LoadItem]:
        """Take memory for everything that is there, as far as it goes."""
        items = []
        described = self._store.describe(digests)
        for place, (digest, found) in enumerate(zip(digests, described, strict=True)):
            if found is None:
                continue
            length, number = found
            kind = self._kind(number)
            if kind is None:
                continue
            if kind.size_bytes not in (None, length):  # before others are evicted for it
                self._counts.add("load_layout")
                continue
            obj = self._allocate(allocator, kind, until)
            if obj is None:
                self._counts.add("load_no_memory", len(digests) - place)
                self._short.note("host memory is short, raise max_local_cpu_size")
                break
            if obj.get_size() != length:
                self._counts.add("load_layout")
                obj.ref_count_down()
                continue
            batch.add(place, obj)
            accept, let_go = (
                partial(fits, kind.layout, length),
                partial(release, [obj], self._boundary),
            )
            items.append(LoadItem(digest, io_buffer(obj), accept, let_go))
        return items

    def _allocate(self, allocator: Allocator, kind: _Kind, until: float) -> MemoryObj | None:
        while True:
            before = self._puts.released
            obj = allocator.allocate(
                kind.shapes, kind.dtypes, kind.fmt, eviction=True, busy_loop=False
            )
            if obj is not None or not self._puts.wait_for_release(before, until):
                return obj

    def _kind(self, number: int) -> _Kind | None:
        if number not in self._kinds:
            layout = self._store.meta(number).layout
            try:
                self._kinds[number] = _kind_of(layout)
            except (AttributeError, KeyError, TypeError, ValueError) as problem:
                self._counts.add("load_layout")
                log.warning("stored objects of an unknown layout: %r", problem)
                self._kinds[number] = None
        return self._kinds[number]

    def close(self, timeout_s: float) -> None:
        """Stop, after the store has closed."""
        self._events.close(timeout_s)


def _kind_of(layout: Layout) -> _Kind:
    """Say what to allocate.

    Raises
    ------
    AttributeError, KeyError, TypeError, ValueError
        If there is no such layout: it comes from the media.
    """
    shapes = [torch.Size(shape) for _, shape in layout.tensors]
    dtypes = [None if name == "None" else getattr(torch, name) for name, _ in layout.tensors]
    size_bytes: int | None = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if min(shape, default=0) < 0 or not isinstance(dtype, torch.dtype | None):
            raise ValueError(f"no tensor: {dtype!r:.50} of {shape!r:.100}")
        if dtype is None or size_bytes is None:
            size_bytes = None
        else:
            size_bytes += math.prod(shape) * dtype.itemsize
    return _Kind(layout, size_bytes, shapes, dtypes, MemoryFormat[layout.format])


def release(objects: Iterable[MemoryObj | None], boundary: ErrorBoundary) -> None:
    """Give back one reference of each object."""
    for obj in objects:
        if obj is not None:
            with boundary.caught("load_errors", "LMCache did not take an object back"):
                obj.ref_count_down()
