"""A member in memory that records every write and can do everything a device does wrong."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fx100_lmcache.testing.inline import Stalled

THIN_UNIT_BYTES = 4096
"""What a thin member gets from below at a time."""


@dataclass(frozen=True, slots=True)
class Event:
    """One write (``data``) or one flush (``data`` is None) of a member."""

    member: int
    offset: int
    data: bytes | None


@dataclass(slots=True)
class Journal:
    """All writes and flushes of a set of members, in the order they were made."""

    events: list[Event] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.events)


@dataclass(slots=True)
class Fault:
    """What goes wrong with one kind of access.

    Attributes
    ----------
    kind : str
        ``error``, ``short``, ``stall``, ``flip`` (reads: one bit differs), ``lost`` (a write
        that never reaches the media), ``misdirected`` (it lands ``shift_bytes`` further on),
        ``stale`` (a read returns what was there before the last write), ``torn`` (a write stops
        after ``value`` bytes, and then the device fails), ``unreadable`` (every read that touches
        the bytes from ``first_byte`` to ``last_byte`` fails).
    on : str
        ``read`` or ``write``.
    after, times : int
        Skip this many matching accesses, then strike this many.
    value : int
        Errno of ``error``, bytes of ``short`` and ``torn``, bit number of ``flip``, bytes of
        ``misdirected``.
    """

    kind: str
    on: str
    after: int = 0
    times: int = 1
    value: int = 0
    first_byte: int = 0
    last_byte: int = 1 << 62

    def strikes(self, on: str, offset: int, length: int) -> bool:
        """Count one access; True if it is to go wrong."""
        if self.kind == "unreadable":
            return on == self.on and offset <= self.last_byte and self.first_byte < offset + length
        if on != self.on or not self.first_byte <= offset <= self.last_byte or self.times <= 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        return True


class MemoryMember:
    """A member in memory.

    Parameters
    ----------
    size_bytes : int
        Capacity.
    block : int
        Logical block size; unaligned access fails with EINVAL, as on a device.
    index : int
        Its number in the journal.
    max_io_bytes : int
        Larger calls fail with ``too_large_errno``.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        block: int = 512,
        index: int = 0,
        name: str = "",
        journal: Journal | None = None,
        max_io_bytes: int = 1 << 62,
        too_large_errno: int = errno.EINVAL,
    ) -> None:
        self.name = name or f"memory{index}"
        self.size_bytes = size_bytes
        self.logical_block_bytes = block
        self.io_mode = "memory"
        self.index = index
        self.media = bytearray(size_bytes)
        self.journal = journal
        self.faults: list[Fault] = []
        self.gone = False
        self.room_bytes: int | None = None
        self._backed: set[int] = set()
        self.calls: deque[tuple[str, int, int]] = deque(maxlen=10_000)
        self._max_io_bytes = max_io_bytes
        self._too_large_errno = too_large_errno
        self._before: dict[int, bytes] = {}
        self._locked_by: dict[tuple[int, int], object] = {}

    def fileno(self) -> int | None:
        """Return None: there is no descriptor."""
        return None

    def make_thin(self, room_bytes: int) -> None:
        """Have only so much space for what was never written so far, as in a thin pool.

        ``room_bytes`` says what is left of it, and may be raised again.
        """
        self.room_bytes = room_bytes
        self._backed = {start // THIN_UNIT_BYTES for start in self._before}

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read, with what may go wrong."""
        self._check("read", offset, len(buffer))
        if self.gone:
            return 0  # as a real device does after `nvme disconnect`
        data = bytearray(self.media[offset : offset + len(buffer)])
        count = len(data)
        for fault in self._striking("read", offset, len(buffer)):
            if fault.kind in ("error", "unreadable"):
                raise OSError(fault.value or errno.EIO, "injected read error")
            if fault.kind == "stall":
                raise Stalled
            if fault.kind == "short":
                count = fault.value
            elif fault.kind == "flip":
                data[fault.value // 8 % len(data)] ^= 1 << fault.value % 8
            elif fault.kind == "stale":
                data[: len(data)] = self._as_before(offset, data)
        buffer[:count] = data[:count]
        return count

    def write_from(self, offset: int, buffer: memoryview) -> int:
        """Write, with what may go wrong."""
        self._check("write", offset, len(buffer))
        if self.gone:
            raise OSError(errno.ENOSPC, "device is gone")  # as a real one does
        data, at, count = bytes(buffer), offset, len(buffer)
        if self.room_bytes is not None:
            count = self._backed_part(offset, count)
            data = data[:count]
        for fault in self._striking("write", offset, len(buffer)):
            if fault.kind == "error":
                raise OSError(fault.value or errno.EIO, "injected write error")
            if fault.kind == "stall":
                raise Stalled
            if fault.kind == "short":
                data, count = data[: fault.value], fault.value
            elif fault.kind == "torn":
                self._apply(at, data[: fault.value])
                raise OSError(errno.EIO, "injected torn write")
            elif fault.kind == "lost":
                data = b""
            elif fault.kind == "misdirected":
                at += fault.value
        if data:
            self._apply(at, data)
        return count

    def flush(self) -> None:
        """Record a flush."""
        if self.journal is not None:
            self.journal.events.append(Event(self.index, 0, None))

    def try_lock(self, offset: int, length: int) -> bool:
        """Grant every lock: within one process there is one owner."""
        return True

    def close(self) -> None:
        """Nothing to close."""

    def _check(self, what: str, offset: int, length: int) -> None:
        self.calls.append((what, offset, length))
        block = self.logical_block_bytes
        if offset % block or length % block or offset + length > self.size_bytes:
            raise OSError(errno.EINVAL, f"unaligned or outside: {length} bytes at {offset}")
        if length > self._max_io_bytes:
            raise OSError(self._too_large_errno, f"{length} bytes in one call")

    def _backed_part(self, offset: int, length: int) -> int:
        """Get space from below; return for how many bytes there is some."""
        assert self.room_bytes is not None
        for unit in range(offset // THIN_UNIT_BYTES, -(-(offset + length) // THIN_UNIT_BYTES)):
            if unit in self._backed:
                continue
            if self.room_bytes < THIN_UNIT_BYTES:
                there = unit * THIN_UNIT_BYTES - offset
                if there <= 0:
                    raise OSError(errno.ENOSPC, "no space below")
                return there
            self.room_bytes -= THIN_UNIT_BYTES
            self._backed.add(unit)
        return length

    def _striking(self, on: str, offset: int, length: int) -> list[Fault]:
        return [fault for fault in self.faults if fault.strikes(on, offset, length)]

    def _apply(self, at: int, data: bytes) -> None:
        block = self.logical_block_bytes
        for start in range(at, at + len(data), block):
            self._before[start] = bytes(self.media[start : start + block])
        self.media[at : at + len(data)] = data
        if self.journal is not None:
            self.journal.events.append(Event(self.index, at, data))

    def _as_before(self, offset: int, now: bytearray) -> bytes:
        block = self.logical_block_bytes
        parts = [
            self._before.get(start, bytes(now[start - offset : start - offset + block]))
            for start in range(offset, offset + len(now), block)
        ]
        return b"".join(parts)


def memory_members(
    count: int, size_bytes: int | Sequence[int], *, block: int = 512, journal: Journal | None = None
) -> list[MemoryMember]:
    """Make members of one size, or of the sizes given."""
    sizes = [size_bytes] * count if isinstance(size_bytes, int) else list(size_bytes)
    return [
        MemoryMember(size, block=block, index=index, journal=journal)
        for index, size in enumerate(sizes)
    ]
