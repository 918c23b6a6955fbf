"""A clock that moves only when told to."""

from __future__ import annotations


class SimulatedClock:
    """Monotonic seconds for tests; call it to read it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Read the clock."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0
        self.now_s += seconds
