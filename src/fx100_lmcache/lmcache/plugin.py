"""The face for LMCache inside vLLM (``LMCacheConnectorV1Dynamic``): a storage plugin.

LMCache's configuration names it::

    storage_plugins: [fx100]
    extra_config:
      storage_plugin.fx100.module_path: fx100_lmcache.lmcache.plugin
      storage_plugin.fx100.class_name: FX100StoragePlugin
      fx100.config: /path/to/fx100.yaml

One plugin runs in every worker; rank ``r`` owns shard ``inprocess.shard_base + r``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from fx100_lmcache.lmcache.compat.inprocess import (
    PLUGIN_CONTRACT,
    CacheEngineKey,
    LayerCacheEngineKey,
    StoragePluginInterface,
    init_logger,
)
from fx100_lmcache.lmcache.compat.memory import MemoryObj
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.lmcache.inprocess.checks import saves_only_first_rank
from fx100_lmcache.lmcache.inprocess.forward_pass import ForwardPass, LayerLoadError
from fx100_lmcache.lmcache.inprocess.keys import KeyNamer, difference
from fx100_lmcache.lmcache.inprocess.layers import LayeredChunks, unpinned_on_error
from fx100_lmcache.lmcache.inprocess.loads import release
from fx100_lmcache.lmcache.inprocess.puts import Notified, Offer
from fx100_lmcache.lmcache.inprocess.registry import attach, detach
from fx100_lmcache.lmcache.inprocess.setup import prepare
from fx100_lmcache.lmcache.mp.tasks import listed
from fx100_lmcache.lmcache.scopes import NO_DIGEST

log = logging.getLogger(__name__)

MAX_LOOKUPS = 4096
"""Asynchronous lookups whose load has not come; pins of those forgotten just expire."""

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["FX100StoragePlugin", P], T]


def _never_raises(fallback: T) -> Callable[[Method[P, T]], Method[P, T]]:
    """Return ``fallback`` once closed, and instead of raising: that would end the engine."""

    def wrap(method: Method[P, T]) -> Method[P, T]:
        @functools.wraps(method)
        def guarded(self: FX100StoragePlugin, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if self._closed:
                return fallback
            with self._boundary.caught("call_errors", f"{method.__name__} failed"):
                return method(self, *args, **kwargs)
            return fallback

        return guarded

    return wrap


class FX100StoragePlugin(StoragePluginInterface):  # type: ignore[misc]
    """A store on NVMe-oF namespaces as a backend of LMCache. Thread-safe.

    Only the constructor raises; LMCache logs that and goes on without the backend. The exception
    is a layer that is missing and cannot be told: see :meth:`batched_get_non_blocking`.

    Parameters
    ----------
    config, metadata, local_cpu_backend, loop, dst_device
        As LMCache gives them.

    Raises
    ------
    FX100Error
        If this set-up is not served or the store cannot be opened; says what to do.
    """

    def __init__(
        self,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
        dst_device: str = "cpu",
    ) -> None:
        super().__init__(
            dst_device=dst_device,
            config=config,
            metadata=metadata,
            local_cpu_backend=local_cpu_backend,
            loop=loop,
        )
        if not logging.getLogger("fx100_lmcache").hasHandlers():
            init_logger("fx100_lmcache")  # our lines appear where LMCache's do
        self._setup = setup = prepare(config, metadata, local_cpu_backend, type(self).__name__)
        # puts may hold half of the pool, so that loads always find memory
        puts_bytes = setup.staging_bytes // 2
        self._opened = attach(
            self, setup.path, setup.shard, setup.config, puts_bytes, setup.first_shard
        )
        try:
            self._build()
        except BaseException:
            detach(self, self._opened)
            raise

    def _build(self) -> None:
        setup, metadata = self._setup, self.metadata
        self._boundary = ErrorBoundary(self._opened.counts)
        self._store = self._opened.mounted.store
        self._puts = self._opened.puts
        self._loads = self._opened.loads
        self._keys = KeyNamer(setup.config.identity, setup.key_context, self._opened.counts)
        self._layers = LayeredChunks(
            self._store, self._keys, self._opened.promises, metadata.kv_shape[0]
        )
        self._forward_pass = ForwardPass(metadata.chunk_size, self._opened.notices)
        self._lookups: dict[str, bool] = {}
        self._closed = False
        self._close_lock = threading.Lock()
        self._say_what_is_there()
        self._opened.publish(metadata.model_name, str(metadata.worker_id))

    def _say_what_is_there(self) -> None:
        """Log what is in the store, and if nothing of it is of use here, why."""
        metadata, store = self.metadata, self._store
        first_only = saves_only_first_rank(self.config, metadata)
        world_size = 1 if first_only else metadata.world_size
        key = CacheEngineKey(
            metadata.model_name, world_size, metadata.worker_id, 0, metadata.kv_dtype
        )
        ours = self._keys.scope_of(key)
        if ours is None:
            return
        differs = difference(ours, (store.meta(meta).scope for meta in store.bytes_by_meta()))
        log.info("shard %d holds %d chunks", self._setup.shard, len(store))
        if differs is not None:
            log.warning("what shard %d holds cannot be used: %s", self._setup.shard, differs)

    def __str__(self) -> str:
        """Name the class, as LMCache's own backends do."""
        return type(self).__name__

    @_never_raises(fallback=False)
    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether a chunk could be loaded now, from memory alone.

        The first layer stands for its chunk, and what was promised stays so until it is unpinned.
        """
        if self._layers.means_chunk(key):
            return self._layers.contains(key, pin)
        return bool(self._store.lookup([self._keys.digest(key)], pin=pin)[0])

    @_never_raises(fallback=0)
    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Return how many keys from the first on are there; pin those.

        Of the layers of a chunk, all or none.
        """
        if self._layers.is_chunk(keys):
            return self._layers.promise(keys, pin)
        return self._hits(self._keys.digests(keys), pin)

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """Return how many keys from the first on are there; pin those until they are loaded.

        LMCache does not unpin what it looks up so, but always loads it under the same id.
        """
        return self._async_prefix(lookup_id, keys, pin)

    @_never_raises(fallback=0)
    def _async_prefix(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool) -> int:
        digests = self._keys.digests(keys)
        found = self._hits(digests, pin)
        if pin and found:
            with unpinned_on_error(self._store, digests, found):
                self._lookups[lookup_id] = True
                if len(self._lookups) > MAX_LOOKUPS:
                    del self._lookups[next(iter(self._lookups))]
        return found

    def _hits(self, digests: list[bytes], pin: bool) -> int:
        return int(np.count_nonzero(self._store.lookup(digests, pin=pin, prefix=True)))

    @_never_raises(fallback=False)
    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a chunk from eviction until it is unpinned, or `deadlines.pin_ttl` is over."""
        return bool(self._store.lookup([self._keys.digest(key)], pin=True)[0])

    @_never_raises(fallback=False)
    def unpin(self, key: CacheEngineKey) -> bool:
        """Give one pin back; False if there was none."""
        return self._layers.unpin(key)

    def touch_cache(self) -> None:
        """Do nothing: a lookup marks what it finds as used, the prefix most recently."""

    @_never_raises(fallback=False)
    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether a chunk is on its way into the store."""
        return self._puts.holds(self._keys.digest(key))

    @_never_raises(fallback=None)
    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Notified | None = None,
    ) -> None:
        """Take chunks over to be stored; returns at once, and drops what is too much.

        Nothing is taken that was computed in a pass for which a load failed: it may be wrong.

        Parameters
        ----------
        on_complete_callback : callable or None
            Given each key that can be read back, from a thread of ours.
        """
        if self._forward_pass.tainted:
            self._opened.counts.add("put_after_failed_load", len(keys))
            return
        offers = []
        for key, digest, obj in zip(keys, self._keys.digests(keys), objs, strict=False):
            scope = None if digest == NO_DIGEST else self._keys.scope_of(key)
            if scope is not None:
                offers.append(Offer(key, digest, scope, obj, on_complete_callback))
        self._puts.offer(offers)

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Notified | None = None,
    ) -> None:
        """Take chunks over to be stored, as :meth:`batched_submit_put_task`."""
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Load one chunk; None if it is not there or failed."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Load chunks; None for each that is not there or failed, at the latest at the deadline.

        Chunks that no host memory is left for count as failed.
        """
        keys = listed(keys)
        found: list[MemoryObj | None] = [None] * len(keys)
        with self._boundary.caught("call_errors", "batched_get_blocking failed"):
            if keys and not self._closed:
                found = self._loads.get(self._keys.digests(keys), self.local_cpu_backend)
        if any(obj is None for obj in found):
            self._spoil()
        return found

    def get_non_blocking(
        self, key: CacheEngineKey, location: str | None = None
    ) -> Future[MemoryObj | None] | None:
        """Return None: LMCache's engine does not load so."""
        return None

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Load chunks up to the first that fails; of one layer, all or nothing.

        The pins of an asynchronous lookup with this id end here.

        Raises
        ------
        LayerLoadError
            If a layer fails and vLLM cannot be told. That ends the engine: LMCache would go on
            with KV that is wrong.
        """
        keys = listed(keys)
        of_layer = bool(keys) and isinstance(keys[0], LayerCacheEngineKey)
        if of_layer and self._tainted_here():  # vLLM was told that nothing of it will be used
            return []
        found = await self._found(lookup_id, keys)
        good = [obj for obj in takewhile(lambda obj: obj is not None, found) if obj is not None]
        if of_layer and len(good) < len(keys):
            release(found, self._boundary)
            self._layer_failed()
            return []
        release(found[len(good) :], self._boundary)
        return good

    async def _found(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        if self._closed or not keys:
            return [None] * len(keys)
        digests: list[bytes] = []
        try:
            with self._boundary.caught("call_errors", "batched_get_non_blocking failed"):
                digests = self._keys.digests(keys)
                return await self._loads.get_async(digests, self.local_cpu_backend)
            return [None] * len(keys)
        finally:
            self._end_lookup(lookup_id, digests)

    @_never_raises(fallback=None)
    def _end_lookup(self, lookup_id: str, digests: list[bytes]) -> None:
        if self._lookups.pop(lookup_id, False):
            self._store.unpin(digests)

    @_never_raises(fallback=False)
    def _tainted_here(self) -> bool:
        return self._forward_pass.tainted_here

    def _layer_failed(self) -> None:
        """Have vLLM not use what it loads in this pass: LMCache does not look."""
        self._count("layer_load_failures")
        try:
            blocks = self._forward_pass.invalidate()
        except LayerLoadError:
            log.exception("a layer could not be loaded; the engine must stop here")
            raise
        self._spoil()
        log.error("a layer could not be loaded; vLLM was told not to use %d KV blocks", blocks)

    @_never_raises(fallback=None)
    def _count(self, name: str) -> None:
        self._opened.counts.add(name)

    @_never_raises(fallback=None)
    def _spoil(self) -> None:
        self._forward_pass.taint()

    @_never_raises(fallback=False)
    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove one chunk; unless forced, not if it is pinned."""
        return bool(self._store.remove([self._keys.digest(key)], force=force))

    @_never_raises(fallback=0)
    def batched_remove(self, keys: list[CacheEngineKey], force: bool = True) -> int:
        """Remove chunks; return how many there were."""
        return len(self._store.remove(self._keys.digests(keys), force=force))

    @_never_raises(fallback=0)
    def clear(self) -> int:
        """Forget everything on this rank's shard; return the tokens that it held."""
        held_bytes = self._store.live_bytes
        self._store.clear()
        return held_bytes // self._setup.bytes_per_token

    def get_allocator_backend(self) -> Any:
        """Return LMCache's host memory, which is read and written without a copy."""
        return self.local_cpu_backend

    def report_status(self) -> dict[str, Any]:
        """Everything an operator may want to see, as plain values."""
        status: dict[str, Any] = {"problems": ["the store's status cannot be had; see the log"]}
        with self._boundary.caught("call_errors", "the store's status cannot be had"):
            status = self._opened.status()
        closed = ["the plugin is closed"] if self._closed else []
        problems = [*status["problems"], *closed]
        return {
            **status,
            "healthy": not problems,
            "problems": problems,
            "shard": self._setup.shard,
        }

    def close(self) -> None:
        """Stop, within 10 s. May be called again; what is in the kernel then is left alone."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        with self._boundary.caught("call_errors", "close failed"):
            detach(self, self._opened)


PLUGIN_CONTRACT.check(FX100StoragePlugin)  # Python makes no instance that lacks a method
