"""Counters of a face."""

from __future__ import annotations

import threading
from collections import Counter


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
