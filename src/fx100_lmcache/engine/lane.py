"""A lane: threads that move the transfers of one member in one direction.

This is the plain Python lane: correct everywhere, also with unaligned buffers (through a bounce
buffer of each thread's own), and what the native lane is tested against.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.engine.mover import Mover, outcome_of
from fx100_lmcache.members.base import Member

Finish = Callable[[Transfer, Status, int, "Exception | None"], None]
"""Told the fate of a transfer, its checksum, and what went wrong. Never raises."""


class Lane(Protocol):
    """Moves transfers of one member."""

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Queue transfers. If it raises, those that were not queued can be cancelled."""
        ...

    def cancel(self, transfer: Transfer) -> bool:
        """Take a transfer back if it has not been started; its job's lock is held."""
        ...

    @property
    def open_transfers(self) -> int:
        """How many transfers are queued or in the kernel."""
        ...

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in the kernel."""
        ...

    def close(self) -> None:
        """Ask the threads to stop; do not wait for any that the kernel holds."""
        ...


class PythonLane:
    """Daemon threads with one queue.

    Parameters
    ----------
    max_io_bytes : callable
        The largest transfer that the member takes at present.
    finish : callable
        Told the fate of every transfer that was not cancelled.
    """

    def __init__(
        self,
        member: Member,
        threads: int,
        max_io_bytes: Callable[[], int],
        finish: Finish,
        name: str,
    ) -> None:
        self._member = member
        self._max_io_bytes = max_io_bytes
        self._finish = finish
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Queue transfers."""
        for transfer in transfers:
            self._count(1)  # before it can be taken: what is open is never seen as idle
            try:
                self._queue.put(transfer)
            except BaseException:
                self._count(-1)
                raise

    def cancel(self, transfer: Transfer) -> bool:
        """Take a transfer back unless a thread has started it."""
        return not transfer.started

    @property
    def open_transfers(self) -> int:
        """How many transfers are queued or in the kernel, those cancelled in the queue too."""
        return self._open

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in the kernel."""
        return not self._open

    def close(self) -> None:
        """Send every thread home."""
        for _ in self._threads:
            self._queue.put(None)

    def _count(self, more: int) -> None:
        with self._lock:
            self._open += more

    def _run(self) -> None:
        mover = Mover(self._member, self._max_io_bytes)
        while (transfer := self._queue.get()) is not None:
            with transfer.job.lock:
                transfer.started = mine = transfer.status is Status.PENDING
            if mine:
                self._serve(transfer, mover)
            self._count(-1)
            del transfer  # an idle thread must not keep the caller's memory

    def _serve(self, transfer: Transfer, mover: Mover) -> None:
        """Move a transfer and report it."""
        checksum, problem = 0, None
        try:
            checksum = mover.move(transfer)
            outcome = outcome_of(transfer, checksum)
        except Exception as error:  # noqa: BLE001 - told to the engine
            outcome, problem = Status.ERROR, error
        self._finish(transfer, outcome, checksum, problem)
