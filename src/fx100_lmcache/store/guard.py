"""Blocks whose exceptions must not cost anybody an answer: logged, counted, and kept in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)


class Guard:
    """Runs a block; an exception of it goes no further.

    Parameters
    ----------
    what : str
        What has failed if it raises.
    count : callable
        Called if it raises.

    Attributes
    ----------
    cause : Exception or None
        What it raised.
    """

    __slots__ = ("_count", "_what", "cause")

    def __init__(self, what: str, count: Callable[[], None]) -> None:
        self._what = what
        self._count = count
        self.cause: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(cause, Exception):
            return False
        self.cause = cause
        log.error("internal error: %s", self._what, exc_info=cause)
        self._count()
        return True
