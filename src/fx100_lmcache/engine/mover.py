"""How one transfer is made in Python: whole, aligned, and hashed."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable

import xxhash

from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.geometry import round_up


class Mover:
    """Moves one transfer after the other; for one thread.

    Parameters
    ----------
    max_io_bytes : callable
        The largest call that the member takes at present.
    """

    def __init__(self, member: Member, max_io_bytes: Callable[[], int]) -> None:
        self._member = member
        self._max_io_bytes = max_io_bytes
        self._bounce: mmap.mmap | None = None

    def move(self, transfer: Transfer) -> int:
        """Move a transfer, through a buffer of ours if its own is not aligned.

        Returns
        -------
        int
            xxh3-64 of its bytes.

        Raises
        ------
        OSError
            If the member fails, or moves nothing.
        """
        align = self._member.logical_block_bytes
        if transfer.buffer.fits_directly(transfer.start, transfer.length, align):
            return self._move_direct(transfer)
        return self._move_bounced(transfer)

    def _move_direct(self, transfer: Transfer) -> int:
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

    def _move_bounced(self, transfer: Transfer) -> int:
        """Move through a buffer of ours; what is hashed is what is on the media."""
        hasher = xxhash.xxh3_64()
        align = self._member.logical_block_bytes
        with memoryview(self._sized()) as whole:
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

    def _sized(self) -> mmap.mmap:
        # a shared mapping: direct I/O and fork do not mix on private pages
        size = round_up(self._max_io_bytes(), os.sysconf("SC_PAGE_SIZE"))
        if self._bounce is None or len(self._bounce) < size:
            self._bounce = mmap.mmap(-1, size)
        return self._bounce


def outcome_of(transfer: Transfer, checksum: int) -> Status:
    """Judge a transfer that was made by the checksum of what was moved."""
    wrong = transfer.expected is not None and transfer.expected != checksum
    return Status.MISMATCH if wrong else Status.OK
