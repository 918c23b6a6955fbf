"""LMCache's memory objects as the store sees them: bytes with an address, and a layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fx100_lmcache.buffers import IoBuffer
from fx100_lmcache.lmcache.compat.memory import MemoryObj
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope

if TYPE_CHECKING:  # in-process these need not be there
    from fx100_lmcache.lmcache.compat.mp import L1MemoryDesc, MemoryLayoutDesc

log = logging.getLogger(__name__)

Tensors = tuple[tuple[str, tuple[int, ...]], ...]
"""Dtype name and shape of each tensor group of an object."""


class _Span:
    """A stretch of memory for numpy, which keeps it, and so its owner, alive."""

    def __init__(self, address: int, length: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "|u1",
            "version": 3,
        }


def io_buffer(obj: MemoryObj) -> IoBuffer:
    """Describe an object's memory, without copying.

    The view spans the allocator's padding where the object owns it, so that an object whose
    size is no multiple of the device's blocks can still be moved directly.

    Raises
    ------
    ValueError
        If the bytes are not in host memory, or fewer than the object says.
    """
    length = int(obj.get_size())
    raw = obj.raw_data
    if isinstance(raw, torch.Tensor):
        view, address = _tensor_bytes(obj, raw)
    else:
        array = np.frombuffer(raw, np.uint8)
        view, address = array.data, int(array.__array_interface__["data"][0])
    if len(view) < length:
        raise ValueError(f"object of {length} bytes owns only {len(view)}")
    return IoBuffer(view, length, address)


def _tensor_bytes(obj: MemoryObj, raw: torch.Tensor) -> tuple[memoryview, int]:
    if raw.device.type != "cpu" or not raw.is_contiguous():
        raise ValueError(f"object is not plain host memory: {raw.device}")
    address, owned = raw.data_ptr(), raw.nbytes
    if obj.parent() is not None:
        # the slice may be cut to the logical size; the allocator says how much it set aside
        storage = raw.untyped_storage()
        arena_end = storage.data_ptr() + storage.nbytes()
        owned = max(owned, min(int(obj.get_physical_size()), arena_end - address))
    # no ctypes array: those make, and keep for ever, a new type for each length
    return np.asarray(_Span(address, owned, raw)).data, address


def layout_of(obj: MemoryObj) -> Layout:
    """Describe how an object's bytes are to be read."""
    meta = obj.metadata
    shapes = meta.shapes or [meta.shape]
    dtypes = meta.dtypes or [meta.dtype]
    return Layout(getattr(meta.fmt, "name", str(meta.fmt)), tensors_of(shapes, dtypes))


def tensors_of(shapes: Iterable[Iterable[int]], dtypes: Iterable[Any]) -> Tensors:
    """Name dtypes and shapes; any dtype has a name, there is no table of known ones."""
    return tuple(
        (str(dtype).removeprefix("torch."), tuple(map(int, shape)))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def is_flat_bytes(tensors: Tensors) -> bool:
    """Whether this is what LMCache's serde makes: one row of bytes, of any length."""
    return len(tensors) == 1 and tensors[0][0] == "uint8" and len(tensors[0][1]) == 1


def accepts(descs: Mapping[int, MemoryLayoutDesc] | None) -> Callable[[ChunkMeta], bool]:
    """Whether an entry could fill what LMCache would set aside for its group.

    Without a description anything may; bytes made by serde say nothing of the tensors in them.
    The load compares again, with the object itself.
    """
    wanted = {group: tensors_of(d.shapes, d.dtypes) for group, d in (descs or {}).items()}

    def accept(meta: ChunkMeta) -> bool:
        tensors = wanted.get(meta.scope.group)
        stored = meta.layout.tensors
        return not tensors or tensors == stored or is_flat_bytes(stored)

    return accept


def fits(wanted: Layout, size: int, meta: ChunkMeta, length: int) -> bool:
    """Whether a stored object may be read into one of this layout and size.

    Layout and length must be the same; a row of bytes may be shorter than its buffer, since
    LMCache sizes that by an estimate.
    """
    if is_flat_bytes(wanted.tensors) and is_flat_bytes(meta.layout.tensors):
        return length <= size
    return meta.layout == wanted and length == size


def all_are_copied(desc: L1MemoryDesc | None, block_bytes: int) -> bool:
    """Whether LMCache aligns its buffers too little for direct I/O; says so in the log."""
    if desc is None or desc.align_bytes % block_bytes == 0:
        return False
    log.warning(
        "LMCache aligns its buffers to %d bytes, the members need %d: everything is copied once "
        "more. Start the server with --l1-align-bytes 4096",
        desc.align_bytes,
        block_bytes,
    )
    return True


@lru_cache(maxsize=1024)
def packed_meta(scope: Scope, layout: Layout) -> bytes:
    """Encode what the inode of a chunk says of it; the same for all chunks of one kind."""
    return ChunkMeta(scope, layout).pack()
