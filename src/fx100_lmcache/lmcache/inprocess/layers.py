"""Lookups of `use_layerwise`, where each layer of a chunk is an object of its own.

LMCache asks for the first layer when it means the chunk, and believes the answer: once it has
promised a chunk to vLLM, a "no" makes it leave the chunk out without a word. So a chunk is there
when all of its layers are, and what was promised stays promised: should it be gone, its load
fails, and a failed load is told.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fx100_lmcache.lmcache.compat.inprocess import CacheEngineKey, LayerCacheEngineKey
from fx100_lmcache.lmcache.inprocess.keys import KeyNamer
from fx100_lmcache.store import Store

MAX_PROMISED = 131_072
"""Chunks promised at a time, 33 million tokens; the oldest are of requests that were cancelled."""


class Promises:
    """Chunks that lookups have promised and nobody has unpinned, counted. Thread-safe."""

    def __init__(self, limit: int = MAX_PROMISED) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._counts: dict[bytes, int] = {}

    def make(self, digest: bytes) -> None:
        """Promise the chunk with this first layer."""
        with self._lock:
            self._counts[digest] = self._counts.pop(digest, 0) + 1  # now the youngest
            if len(self._counts) > self._limit:
                del self._counts[next(iter(self._counts))]

    def end(self, digest: bytes) -> None:
        """End one promise; nothing happens if there is none."""
        with self._lock:
            left = self._counts.get(digest, 0) - 1
            if left > 0:
                self._counts[digest] = left
            else:
                self._counts.pop(digest, None)

    def stands(self, digest: bytes) -> bool:
        """Whether a chunk is promised."""
        return digest in self._counts


@contextmanager
def unpinned_on_error(store: Store, digests: Sequence[bytes], pinned: int) -> Iterator[None]:
    """Give the pins on the first of some digests back if what follows fails.

    LMCache is then told that nothing is there, and unpins nothing.
    """
    try:
        yield
    except BaseException:
        store.unpin(digests[:pinned])
        raise


class LayeredChunks:
    """Chunks as LMCache means them in layerwise mode. Thread-safe.

    Parameters
    ----------
    layers : int
        Layers of this rank.
    """

    def __init__(self, store: Store, keys: KeyNamer, promises: Promises, layers: int) -> None:
        self._store = store
        self._keys = keys
        self._promises = promises
        self._layers = layers

    def means_chunk(self, key: CacheEngineKey) -> bool:
        """Whether a key stands for all layers of its chunk."""
        return isinstance(key, LayerCacheEngineKey) and key.layer_id == 0

    def is_chunk(self, keys: Sequence[CacheEngineKey]) -> bool:
        """Whether keys are all layers of one chunk."""
        return (
            len(keys) == self._layers
            and self.means_chunk(keys[0])
            and all(key.chunk_hash == keys[0].chunk_hash for key in keys)
        )

    def contains(self, first: LayerCacheEngineKey, pin: bool) -> bool:
        """Whether all layers are there, or were promised; pin the first."""
        digests = self._keys.digests(first.split_layers(self._layers))
        if not pin and self._promises.stands(digests[0]):
            return True
        there = bool(self._store.lookup(digests).all())
        if there and pin:
            with unpinned_on_error(self._store, digests, self._pinned(digests[:1])):
                self._promises.make(digests[0])
        return there

    def _pinned(self, digests: Sequence[bytes]) -> int:
        """Pin up to the first that is not there; return how many."""
        return int(self._store.lookup(digests, pin=True, prefix=True).sum())

    def promise(self, keys: Sequence[CacheEngineKey], pin: bool) -> int:
        """Return how many layers there are: all, which are then pinned, or none."""
        digests = self._keys.digests(keys)
        if not pin:
            hits = self._store.lookup(digests, prefix=True)
            return len(digests) if hits.all() else 0
        pinned = self._pinned(digests)
        if pinned < len(digests):  # LMCache forgets those
            self._store.unpin(digests[:pinned])
            return 0
        with unpinned_on_error(self._store, digests, pinned):
            self._promises.make(digests[0])
        return pinned

    def unpin(self, key: CacheEngineKey) -> bool:
        """Give back one pin, and with the first layer's the promise."""
        digest = self._keys.digest(key)
        try:
            if self.means_chunk(key):
                self._promises.end(digest)
        finally:
            given = self._store.unpin([digest])
        return bool(given)
