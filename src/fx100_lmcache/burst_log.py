"""A log line for each burst of one kind of trouble."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

BURST_S = 10.0
SHOWN = 4  # reasons in a line


class BurstLog:
    """Logs the first of a burst of failures at once, and sums up the rest.

    A device that is gone fails every call; a line for each would hide everything else.
    Thread-safe.

    Parameters
    ----------
    what : str
        What fails; begins the line.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until = float("-inf")
        self._reasons: Counter[str] = Counter()

    def note(self, reason: str, problem: BaseException | None = None) -> None:
        """Record one failure; failures with the same reason are counted together.

        Parameters
        ----------
        problem : BaseException or None
            A defect, to be shown with its traceback.
        """
        with self._lock:
            self._reasons[reason] += 1
            now = self._clock()
            if now < self._quiet_until:
                return
            self._quiet_until = now + BURST_S
            reasons, self._reasons = self._reasons, Counter()
        listed = [f"{count} x {reason}" for reason, count in reasons.most_common(SHOWN)]
        if len(reasons) > SHOWN:
            listed.append(f"and {len(reasons) - SHOWN} others")
        self._log.log(
            logging.WARNING if problem is None else logging.ERROR,
            "%s: %s (further ones are summed up)",
            self._what,
            ", ".join(listed),
            exc_info=problem,
        )
