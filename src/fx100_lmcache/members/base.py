"""What the engine asks of a stripe member."""

from __future__ import annotations

from typing import Protocol


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
