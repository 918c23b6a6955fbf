"""Page-aligned memory for direct I/O."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator

from fx100_lmcache.engine.jobs import IoBuffer


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
