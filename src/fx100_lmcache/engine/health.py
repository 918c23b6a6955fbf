"""Health of one member: up, suspect or down. Pure; the engine tells it what happened.

*Suspect*: the kernel has kept a transfer past its deadline. *Down*: several transfers in a row
failed, or one that was stuck did. Neither is promised by lookups nor chosen for writes; a probe
that reads the member's label ends *down*, and the return of all that was stuck ends *suspect*. What
does not return keeps threads and the budget of bytes in flight: a member that answers the probe
nevertheless gets others, and a health of their own (see ``LaneEngine.probe``).

A write without space does not count among the errors in a row: it comes from storage that is out of
space, which reads as well as ever, or from a device that is gone. The label tells the two apart.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

ERRORS_IN_A_ROW = 3


@dataclass(slots=True)
class MemberHealth:
    """Counters and state of one member. Thread-safe."""

    stuck: int = 0
    errors: int = 0
    last_error: str = ""
    doubted: bool = False
    """A write found no space, and the label was not looked at since."""
    _row: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def state(self) -> str:
        """``up``, ``suspect`` or ``down``."""
        if self._row >= ERRORS_IN_A_ROW:
            return "down"
        return "suspect" if self.stuck else "up"

    @property
    def usable(self) -> bool:
        """Whether the member may be read and written."""
        return self._row < ERRORS_IN_A_ROW and not self.stuck

    def note_success(self) -> None:
        """Record a transfer that worked."""
        if self._row:
            with self._lock:
                if self._row < ERRORS_IN_A_ROW:
                    self._row = 0

    def note_error(self, error: OSError) -> bool:
        """Record a transfer that failed; return whether it is the first in a row."""
        with self._lock:
            self.errors += 1
            self._row += 1
            self.last_error = str(error)
            return self._row == 1

    def note_no_space(self, error: OSError) -> None:
        """Record a write that found no space; the next probe decides what that means."""
        with self._lock:
            self.errors += 1
            self.last_error = str(error)
            self.doubted = True

    def note_stuck(self) -> None:
        """Record a transfer that the kernel kept past its deadline."""
        with self._lock:
            self.stuck += 1
            self.last_error = "a transfer passed its deadline in the kernel"

    def note_returned(self, works: bool) -> None:
        """Record that a stuck transfer came back; if it failed, only a probe ends *down*."""
        with self._lock:
            self.stuck -= 1
            if not works:
                self._row = max(self._row, ERRORS_IN_A_ROW)

    def note_probe(self, works: bool) -> None:
        """Record the outcome of reading the label: it alone ends *down*."""
        with self._lock:
            self.doubted = False
            self._row = 0 if works else ERRORS_IN_A_ROW
