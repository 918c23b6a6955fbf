"""Results of tasks, each handed out once, and the descriptor that says that there are some."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

T = TypeVar("T")

MAX_WAITING = 65_536
"""Results that nobody asked for; LMCache forgets the lookups of an aborted request."""


class Results(Generic[T]):
    """Finished tasks of one kind. Thread-safe."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._ready: dict[int, T] = {}
        self._open = True

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 after :meth:`close`."""
        return int(self._notifier.fileno())

    def publish(self, task: int, result: T) -> None:
        """Make a result available, then signal. Does nothing after :meth:`close`."""
        with self._lock:
            if not self._open:
                return
            if len(self._ready) >= MAX_WAITING:
                del self._ready[next(iter(self._ready))]
            self._ready[task] = result
            self._notifier.notify()

    def take(self, task: int) -> T | None:
        """Hand out one result, once."""
        with self._lock:
            return self._ready.pop(task, None)

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
