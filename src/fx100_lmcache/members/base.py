"""What the engine asks of a stripe member."""

from __future__ import annotations

import errno
from typing import Protocol

MEDIA_ERRORS = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO})
"""What Linux makes of a device's word that it cannot read; EIO may also be a lost path."""

NO_SPACE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""A write that the storage below had no room for; ENOSPC also comes from a device that is gone."""

_LARGEST_CALL_BYTES = 1024 * 1024  # larger ones are known to fail on some NVMe/TCP targets
_SMALLEST_CALL_BYTES = 128 * 1024


class Member(Protocol):
    """One stripe member.

    Offsets, lengths and buffer addresses given to the transfer methods are multiples of
    ``logical_block_bytes``. Transfers may come back short; none may be trusted to be whole.

    Attributes
    ----------
    name : str
        What an operator calls it: its path.
    size_bytes : int
        Capacity.
    logical_block_bytes : int
        Smallest unit of a transfer.
    io_mode : str
        The mode in force, read back and not assumed: ``direct``, ``buffered`` or ``memory``.
    """

    name: str
    size_bytes: int
    logical_block_bytes: int
    io_mode: str

    def fileno(self) -> int | None:
        """Return the file descriptor for transfers without the GIL, or None if there is none."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read at ``offset``; return the number of bytes, or raise OSError."""
        ...

    def write_from(self, offset: int, buffer: memoryview) -> int:
        """Write at ``offset``; return the number of bytes, or raise OSError."""
        ...

    def flush(self) -> None:
        """Make everything written so far survive a power cut, or raise OSError."""
        ...

    def try_lock(self, offset: int, length: int) -> bool:
        """Take the kernel's lock on a byte range for this open file; False if somebody has it."""
        ...

    def close(self) -> None:
        """Close the member and drop its locks. Idempotent."""
        ...


def read_whole(member: Member, offset: int, buffer: memoryview) -> None:
    """Fill a buffer, in calls that the member takes; short ones are resumed.

    For what is read outside the engine: labels, claims, inode tables.

    Raises
    ------
    OSError
        If the member refuses, or moves nothing.
    """
    limit, at = _LARGEST_CALL_BYTES, 0
    while at < len(buffer):
        with buffer[at : at + limit] as part:
            try:
                moved = member.read_into(offset + at, part)
            except OSError as problem:
                too_large = problem.errno in (errno.EIO, errno.EINVAL)
                if not too_large or min(limit, len(part)) <= _SMALLEST_CALL_BYTES:
                    raise
                limit //= 2
                continue
            if moved < len(part):
                moved -= moved % member.logical_block_bytes  # resume on an aligned boundary
        if moved <= 0:
            raise OSError(errno.ENODEV, f"{member.name} moved nothing at {offset + at}")
        at += moved
