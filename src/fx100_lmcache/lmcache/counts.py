"""Counters of a face, and a log line for each burst of one kind of trouble."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

BURST_S = 10.0


class Counts:
    """Named counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += number

    def snapshot(self) -> dict[str, int]:
        """Copy all counters."""
        with self._lock:
            return dict(self._counts)


class BurstLog:
    """Logs the first of a burst of failures at once, and sums up the rest.

    A device that is gone fails every store; a line for each would hide everything else.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        *,
        every_s: float = BURST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._what = what
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until = float("-inf")
        self._reasons: Counter[str] = Counter()

    def note(self, reason: str) -> None:
        """Record one failure."""
        with self._lock:
            self._reasons[reason] += 1
            now = self._clock()
            if now < self._quiet_until:
                return
            self._quiet_until = now + self._every_s
            reasons, self._reasons = self._reasons, Counter()
        told = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        self._log.warning("%s: %s (further ones are summed up)", self._what, told)
