"""Results of tasks, each handed out once, and the descriptor that says that there are some."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

from fx100_lmcache.lmcache.compat.mp import create_event_notifier
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary

T = TypeVar("T")

MAX_WAITING = 65_536
"""Results that nobody asked for; LMCache forgets the lookups of an aborted request."""

_TRIES = 3


class Results(Generic[T]):
    """Finished tasks of one kind. Thread-safe; only the constructor raises."""

    def __init__(self, boundary: ErrorBoundary) -> None:
        self._boundary = boundary
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._ready: dict[int, T] = {}
        self._open = True

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 after :meth:`close`."""
        return int(self._notifier.fileno())

    def publish(self, task: int, result: T) -> None:
        """Make a result available, then signal; after :meth:`close` without a signal."""
        with self._lock:
            if len(self._ready) >= MAX_WAITING:
                del self._ready[next(iter(self._ready))]
            self._ready[task] = result
            if self._open:
                self._signal()

    def _signal(self) -> None:
        for _ in range(_TRIES):  # the next result's signal would do, but there may be none
            with self._boundary.caught("event_errors", "LMCache could not be told of a result"):
                self._notifier.notify()
                return

    def take(self, task: Any) -> T | None:
        """Hand out one result, once; None if there is none, whatever is asked for."""
        with self._lock:
            try:
                return self._ready.pop(task, None)
            except TypeError:  # no number
                return None

    def take_all(self) -> dict[int, T]:
        """Hand out everything there is, once."""
        with self._lock:
            ready, self._ready = self._ready, {}
        return ready

    def close(self) -> None:
        """Close the descriptor: it may be somebody else's from now on."""
        with self._lock:
            self._open = False
            self._notifier.close()
