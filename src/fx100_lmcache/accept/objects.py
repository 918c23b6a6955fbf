"""Objects of the kit's own in a volume: bytes that say which object and block they are.

They carry a scope that no model has, and are removed at the end. Nothing is stored unless it fits
beside what the volume holds, so that nothing is evicted for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fx100_lmcache.accept.steps import CannotRunError
from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.config import Config
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope
from fx100_lmcache.store import LoadItem, LoadResult, PutItem, PutResult, Store

SCOPE = Scope("acceptance", "fx100-accept", 0)
META = ChunkMeta(SCOPE, Layout("bytes")).pack()
ALIGN_BYTES = 4096
MAX_FILL = 0.9
"""Share of the capacity up to which the kit fills a volume."""
_ANSWER_S = 330.0
"""For an answer of the store, whose own deadlines end at 300 s."""


def digest_of(number: int) -> bytes:
    """Name an object by its number."""
    return SCOPE.digest(number.to_bytes(16, "little"))


def number_of(digest: bytes) -> int | None:
    """Return the number of an object of ours, None for anybody else's."""
    prefix = SCOPE.prefix
    return int.from_bytes(digest[len(prefix) :], "little") if digest[:16] == prefix else None


class Contents:
    """What each object holds: the same random bytes, with its number in every 4 KiB.

    Parameters
    ----------
    object_bytes : int
        Size of every object.
    """

    def __init__(self, object_bytes: int) -> None:
        self.object_bytes = object_bytes
        self.buffer_bytes = -(-object_bytes // ALIGN_BYTES) * ALIGN_BYTES
        words = self.buffer_bytes // 8
        self._base = np.random.default_rng(20_240_229).integers(0, 1 << 63, words, np.uint64)

    def buffer(self) -> IoBuffer:
        """Return memory for one object."""
        buffer = zero_buffer(self.buffer_bytes)
        buffer.length = self.object_bytes
        return buffer

    def fill(self, buffer: IoBuffer, number: int, version: int = 0) -> None:
        """Write an object into memory."""
        words = np.frombuffer(buffer.view, np.uint64)
        words[:] = self._base
        words[:: ALIGN_BYTES // 8] = self._stamp(number, version)

    def holds(self, buffer: IoBuffer, number: int, version: int = 0) -> bool:
        """Whether memory holds exactly that object."""
        expected = self._base.copy()
        expected[:: ALIGN_BYTES // 8] = self._stamp(number, version)
        want = expected.view(np.uint8)[: self.object_bytes]
        return bool(np.array_equal(np.frombuffer(buffer.view, np.uint8)[: want.size], want))

    def _stamp(self, number: int, version: int) -> npt.NDArray[np.uint64]:
        blocks = np.arange(self.buffer_bytes // ALIGN_BYTES, dtype=np.uint64)
        return blocks ^ np.uint64((number << 24 ^ version << 16) & (1 << 63) - 1)


@contextlib.contextmanager
def opened(config: Config) -> Iterator[Mounted]:
    """Open the volume as its owner, for as long as the block lasts.

    Raises
    ------
    CannotRunError
        If it cannot be opened: not formatted, in use, a member away.
    """
    try:
        mounted = mount(config)
    except (FX100Error, OSError) as problem:
        raise CannotRunError(f"the volume cannot be opened: {problem}") from problem
    try:
        yield mounted
    finally:
        mounted.close()


def refuse_full(store: Store, wanted_bytes: int) -> None:
    """Raise `CannotRunError` if so many more bytes could evict something."""
    room = int(store.capacity_bytes * MAX_FILL) - store.live_bytes
    if wanted_bytes > room:
        raise CannotRunError(
            f"{wanted_bytes} bytes are to be stored, and {max(0, room)} fit beside what the volume "
            "holds",
            remedy="take a larger volume, a smaller --scale, or smaller sizes in the criteria",
        )


def put(store: Store, contents: Contents, numbers: Sequence[int], batch: int = 8) -> list[str]:
    """Store objects, a few at a time; return why some were not stored."""
    buffers = [contents.buffer() for _ in range(min(batch, len(numbers)))]
    refused: list[str] = []
    for at in range(0, len(numbers), batch):
        part = numbers[at : at + batch]
        for number, buffer in zip(part, buffers, strict=False):
            contents.fill(buffer, number)
        refused += put_filled(store, list(zip(part, buffers, strict=False)))
    return refused


def put_filled(store: Store, items: Sequence[tuple[int, IoBuffer]]) -> list[str]:
    """Store objects from memory that holds them already; return why some were not stored."""
    refused: list[str] = []
    ended = threading.Event()

    def done(results: Sequence[PutResult]) -> None:
        refused.extend(each.reason for each in results if not each.stored)
        ended.set()

    store.put([PutItem(digest_of(number), META, buffer) for number, buffer in items], done)
    if not ended.wait(_ANSWER_S):
        raise FX100Error(f"the store gave no answer to a put within {_ANSWER_S:.0f} s")
    return refused


@dataclass
class Loads:
    """What came back of some loads.

    Attributes
    ----------
    missed : dict
        Reason of each miss, by the object's number.
    wrong : list of int
        Objects whose bytes were others. There must never be one.
    """

    missed: dict[int, str]
    wrong: list[int]
    wall_s: float = 0.0


def load(
    store: Store,
    contents: Contents,
    numbers: Sequence[int],
    buffers: Sequence[IoBuffer],
    *,
    check: bool,
) -> Loads:
    """Load objects into buffers, as many at a time as there are buffers.

    Parameters
    ----------
    check : bool
        Compare every byte; that takes time which ``wall_s`` does not count.
    """
    result = Loads({}, [])
    for at in range(0, len(numbers), len(buffers)):
        part = numbers[at : at + len(buffers)]
        started = time.perf_counter()
        reasons = _load(store, part, buffers)
        result.wall_s += time.perf_counter() - started
        for number, buffer, reason in zip(part, buffers, reasons, strict=False):
            if reason is not None:
                result.missed[number] = reason
            elif check and not contents.holds(buffer, number):
                result.wrong.append(number)
    return result


def _load(store: Store, numbers: Sequence[int], buffers: Sequence[IoBuffer]) -> list[str | None]:
    reasons: list[str | None] = []
    ended = threading.Event()

    def done(results: Sequence[LoadResult]) -> None:
        reasons.extend(None if each.length else each.reason or "miss" for each in results)
        ended.set()

    items = [
        LoadItem(digest_of(number), buffer, lambda _meta, length: length > 0)
        for number, buffer in zip(numbers, buffers, strict=False)
    ]
    store.load(items, done)
    if not ended.wait(_ANSWER_S):
        raise FX100Error(f"the store gave no answer to a load within {_ANSWER_S:.0f} s")
    return reasons


def remove_ours(store: Store) -> int:
    """Remove every object of the kit; return how many there were."""
    ours = [digest for _, digest, _, _ in store.entries() if number_of(digest) is not None]
    return len(store.remove(ours, force=True))


def ours_in(store: Store) -> set[int]:
    """Return the numbers of the kit's objects in a store."""
    numbers = (number_of(digest) for _, digest, _, _ in store.entries())
    return {number for number in numbers if number is not None}
