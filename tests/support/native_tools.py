"""The extension as it is, without the engine: memory, pools, operations and rows."""

import contextlib
import ctypes
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

PATIENCE_S = 30.0
BLOCK = 4096
MEMBER_BYTES = 64 * BLOCK
MARK = 0xA5

BUFFER, MEMBER, ALIGNMENT = -1, -2, -3  # refusals


class GuardedMemory:
    """Pages of which the last is followed by one that nobody may touch.

    Attributes
    ----------
    address, size : int
        Of what may be used.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size + BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        at = ctypes.c_void_p(self.address + size)
        assert libc.mprotect(at, ctypes.c_size_t(BLOCK), 0) == 0, os.strerror(ctypes.get_errno())
        self.fill()

    def fill(self) -> None:
        self._map[: self.size] = bytes([MARK]) * self.size

    @property
    def untouched(self) -> bool:
        return self._map[: self.size] == bytes([MARK]) * self.size

    def __getitem__(self, place: slice) -> bytes:
        return self._map[place]


@dataclass(frozen=True)
class Operation:
    """What C is asked to do; fields in the order of ``submit``."""

    ticket: int
    fd: int
    write: bool
    address: int
    room: int
    length: int
    padded: int
    offset: int
    max_io: int = 4 * BLOCK
    align: int = BLOCK

    @property
    def fields(self) -> tuple[int | bool, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def row(self, pool: int = 0, expected: int = 0) -> list[int]:
        """As a row of a batch."""
        return [
            pool,
            self.fd,
            self.address,
            self.room,
            self.length,
            self.padded,
            self.offset,
            self.max_io,
            self.align,
            expected,
        ]

    def but(self, **changes: Any) -> "Operation":
        return replace(self, **changes)


def table(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.uint64]:
    """Rows as numbers without a sign: a negative one becomes huge."""
    return np.array([[value % 2**64 for value in row] for row in rows], np.uint64)


Arrived = list[tuple[int, int, int]]


@dataclass
class Bench:
    """A module, a member file, and pools whose completions are taken by hand."""

    native: ModuleType
    path: Path
    fd: int
    event_fd: int
    pools: list[object] = field(default_factory=list)

    def open(self, threads: int = 2, member_bytes: int = MEMBER_BYTES) -> object:
        pool = self.native.open_pool(threads, 1 << 20, self.event_fd, member_bytes)
        self.pools.append(pool)
        return pool

    def read(self, memory: GuardedMemory, ticket: int = 1, offset: int = 0) -> Operation:
        size = memory.size
        return Operation(ticket, self.fd, False, memory.address, size, size, size, offset)

    def reads(self, memory: GuardedMemory) -> list[Operation]:
        """Read the first block of the member, into each block of the memory."""
        places = range(memory.address, memory.address + memory.size, BLOCK)
        sizes = (BLOCK, BLOCK, BLOCK)
        return [Operation(n, self.fd, False, at, *sizes, 0) for n, at in enumerate(places)]

    def wait(self, pool: object, count: int) -> Arrived:
        """Wait until so many operations have come back."""
        arrived: Arrived = []
        until = time.monotonic() + PATIENCE_S
        while len(arrived) < count:
            assert time.monotonic() < until, f"{len(arrived)} of {count} came back"
            select.select([self.event_fd], [], [], 0.05)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.event_fd)
            self.native.drain(pool, arrived)
        return arrived

    def close(self) -> None:
        for pool in self.pools:
            self.native.close_pool(pool)
        self.pools.clear()
        os.close(self.fd)
        os.close(self.event_fd)


def content(offset: int, length: int) -> bytes:
    """Bytes of the member file."""
    blocks = range(offset // BLOCK, -(-(offset + length) // BLOCK))
    return b"".join(bytes([block % 251]) * BLOCK for block in blocks)[:length]


@contextlib.contextmanager
def bench(native: ModuleType, path: Path) -> Iterator[Bench]:
    """Make a bench over a new file."""
    path.write_bytes(content(0, MEMBER_BYTES))
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    made = Bench(native, path, fd, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    try:
        yield made
    finally:
        made.close()


def eventually(condition: Callable[[], object]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True
