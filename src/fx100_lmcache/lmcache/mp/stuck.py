"""The last resort when the kernel does not give a buffer of LMCache's back.

A load reads straight into LMCache's memory, so it is not reported while the kernel may still
write there. LMCache waits 600 s and then gives the memory to somebody else, whose data would be
overwritten. Before that, the process must end.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

EXIT_GRACE_S = 10.0


def terminate_process() -> None:
    """End this process: politely, and after 10 s in any case."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_GRACE_S)
    os._exit(1)


class StuckWatch:
    """Watches how long loads take.

    Parameters
    ----------
    limit_s : float
        A load older than this is stuck: its deadline passed long ago, and only the kernel
        keeps it.
    culprits : callable
        Names of the members that keep it.
    terminate : callable
        Called once, on a thread of the watch's own.
    """

    def __init__(
        self,
        limit_s: float,
        culprits: Callable[[], list[str]],
        terminate: Callable[[], None],
    ) -> None:
        self._limit_s = limit_s
        self._culprits = culprits
        self._terminate = terminate
        self._started: dict[int, float] = {}
        self._ended = threading.Event()
        self.escalated = False
        self._thread = threading.Thread(target=self._run, name="fx100-stuck", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def begin(self, task: int) -> None:
        """Note that a load was submitted."""
        self._started[task] = time.monotonic()

    def end(self, task: int) -> None:
        """Note that the kernel is done with it."""
        self._started.pop(task, None)

    @property
    def open_loads(self) -> int:
        """Loads in flight."""
        return len(self._started)

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._limit_s / 10)):
            oldest = min(list(self._started.values()), default=None)
            if oldest is not None and time.monotonic() - oldest > self._limit_s:
                self._escalate(time.monotonic() - oldest)
                return

    def _escalate(self, age_s: float) -> None:
        self.escalated = True
        try:
            names = ", ".join(self._culprits()) or "unknown members"
        except Exception:  # nothing may keep the process alive now
            log.exception("the members could not be asked")
            names = "unknown members"
        log.critical(
            "a load has been in the kernel for %.0f s (%s). LMCache is about to reuse the memory "
            "that it writes to, so this server ends now. Reset or disconnect the controller "
            "(`nvme reset`, `nvme disconnect`), set fast_io_fail_tmo to 5 s or less, and start "
            "the server again",
            age_s,
            names,
        )
        self._terminate()
