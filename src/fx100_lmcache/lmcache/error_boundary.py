"""Exceptions where none belong: LMCache's, or our own."""

from __future__ import annotations

import contextlib
import logging
import threading
from types import TracebackType

from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.lmcache.counts import Counts

log = logging.getLogger(__name__)


class ErrorBoundary:
    """Where exceptions end, counted and logged. Thread-safe; never raises."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._lock = threading.Lock()
        self._bursts: dict[str, BurstLog] = {}

    def caught(self, counter: str, what: str, kind: type[BaseException] = Exception) -> Caught:
        """Enter to have exceptions end there: counted, logged in bursts, and not raised.

        Parameters
        ----------
        counter : str
            Counted up; its bursts are logged apart from others'.
        what : str
            What failed, and what that means.
        kind : type
            What is caught.
        """
        return Caught(self, counter, what, kind)

    def note(self, counter: str, what: str, problem: BaseException) -> None:
        """Record an exception."""
        with contextlib.suppress(Exception):
            self._counts.add(counter)
        with contextlib.suppress(Exception):
            with self._lock:
                burst = self._bursts.setdefault(counter, BurstLog(log, counter))
            burst.note(f"{what} ({type(problem).__name__})", problem)


class Caught:
    """A place where exceptions end; see `ErrorBoundary.caught`."""

    def __init__(
        self, boundary: ErrorBoundary, counter: str, what: str, kind: type[BaseException]
    ) -> None:
        self._boundary = boundary
        self._counter = counter
        self._what = what
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        problem: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        if not isinstance(problem, self._kind):
            return False
        self._boundary.note(self._counter, self._what, problem)
        return True
