"""Memory between pages that nobody may touch: one byte too far ends the process."""

from __future__ import annotations

import ctypes
import mmap
import os

from fx100_lmcache.buffers import IoBuffer, address_of
from fx100_lmcache.ondisk.geometry import round_up

_PAGE = mmap.PAGESIZE
_CANARY = 0xA5
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class GuardedBuffer:
    """A buffer that ends where a forbidden page begins.

    Parameters
    ----------
    size_bytes : int
        Bytes that belong to the caller; where they begin follows from where they end. The rest
        of their first page is filled, and :meth:`intact` says whether it is as it was.

    Attributes
    ----------
    buffer : IoBuffer
        The caller's bytes.
    """

    def __init__(self, size_bytes: int) -> None:
        inner = round_up(max(size_bytes, 1), _PAGE)
        self._slack = inner - size_bytes
        self._pages = mmap.mmap(-1, inner + 2 * _PAGE)
        start = address_of(self._pages)
        whole = memoryview(self._pages)
        whole[_PAGE : _PAGE + self._slack] = bytes([_CANARY]) * self._slack
        self._before = whole[_PAGE : _PAGE + self._slack]
        view = whole[_PAGE + self._slack : _PAGE + inner]
        self.buffer = IoBuffer(view, size_bytes, start + _PAGE + self._slack)
        for page in (start, start + _PAGE + inner):
            if _libc.mprotect(ctypes.c_void_p(page), _PAGE, _PROT_NONE):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    @property
    def intact(self) -> bool:
        """Whether nothing was written before the buffer."""
        return bytes(self._before) == bytes([_CANARY]) * self._slack
