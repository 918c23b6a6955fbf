"""Faults that are nobody's but ours: counted, so that none of them is silent."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from fx100_lmcache.burst_log import BurstLog

log = logging.getLogger(__name__)


class Defects:
    """Counts handlers that raise, memory and threads that lack, transfers that must not be made.

    Thread-safe.

    Attributes
    ----------
    count : int
        So far; shown as ``internal_errors``.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._refusals = BurstLog(log, "transfers refused by the engine, internal error")

    def guard(self, what: str) -> Guard:
        """Run a block whose exceptions must not get any further.

        Parameters
        ----------
        what : str
            What has failed if it raises; begins the log line.
        """
        return Guard(self, what)

    def caught(self, what: str, cause: BaseException) -> bool:
        """Count and log an exception; return whether it is to be kept from the caller."""
        self.add()
        log.error(what, exc_info=cause)
        return True

    def refused(self, reason: str) -> None:
        """Note a transfer that would leave its buffer or its member."""
        self.add()
        self._refusals.note(reason)

    def add(self) -> None:
        """Count one that was logged elsewhere."""
        with self._lock:
            self.count += 1


class Guard:
    """A block whose exceptions are counted and go no further.

    Attributes
    ----------
    cause : Exception or None
        What it raised.
    """

    __slots__ = ("_defects", "_what", "cause")

    def __init__(self, defects: Defects, what: str) -> None:
        self._defects = defects
        self._what = what
        self.cause: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(cause, Exception):
            return False
        self.cause = cause
        return self._defects.caught(self._what, cause)
