"""A thread that renews the claims, for as long as there is something to renew."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

_AFTER_A_FAILURE_S = 1.0


class Beating(Protocol):
    """What has to be done again and again."""

    def beat(self) -> float | None:
        """Do it once; return seconds until the next time, None when there is to be none."""
        ...

    def beat_failed(self, problem: Exception) -> None:
        """Note an exception of :meth:`beat`, which is called again all the same."""
        ...


class Heartbeat:
    """Calls ``owner.beat`` on a thread of its own.

    It does not keep the owner alive, and ends by itself when that is gone. A forked child has no
    such thread.
    """

    def __init__(self, owner: Beating) -> None:
        self._owner = weakref.ref(owner)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fx100-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin, with the first call at once.

        Raises
        ------
        RuntimeError
            If there are no threads.
        """
        self._thread.start()

    def stop(self) -> None:
        """Make no further call; does not wait for one that is under way."""
        self._stopped.set()

    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def _run(self) -> None:
        delay_s: float | None = 0.0
        while delay_s is not None and not self._stopped.wait(delay_s):
            delay_s = self._call()

    def _call(self) -> float | None:
        owner = self._owner()
        if owner is None:
            return None
        try:
            return owner.beat()
        except Exception as problem:  # noqa: BLE001 - whatever it is, claims must be renewed
            owner.beat_failed(problem)
            return _AFTER_A_FAILURE_S
