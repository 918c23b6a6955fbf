"""A lane: threads that move the transfers of one member in one direction.

This is the plain Python lane: correct everywhere, also with unaligned buffers (through a bounce
buffer of each thread's own), and what the native lane is tested against.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.geometry import round_up

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
        bounce: mmap.mmap | None = None
        while (transfer := self._queue.get()) is not None:
            with transfer.job.lock:
                transfer.started = mine = transfer.status is Status.PENDING
            if mine:
                bounce = self._serve(transfer, bounce)
            self._count(-1)
            del transfer  # an idle thread must not keep the caller's memory

    def _serve(self, transfer: Transfer, bounce: mmap.mmap | None) -> mmap.mmap | None:
        """Move a transfer and report it; return the bounce buffer for the next one."""
        try:
            if _is_direct(transfer, self._member.logical_block_bytes):
                checksum = self._move(transfer)
            else:
                bounce = self._sized(bounce)
                checksum = self._move_bounced(transfer, bounce)
            outcome, problem = Status.OK, None
            if transfer.expected is not None and transfer.expected != checksum:
                outcome = Status.MISMATCH
        except Exception as error:  # noqa: BLE001 - told to the engine
            outcome, checksum, problem = Status.ERROR, 0, error
        self._finish(transfer, outcome, checksum, problem)
        return bounce

    def _move(self, transfer: Transfer) -> int:
        """Move straight between the member and the caller's buffer."""
        align = self._member.logical_block_bytes
        end = transfer.start + transfer.length
        padded = round_up(transfer.length, align)
        view = transfer.buffer.view[transfer.start : transfer.start + padded]
        payload = transfer.buffer.view[transfer.start : end]
        if transfer.job.write:
            checksum = xxhash.xxh3_64_intdigest(payload)
            if padded > transfer.length:
                view[transfer.length :] = bytes(padded - transfer.length)
            self._transfer(transfer, self._member.write_from, transfer.offset, view)
            return checksum
        self._transfer(transfer, self._member.read_into, transfer.offset, view)
        return xxhash.xxh3_64_intdigest(payload)

    def _move_bounced(self, transfer: Transfer, bounce: mmap.mmap) -> int:
        """Move through a buffer of ours; what is hashed is what is on the media."""
        hasher = xxhash.xxh3_64()
        align = self._member.logical_block_bytes
        with memoryview(bounce) as whole:
            done = 0
            while done < transfer.length:
                count = min(len(whole), transfer.length - done)
                part = whole[: round_up(count, align)]
                at, offset = transfer.start + done, transfer.offset + done
                if transfer.job.write:
                    part[:count] = transfer.buffer.view[at : at + count]
                    part[count:] = bytes(len(part) - count)
                    self._transfer(transfer, self._member.write_from, offset, part)
                else:
                    self._transfer(transfer, self._member.read_into, offset, part)
                hasher.update(part[:count])
                if not transfer.job.write:
                    with transfer.job.lock:
                        if not transfer.in_kernel:  # else the buffer went back to its owner
                            transfer.buffer.view[at : at + count] = part[:count]
                part.release()
                done += count
        return hasher.intdigest()

    def _transfer(
        self,
        transfer: Transfer,
        call: Callable[[int, memoryview], int],
        offset: int,
        view: memoryview,
    ) -> None:
        """Make ``call`` until all of ``view`` is moved, in parts the member takes."""
        limit = transfer.max_io_bytes or self._max_io_bytes()
        align = self._member.logical_block_bytes
        done = 0
        while done < len(view):
            asked = min(limit, len(view) - done)
            moved = call(offset + done, view[done : done + asked])
            if moved != asked:
                moved = moved // align * align  # resume on an aligned boundary
                if moved <= 0:
                    raise OSError(
                        errno.ENODEV,
                        f"{self._member.name} moved nothing at {offset + done}; is it gone?",
                    )
            done += moved

    def _sized(self, bounce: mmap.mmap | None) -> mmap.mmap:
        # a shared mapping: direct I/O and fork do not mix on private pages
        size = round_up(self._max_io_bytes(), os.sysconf("SC_PAGE_SIZE"))
        return bounce if bounce is not None and len(bounce) >= size else mmap.mmap(-1, size)


def _is_direct(transfer: Transfer, align: int) -> bool:
    return transfer.buffer.fits_directly(transfer.start, transfer.length, align)
