"""What is open in an engine, and when each part of it is due. Thread-safe; does nothing itself."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_LONGEST_WAIT_S = 1.0  # the clock may be a test's: look again


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something to call when its time has come."""

    ring: Callable[[], None]


class DeadlineQueue(Generic[T]):
    """Counts what is open and queues it by its deadline.

    Attributes
    ----------
    open : int
        How many are neither reported nor expired.
    """

    def __init__(self) -> None:
        self.open = 0
        self._queue: list[tuple[float, int, T]] = []
        self._sequence = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False

    def begin(self, count: int = 1) -> None:
        """Count more as open."""
        with self._changed:
            self.open += count

    def end(self) -> None:
        """Count one less."""
        with self._changed:
            self.open -= 1
            if not self.open:
                self._changed.notify_all()

    def push(self, deadline: float, what: T) -> None:
        """Queue something until its deadline, or until :meth:`pop` is asked for all there is."""
        with self._changed:
            if not self._queue or deadline < self._queue[0][0]:
                self._changed.notify_all()
            heapq.heappush(self._queue, (deadline, next(self._sequence), what))

    def pop(self, now: float) -> T | None:
        """Take one whose deadline has passed."""
        with self._changed:
            if not self._queue or self._queue[0][0] > now:
                return None
            return heapq.heappop(self._queue)[2]

    def wait(self, now: float) -> None:
        """Wait until the next deadline, or until an earlier one is pushed; at most a second.

        Not at all after :meth:`stop`.
        """
        with self._changed:
            next_at = self._queue[0][0] if self._queue else now + _LONGEST_WAIT_S
            if not self._stopped:
                self._changed.wait(min(max(next_at - now, 0.0), _LONGEST_WAIT_S))

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until nothing is open, or for so long."""
        with self._changed:
            self._changed.wait(timeout_s)

    def stop(self) -> None:
        """End all waits, now and from now on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
