"""Counters of an adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from fx100_lmcache.counters import Tally


class Counts:
    """Named counters. Thread-safe.

    Parameters
    ----------
    known : iterable of str
        Names of all of them: a table of :mod:`fx100_lmcache.counters`.
    """

    def __init__(self, known: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = Tally(known)

    def add(self, name: str, number: int = 1) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += number

    def snapshot(self) -> dict[str, int]:
        """Copy all counters."""
        with self._lock:
            return dict(self._counts)
