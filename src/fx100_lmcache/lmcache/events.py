"""One thread that hears of everything in the order in which it happened.

The store calls back from any thread, often with its lock held, and in the true order of events.
Listeners must not be called there. So callbacks only post, and this thread does the rest: what
it does for one event is over before the next one is looked at, so LMCache never hears of a
deletion before the store that it undid.

Whatever fails for one event is noted, and the next one is looked at. Where the thread does not run
(not yet, not any more, or not in a forked child) whoever posts does what results depend on.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from fx100_lmcache.lmcache.error_boundary import ErrorBoundary

MAX_BATCH = 1024
IDLE_PAUSE_S = 0.002
IDLE_AT_LEAST_EVERY_S = 0.05
"""Idle work goes on, slowly, also while events never stop coming."""


def _nothing(_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Handler:
    """What is done about events of one type.

    Attributes
    ----------
    announce : callable
        Given a run of events first, to tell others of them: on the event thread or not at all.
    each : callable
        Given each event: what a result depends on. Must be thread-safe.
    """

    announce: Callable[[list[Any]], None] = _nothing
    each: Callable[[Any], None] = _nothing


class EventThread:
    """Handles posted events, in order.

    Parameters
    ----------
    handlers : mapping of type to Handler
        One for each type of event.
    idle : callable
        Called between events, mostly while there are none, as long as it returns True.
    """

    def __init__(
        self,
        handlers: Mapping[type, Handler],
        idle: Callable[[], bool],
        boundary: ErrorBoundary,
        *,
        name: str = "fx100-events",
    ) -> None:
        self._handlers = handlers
        self._idle = idle
        self._boundary = boundary
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._delayed: list[_Delayed] = []  # a heap
        self._more = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; without it listeners hear of nothing."""
        return self._thread.is_alive()

    def post(self, event: object, *, delay_s: float = 0.0) -> None:
        """Hand over an event of a type that has a handler; never blocks.

        Parameters
        ----------
        delay_s : float
            It is handled so much later, or when the thread ends.
        """
        self._queue.put(_Delayed(time.monotonic() + delay_s, event=event) if delay_s else event)
        if not self._thread.is_alive():
            self._drain()

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
        """Stop after what has been posted so far. May be called before :meth:`start`."""
        self._queue.put(_Order(self._set_ended))
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._drain()

    def _set_more(self) -> None:
        self._more = True

    def _set_ended(self) -> None:
        self._ended = True

    def _run(self) -> None:
        idle_at = time.monotonic()
        try:
            while not self._ended:
                busy = self._take_and_handle()
                if self._more and (not busy or time.monotonic() > idle_at):
                    self._more = bool(self._guarded(self._idle))
                    idle_at = time.monotonic() + IDLE_AT_LEAST_EVERY_S
        finally:
            for delayed in self._delayed:
                self._queue.put(delayed)
            self._drain()

    def _take_and_handle(self) -> bool:
        """Handle what is there; False if nothing was. Keeps no event, nor what hangs on it."""
        batch = self._take()
        for kind, run in groupby(batch, type):
            self._guarded(self._handle, kind, list(run))
        return bool(batch)

    def _take(self) -> list[Any]:
        """Take what is there; nothing when it is time for idle work."""
        batch = []
        try:
            batch.append(self._queue.get(timeout=self._pause_s()))
            while len(batch) < MAX_BATCH:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        while self._delayed and self._delayed[0].due <= time.monotonic():
            batch.append(heapq.heappop(self._delayed).event)
        return batch

    def _pause_s(self) -> float | None:
        """How long to wait for the next event; None is for ever."""
        pause_s = IDLE_PAUSE_S if self._more else None
        if self._delayed:
            due_s = max(0.0, self._delayed[0].due - time.monotonic())
            pause_s = due_s if pause_s is None else min(pause_s, due_s)
        return pause_s

    def _handle(self, kind: type, events: list[Any]) -> None:
        if kind is _Delayed:
            for delayed in events:
                heapq.heappush(self._delayed, delayed)
            return
        self._guarded(self._handler_of(kind).announce, events)
        for event in events:
            self._guarded(self._each, event)

    def _drain(self) -> None:
        """Do what results depend on, in place of the thread."""
        while True:
            try:
                event = self._queue.get_nowait()
            except queue.Empty:
                return
            self._guarded(self._each, event.event if isinstance(event, _Delayed) else event)

    def _each(self, event: Any) -> None:
        self._handler_of(type(event)).each(event)

    def _handler_of(self, kind: type) -> Handler:
        return _OBEY if kind is _Order else self._handlers[kind]

    def _guarded(self, call: Callable[..., Any], *arguments: object) -> Any:
        # a SystemExit of a listener's would end the thread
        with self._boundary.caught("event_errors", "an event handler failed", BaseException):
            return call(*arguments)
        return None


class _Order:
    """Something that the thread is to do for itself."""

    def __init__(self, obey: Callable[[], None]) -> None:
        self.obey = obey


_OBEY = Handler(each=lambda order: order.obey())

_numbers = itertools.count()


@dataclass(slots=True, order=True)
class _Delayed:
    """An event that is handled later."""

    due: float
    number: int = field(init=False, default_factory=lambda: next(_numbers))
    event: Any = field(compare=False, kw_only=True)
