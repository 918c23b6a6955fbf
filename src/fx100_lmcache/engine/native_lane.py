"""The native lane: the same work as the Python lane, without the interpreter's lock.

In a process whose Python threads are busy, every return from a system call must win the GIL
again. A pool in C need not, and hashes each part while it is still in the CPU's cache. Figures:
docs/performance.md, "Native pools". What may be freed when is said in ``_pool.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import itertools
import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Protocol

from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.engine.lane import Finish
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.geometry import round_up

log = logging.getLogger(__name__)

BATCH_BITS = 24  # of a ticket count the reads of a batch, those above say which batch

_LOOK_MS = 1000  # between two looks that nobody asked for
_AGAIN_MS = 100  # where memory lacked, or after close, when the pools do not call any more
_NO_TICKET = -1  # of a transfer that could not be queued

_REFUSALS = {  # refusal_t in _pool.h, and what the kernel says of memory that is not there
    -1: "it would leave its buffer",
    -2: "it would leave its member",
    -3: "it is not made of whole blocks",
    errno.EFAULT: "its buffer is not mapped",
}

_XXH3 = ("createState", "freeState", "64bits_reset", "64bits_update", "64bits_digest")


@lru_cache(maxsize=1)
def _native() -> ModuleType | None:
    """Load the extension and give it xxh3; None, with the reason logged, when that fails."""
    try:
        module = importlib.import_module("fx100_lmcache.engine._native")
    except ImportError as problem:
        log.warning("native engine not built, using Python threads: %s", problem)
        return None
    for library in (_xxhash_extension(), "libxxhash.so.0"):
        with contextlib.suppress(OSError, AttributeError):
            loaded = ctypes.CDLL(library)
            module.use_hasher(*(_address(loaded, f"XXH3_{name}") for name in _XXH3))
            return module
    log.warning("native engine needs libxxhash.so.0 (package libxxhash0), using Python threads")
    return None


def _address(library: ctypes.CDLL, name: str) -> int:
    """Address of a function, in its variant for this CPU where the library has one."""
    try:
        found = library[f"{name}_dispatch"]  # AVX2 or AVX-512 where the CPU has them
    except AttributeError:
        found = library[name]
    address = ctypes.cast(found, ctypes.c_void_p).value
    assert address is not None
    return address


def _xxhash_extension() -> str:
    return str(importlib.import_module("xxhash._xxhash").__file__)


def native_available() -> bool:
    """Whether native lanes can be used in this installation."""
    return _native() is not None


class TransferRefusedError(Exception):
    """A transfer that must not be made: our fault, and none of its member."""


class NativeReaper:
    """One thread that takes finished operations from all pools back into Python.

    It goes on after :meth:`close` for as long as the kernel has something of a lane.
    """

    def __init__(self, defects: Defects) -> None:
        self._defects = defects
        self._lanes: list[NativeLane] = []
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fx100-reaper", daemon=True)
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._event_fd)
            raise

    def open_pool(self, lane: NativeLane, threads: int, in_flight_bytes: int) -> None:
        """Give ``lane`` a pool; its completions come to that lane."""
        with self._lock:
            if self._closing:
                raise OSError(errno.ESHUTDOWN, "the engine is being closed")
            lane.pool = lane.module.open_pool(
                threads, in_flight_bytes, self._event_fd, lane.member_bytes
            )
            try:
                self._lanes.append(lane)
            except BaseException:
                lane.module.close_pool(lane.pool)
                raise

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._event_fd, select.POLLIN)
        wait_ms = _LOOK_MS
        while not self._closing or self._lanes:
            poll.poll(wait_ms)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
            wait_ms = _AGAIN_MS
            # want of memory: what has ended stays in the pools until the next time
            with self._defects.guard("completions could not be taken"):
                wait_ms = self._drain_all()
        with self._lock:  # close() may be about to write
            os.close(self._event_fd)  # closed pools do not signal any more

    def _drain_all(self) -> int:
        """Report what has finished; return after how many milliseconds to look without a call."""
        whole = True
        for lane in list(self._lanes):
            whole &= lane.drain()
            if lane.finished:
                self._lanes.remove(lane)
        return _AGAIN_MS if self._closing or not whole else _LOOK_MS

    def close(self) -> None:
        """Stop the thread as soon as the pools, which were closed, have nothing left."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._event_fd, 1)


class Concludes(Protocol):
    """A batch, as far as a lane has to know it."""

    def conclude(self) -> object:
        """Look at what has ended; what has not, or not well, becomes a transfer of the lane."""
        ...


