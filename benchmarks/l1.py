"""LMCache's host memory (L1) as a benchmark needs it: one arena that several processes map.

The children of a benchmark run one at a time, so they share the memory. Every page carries a
stamp, from which a wrong, stale or missing byte range of a chunk is seen.
"""

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

PAGE_BYTES = 4096


class Arena:
    """Slots for chunks of one size in a memory file.

    Parameters
    ----------
    path : Path
        A file on a tmpfs; made when absent.
    slots : int
        Chunks that fit at the same time.
    """

    def __init__(self, path: Path, slots: int, chunk_bytes: int) -> None:
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.stride_bytes = -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, slots * self.stride_bytes)
            self._pages = mmap.mmap(fd, slots * self.stride_bytes)
        finally:
            os.close(fd)
        self._bytes = np.frombuffer(self._pages, np.uint8)
        self._words = self._bytes.view(np.uint64).reshape(slots, -1)

    @property
    def address(self) -> int:
        """Where the arena starts in this process."""
        return int(self._bytes.ctypes.data)

    @property
    def size_bytes(self) -> int:
        """Size of the whole arena."""
        return self.slots * self.stride_bytes

    def stamp(self, slot: int, chunk: int) -> None:
        """Make the slot's contents that of a chunk: its number in every page."""
        self._words[slot, :: PAGE_BYTES // 8] = self._stamps(chunk)

    def fill(self) -> None:
        """Put random bytes between the stamps, once."""
        block = np.frombuffer(os.urandom(1 << 20), np.uint8)
        for at in range(0, len(self._bytes), len(block)):
            part = self._bytes[at : at + len(block)]
            part[:] = block[: len(part)]

    def erase(self, slot: int) -> None:
        """Take the stamps away."""
        self._words[slot, :: PAGE_BYTES // 8] = 0

    def holds(self, slot: int, chunk: int) -> bool:
        """Whether every page of a slot carries the stamp of this chunk."""
        return bool(np.array_equal(self._words[slot, :: PAGE_BYTES // 8], self._stamps(chunk)))

    def _stamps(self, chunk: int) -> Any:
        pages = self.stride_bytes // PAGE_BYTES
        return np.arange(pages, dtype=np.uint64) + np.uint64((chunk + 1) << 24)

    def memory_object(self, slot: int) -> Any:
        """Return the slot as LMCache's L1 would lend it to an adapter."""
        import torch
        from lmcache.v1.memory_management import (
            MemoryFormat,
            MemoryObjMetadata,
            TensorMemoryObj,
        )

        at = slot * self.stride_bytes
        raw = torch.from_numpy(self._bytes)[at : at + self.chunk_bytes]
        shape = torch.Size([self.chunk_bytes // 2])
        meta = MemoryObjMetadata(
            shape=shape,
            dtype=torch.bfloat16,
            address=at,
            phy_size=self.stride_bytes,
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[shape],
            dtypes=[torch.bfloat16],
        )
        return TensorMemoryObj(raw, meta, parent_allocator=None)

    def describe(self) -> Any:
        """Return what LMCache tells an adapter about its L1."""
        from lmcache.v1.distributed.internal_api import L1MemoryDesc

        return L1MemoryDesc(self.address, self.size_bytes, PAGE_BYTES, self.size_bytes)
