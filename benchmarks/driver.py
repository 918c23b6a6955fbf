"""Drives an L2 adapter as LMCache's controllers do: one thread that submits, polls and collects."""

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.backends import MODEL
from benchmarks.l1 import Arena

WAIT_S = 120.0


def object_key(chunk: int) -> Any:
    """Return LMCache's key of a chunk, by number."""
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk.to_bytes(32, "little"), MODEL, 0)


@dataclass(slots=True)
class Loaded:
    """Fate of one session's load: seconds since the batch began, chunks found and loaded."""

    wall_s: float = 0.0
    found: int = 0
    loaded: int = 0


class Driver:
    """Looks up and loads sessions.

    Parameters
    ----------
    window : int
        Chunks of a session in flight; 0 for all.
    """

    def __init__(self, adapter: Any, arena: Arena, window: int = 0) -> None:
        self._adapter = adapter
        self._window = window
        self._objects = [arena.memory_object(slot) for slot in range(arena.slots)]
        self._lookups: dict[int, Callable[[Any], None]] = {}
        self._loads: dict[int, Callable[[Any], None]] = {}
        self._poll = select.poll()
        for fd in self._fds():
            self._poll.register(fd, select.POLLIN)

    def _fds(self) -> tuple[int, int]:
        return self._adapter.get_lookup_and_lock_event_fd(), self._adapter.get_load_event_fd()

    def load(self, sessions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Loaded]:
        """Load sessions that all come at once, each given as chunks and the slots for them."""
        results = [Loaded() for _ in sessions]
        started = time.perf_counter()
        for (chunks, slots), result in zip(sessions, results, strict=True):
            self._begin(chunks, slots, result, started)
        while self._lookups or self._loads:
            self._collect()
        return results

    def _begin(
        self, chunks: Sequence[int], slots: Sequence[int], result: Loaded, started: float
    ) -> None:
        keys = [object_key(chunk) for chunk in chunks]

        def looked_up(bitmap: Any) -> None:
            hits = [bitmap.test(place) for place in range(len(keys))]
            result.found = hits.index(False) if False in hits else len(hits)
            wanted = list(zip(keys[: result.found], slots, strict=False))
            more(deque(wanted), [key for key, hit in zip(keys, hits, strict=True) if hit])

        def more(waiting: deque[tuple[Any, int]], locked: list[Any]) -> None:
            count = self._window or len(waiting)
            part = [waiting.popleft() for _ in range(min(count, len(waiting)))]
            if not part:
                self._adapter.submit_unlock(locked)
                result.wall_s = time.perf_counter() - started
                return

            def loaded(bitmap: Any) -> None:
                result.loaded += sum(bitmap.test(place) for place in range(len(part)))
                more(waiting, locked)

            objects = [self._objects[slot] for _, slot in part]
            task = self._adapter.submit_load_task([key for key, _ in part], objects)
            self._loads[task] = loaded

        self._lookups[self._adapter.submit_lookup_and_lock_task(keys, {})] = looked_up

    def _collect(self) -> None:
        from lmcache.v1.platform import consume_fd

        ready = self._poll.poll(WAIT_S * 1000)
        if not ready:
            waiting = f"{len(self._lookups)} lookups and {len(self._loads)} loads"
            raise TimeoutError(f"{waiting} did not end within {WAIT_S:g} s")
        for fd, _ in ready:
            consume_fd(fd)
        for tasks, query in (
            (self._lookups, self._adapter.query_lookup_and_lock_result),
            (self._loads, self._adapter.query_load_result),
        ):
            for task in list(tasks):
                bitmap = query(task)
                if bitmap is not None:
                    tasks.pop(task)(bitmap)

    def store(
        self, chunks: Sequence[int], slots: Sequence[int], *, batch: int = 8, in_flight: int = 2
    ) -> int:
        """Store chunks from slots; return how many are in tasks that succeeded."""
        work = deque(
            (chunks[at : at + batch], slots[at : at + batch]) for at in range(0, len(chunks), batch)
        )
        running: dict[int, int] = {}
        stored = 0
        while work or running:
            while work and len(running) < in_flight:
                part, places = work.popleft()
                objects = [self._objects[slot] for slot in places]
                task = self._adapter.submit_store_task([object_key(c) for c in part], objects)
                running[task] = len(part)
            stored += self._collect_stores(running)
        return stored

    def _collect_stores(self, running: dict[int, int]) -> int:
        from lmcache.v1.platform import consume_fd

        fd = self._adapter.get_store_event_fd()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(WAIT_S * 1000):
            raise TimeoutError(f"{len(running)} store tasks did not end within {WAIT_S:g} s")
        consume_fd(fd)
        done = self._adapter.pop_completed_store_tasks().items()
        sizes = [(running.pop(task), result) for task, result in done]
        return sum(size for size, result in sizes if result.is_successful())


class Writer:
    """Stores new chunks beside the loads, as fast as they are taken, and deletes the oldest.

    Parameters
    ----------
    slots : sequence of int
        Slots of its own to store from.
    keep : int
        Chunks left stored at a time.
    """

    def __init__(
        self, driver: Driver, adapter: Any, slots: Sequence[int], first_chunk: int, keep: int
    ) -> None:
        self._driver = driver
        self._adapter = adapter
        self._slots = list(slots)
        self._next = first_chunk
        self._stored: deque[int] = deque()
        self._keep = keep
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="writer")
        self.chunks_per_s = 0.0

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._adapter.delete([object_key(chunk) for chunk in self._stored])

    def _run(self) -> None:
        started, stored = time.perf_counter(), 0
        while not self._stop.is_set():
            chunks = list(range(self._next, self._next + len(self._slots)))
            self._next += len(chunks)
            half = -(-len(chunks) // 2)
            stored += self._driver.store(chunks, self._slots, batch=half)
            self.chunks_per_s = stored / (time.perf_counter() - started)
            self._stored.extend(chunks)
            old = [self._stored.popleft() for _ in range(len(self._stored) - self._keep)]
            if old:
                self._adapter.delete([object_key(chunk) for chunk in old])