class NativeLane:
    """Moves aligned transfers of one member with threads in C.

    Attributes
    ----------
    batches : dict
        Batches with reads in this lane's pool, by number.
    """

    def __init__(
        self,
        member: Member,
        threads: int,
        in_flight_bytes: int,
        max_io_bytes: Callable[[], int],
        finish: Finish,
        reaper: NativeReaper,
        defects: Defects,
    ) -> None:
        module = _native()
        assert module is not None
        self.module = module
        self.batches: dict[int, Concludes] = {}
        self._member = member
        self._max_io_bytes = max_io_bytes
        self._finish = finish
        self._defects = defects
        self._closed = False
        self._tickets = itertools.count(1)
        self._open: dict[int, Transfer] = {}
        self._arrived: list[tuple[int, int, int]] = []  # tickets, errors and checksums
        self.pool: object = None
        reaper.open_pool(self, threads, in_flight_bytes)

    def fileno(self) -> int:
        """Descriptor of the member; -1 once it is closed."""
        fd = self._member.fileno()
        return -1 if fd is None else fd

    @property
    def member_bytes(self) -> int:
        """Capacity of the member: no transfer gets beyond."""
        return self._member.size_bytes

    @property
    def align_bytes(self) -> int:
        """Unit of every transfer, in memory and on the member."""
        return self._member.logical_block_bytes

    @property
    def max_io_bytes(self) -> int:
        """The largest call that the member takes at present."""
        return self._max_io_bytes()

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Queue transfers; all of them or, if it raises, none."""
        operations = []
        try:
            fd, align, limit = self.fileno(), self.align_bytes, self.max_io_bytes
            for transfer in transfers:
                ticket = transfer.ticket = next(self._tickets)
                self._open[ticket] = transfer
                buffer, padded = transfer.buffer, round_up(transfer.length, align)
                if transfer.job.write and padded > transfer.length:
                    end = transfer.start + transfer.length
                    buffer.view[end : transfer.start + padded] = bytes(padded - transfer.length)
                operations.append(
                    (
                        ticket,
                        fd,
                        transfer.job.write,
                        buffer.address + transfer.start,
                        len(buffer.view) - transfer.start,
                        transfer.length,
                        padded,
                        transfer.offset,
                        transfer.max_io_bytes or limit,
                        align,
                    )
                )
            self.module.submit(self.pool, operations)
        except BaseException:
            for transfer in transfers:
                self._open.pop(transfer.ticket, None)
                transfer.ticket = _NO_TICKET
            raise

    def wake(self) -> None:
        """Start on the reads of batches."""
        self.module.wake(self.pool)

    def adopt(self, transfer: Transfer, ticket: int) -> None:
        """Report a transfer that is in the pool already, under its ticket."""
        self._open[ticket] = transfer
        transfer.ticket = ticket

    def cancel(self, transfer: Transfer) -> bool:
        """Take a transfer back if it is still queued, or could not be."""
        if transfer.ticket == _NO_TICKET:
            return True
        taken: bool = self.module.cancel(self.pool, transfer.ticket)
        if taken:
            self._open.pop(transfer.ticket, None)
        return taken

    @property
    def finished(self) -> bool:
        """Whether the lane was closed and the kernel has nothing of it any more."""
        return self._closed and self.idle

    def drain(self) -> bool:
        """Report what has finished; False if something must be tried again.

        Raises
        ------
        MemoryError
            With nothing lost: what has ended stays in the pool, or in the lane, for the next call.
        """
        arrived, kept = self._arrived, 0
        self.module.drain(self.pool, arrived)
        for found in arrived:
            with self._defects.guard("a completion was not reported yet") as failed:
                self._tell(*found)
            if failed.cause is not None:  # want of memory: its batch could not be taken apart
                arrived[kept] = found
                kept += 1
        del arrived[kept:]
        return not kept

    def _tell(self, ticket: int, code: int, checksum: int) -> None:
        batch = self.batches.get(ticket >> BATCH_BITS)
        if batch is not None:
            batch.conclude()
        transfer = self._open.get(ticket)
        if transfer is None:
            return  # its batch has reported the read already
        outcome = Status.OK
        problem = self._explain(code, transfer) if code else None
        if problem is not None:
            outcome = Status.ERROR
        elif transfer.expected is not None and transfer.expected != checksum:
            outcome = Status.MISMATCH
        del self._open[ticket]  # first, since it may be queued again
        self._finish(transfer, outcome, checksum, problem)

    def _explain(self, code: int, transfer: Transfer) -> Exception:
        if code in _REFUSALS:
            where = f"{transfer.length} bytes at {transfer.offset} of {self._member.name}"
            return TransferRefusedError(f"{where}: {_REFUSALS[code]}")
        if code == errno.ENODEV:
            where = f"{self._member.name} moved nothing at {transfer.offset}; is it gone?"
            return OSError(code, where)
        return OSError(code, os.strerror(code))

    @property
    def open_transfers(self) -> int:
        """How many transfers are queued or in the kernel; a batch counts as one."""
        return len(self._open) + len(self.batches)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in the kernel."""
        return not self._open and not self.batches

    def close(self) -> None:
        """Stop the threads as soon as each is idle."""
        self._closed = True
        self.module.close_pool(self.pool)
