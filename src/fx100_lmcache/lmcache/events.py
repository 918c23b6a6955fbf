"""One thread that hears of everything in the order in which it happened.

The store calls back from any thread, often with its lock held, and in the true order of events.
Listeners must not be called there. So callbacks only post, and this thread does the rest: what
it does for one event is over before the next one is looked at, so LMCache never hears of a
deletion before the store that it undid.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from fx100_lmcache.lmcache.counts import Counts

log = logging.getLogger(__name__)

MAX_BATCH = 1024
IDLE_PAUSE_S = 0.002
IDLE_AT_LEAST_EVERY_S = 0.05
"""Idle work goes on, slowly, also while events never stop coming."""


class EventThread:
    """Handles posted events, in order.

    Parameters
    ----------
    handlers : mapping of type to callable
        Each is given a list: a run of events of that type.
    idle : callable
        Called between events, mostly while there are none, as long as it returns True.
    """

    def __init__(
        self,
        handlers: Mapping[type, Callable[[list[Any]], None]],
        idle: Callable[[], bool],
        counts: Counts,
        *,
        name: str = "fx100-events",
    ) -> None:
        self._handlers = handlers
        self._idle = idle
        self._counts = counts
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._more = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether events are handled; without this nothing is ever reported to LMCache."""
        return self._thread.is_alive()

    def post(self, event: object) -> None:
        """Hand over an event of a type that has a handler; never blocks."""
        self._queue.put(event)

    def wake(self) -> None:
        """Have ``idle`` called again."""
        self._queue.put(_Order(self._set_more))

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything posted so far was handled; not at all on the thread itself."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return False
        reached = threading.Event()
        self._queue.put(_Order(reached.set))
        return reached.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Stop after what has been posted so far."""
        self._queue.put(_Order(self._set_ended))
        self._thread.join(timeout_s)

    def _set_more(self) -> None:
        self._more = True

    def _set_ended(self) -> None:
        self._ended = True

    def _run(self) -> None:
        idle_at = time.monotonic()
        while not self._ended:
            batch = self._take()
            for kind, run in groupby(batch, type):
                if kind is _Order:
                    for order in run:
                        order.obey()  # type: ignore[attr-defined]
                else:
                    self._guarded(self._handlers[kind], list(run))
            if self._more and (not batch or time.monotonic() > idle_at):
                self._more = bool(self._guarded(self._idle))
                idle_at = time.monotonic() + IDLE_AT_LEAST_EVERY_S

    def _take(self) -> list[object]:
        """Take what is there; nothing when it is time for idle work."""
        try:
            batch = [self._queue.get(timeout=IDLE_PAUSE_S if self._more else None)]
        except queue.Empty:
            return []
        while len(batch) < MAX_BATCH and not self._queue.empty():
            batch.append(self._queue.get())
        return batch

    def _guarded(self, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except Exception:
            self._counts.add("event_errors")
            log.exception("an event handler failed")
            return None


class _Order:
    """Something that the thread is to do for itself."""

    def __init__(self, obey: Callable[[], None]) -> None:
        self.obey = obey
