"""The store's lock: what must not happen while it is held is done after its release."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)

Call = Callable[[], None]


class StoreLock:
    """A re-entrant lock that keeps a list of things to do after its release.

    Handing jobs to the engine may lead to anything, at once and on the same thread: a job for a
    member that is away is reported from within. So nothing is handed over while the books are
    being changed. The thread that put something off does it, in order, as soon as it has left the
    lock; what is put off meanwhile on that thread joins the end of the list.

    Parameters
    ----------
    on_fault : callable
        Called when one of these things has raised, which costs the others nothing.
    """

    def __init__(self, on_fault: Call) -> None:
        self._on_fault = on_fault
        self._lock = threading.RLock()
        self._depth = 0
        self._put_off: list[Call] = []
        self._thread = threading.local()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth or not self._put_off:
            self._lock.release()
            return
        calls, self._put_off = self._put_off, []
        self._lock.release()
        under_way: deque[Call] | None = getattr(self._thread, "calls", None)
        if under_way is not None:  # this thread is at it, further up
            under_way.extend(calls)
        else:
            self._catch_up(deque(calls))

    def put_off(self, call: Call) -> None:
        """Have this thread call something when it has left the lock, which it holds."""
        self._put_off.append(call)

    def _catch_up(self, calls: deque[Call]) -> None:
        self._thread.calls = calls
        try:
            while calls:
                call = calls.popleft()
                try:
                    call()
                except Exception:
                    log.exception("internal error in what the store had put off")
                    self._on_fault()
        finally:
            self._thread.calls = None
            if calls:  # interrupted, by Ctrl-C for example: the next one who comes by does it
                with self._lock:
                    self._put_off[:0] = calls
