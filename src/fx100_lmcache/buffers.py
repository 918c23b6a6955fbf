"""Memory for I/O: what a caller owns, and page-aligned buffers for direct I/O."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from fx100_lmcache.ondisk.geometry import round_up


@dataclass(slots=True)
class IoBuffer:
    """Memory of a caller.

    Attributes
    ----------
    view : memoryview
        All bytes that belong to the object, alignment padding included.
    length : int
        The first bytes of it that count.
    address : int
        Where the view starts, for alignment and for native engines.
    """

    view: memoryview
    length: int
    address: int

    def fits_directly(self, start: int, length: int, align: int) -> bool:
        """Whether a transfer can use bytes from ``start`` on without a bounce buffer."""
        aligned = (self.address + start) % align == 0
        return aligned and start + round_up(length, align) <= len(self.view)


def address_of(buffer: mmap.mmap) -> int:
    """Where a mapping starts."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@contextlib.contextmanager
def aligned_buffer(size_bytes: int) -> Iterator[memoryview]:
    """Lend zeroed, page-aligned memory."""
    # a shared mapping: direct I/O and fork do not mix on private pages
    with mmap.mmap(-1, size_bytes) as pages, memoryview(pages) as view:
        yield view


def zero_buffer(size_bytes: int) -> IoBuffer:
    """Return a page-aligned buffer of zeros that lives as long as the result."""
    pages = mmap.mmap(-1, size_bytes)
    return IoBuffer(memoryview(pages), size_bytes, address_of(pages))


def return_memory() -> None:
    """Give free memory back to the system, after work that took much for a short time.

    glibc keeps what threads have freed: after recovery of a million entries as much again as
    the catalog takes.
    """
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


class BufferPool:
    """Small aligned buffers of one size, reused. Thread-safe.

    It grows with the number of buffers out at once and never shrinks; inode writes in flight
    are bounded by the store's limit on writes.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[IoBuffer] = []
        self._lock = threading.Lock()

    def take(self) -> IoBuffer:
        """Lend a buffer; its contents are undefined."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return zero_buffer(self._size_bytes)

    def give_back(self, buffer: IoBuffer) -> None:
        """Return a buffer that no transfer uses any more."""
        with self._lock:
            self._free.append(buffer)
