"""What callers of the store give and get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fx100_lmcache.buffers import IoBuffer
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta

Accept = Callable[[ChunkMeta, int], bool]


@dataclass(slots=True)
class PutItem:
    """One object to store.

    Attributes
    ----------
    digest : bytes
        Made by the scope in ``meta``: under another the object is not found after a restart.
    meta : bytes
        A packed :class:`~fx100_lmcache.ondisk.chunk_meta.ChunkMeta`.
    buffer : IoBuffer
        Its bytes; they must not change before the result.
    """

    digest: bytes
    meta: bytes
    buffer: IoBuffer


@dataclass(frozen=True, slots=True)
class PutResult:
    """Fate of one put.

    Attributes
    ----------
    stored : bool
        The object is on the media under this digest.
    written : int
        Bytes written: 0 for an object that was there already.
    reason : str
        Why it was not stored.
    """

    stored: bool
    written: int = 0
    reason: str = ""


@dataclass(slots=True)
class LoadItem:
    """One object wanted.

    Attributes
    ----------
    buffer : IoBuffer
        Where it goes. Its contents are undefined unless the load succeeds.
    accept : callable
        Given what the entry says of itself and its length, whether it fits the destination.
    on_released : callable or None
        Called after a result that is ``in_kernel``, when the kernel has let go of the buffer.
    """

    digest: bytes
    buffer: IoBuffer
    accept: Accept
    on_released: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Fate of one load.

    Attributes
    ----------
    length : int
        Of the object, in bytes; 0 for a miss.
    reason : str
        Why it is a miss.
    in_kernel : bool
        The deadline passed and the kernel may still write to the buffer: it must not be reused
        before the item's ``on_released`` was called. Only for loads without ``hold``.
    """

    length: int
    reason: str = ""
    in_kernel: bool = False
