"""The face for LMCache's multiprocess mode, loaded by ``lmcache server --l2-adapter``.

``{"type": "plugin", "module_path": "fx100_lmcache.lmcache.l2_adapter",
"class_name": "FX100L2Adapter", "adapter_params": {"config": "/path/to/fx100.yaml"}}``
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from fx100_lmcache import config as settings
from fx100_lmcache.arrival import wait_for_members
from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.identity import DIGEST_BYTES
from fx100_lmcache.lmcache.buffers import (
    accepts,
    all_are_copied,
    io_buffer,
    layout_of,
    packed_meta,
)
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.events import EventThread
from fx100_lmcache.lmcache.keys import KeyTranslator
from fx100_lmcache.lmcache.listing import list_keys
from fx100_lmcache.lmcache.replay import Replays
from fx100_lmcache.lmcache.results import Results
from fx100_lmcache.lmcache.stuck import StuckWatch, terminate_process
from fx100_lmcache.lmcache.tasks import (
    Deleted,
    Evicted,
    LoadDone,
    LoadTask,
    PutDone,
    StoreTask,
    load_items,
    sized_objects,
)
from fx100_lmcache.lmcache.versions import LMCACHE, version_warnings
from fx100_lmcache.metrics import publish
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.store import LoadResult, PutItem, PutResult

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""How long ``delete`` waits for listeners to hear of it."""

FAREWELL_S = 0.5
"""How long ``close`` waits for the event thread, after the store's own deadline."""


class FX100L2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """A store on NVMe-oF namespaces as an L2 of LMCache. Thread-safe; only the constructor raises.

    Parameters
    ----------
    adapter_params : mapping
        ``{"config": path of our YAML}``.
    l1_memory_desc : L1MemoryDesc or None
        LMCache's own memory; given by LMCache.
    mounted : Mounted or None
        A store opened by the caller, instead of a configuration.
    terminate : callable
        Ends the process when the kernel does not give a buffer back.

    Raises
    ------
    FX100Error
        If the parameters are wrong or the store cannot be opened; LMCache's server then stops.
    """

    def __init__(
        self,
        adapter_params: Mapping[str, Any],
        l1_memory_desc: L1MemoryDesc | None = None,
        *,
        mounted: Mounted | None = None,
        terminate: Callable[[], None] = terminate_process,
    ) -> None:
        for warning in version_warnings([LMCACHE]):
            log.warning(warning)
        self._mounted = mounted or _mount_when_there(_config_path(adapter_params))
        try:
            self._build(l1_memory_desc, terminate)
        except BaseException:
            self._mounted.close()
            raise

    def _build(self, l1_memory_desc: L1MemoryDesc | None, terminate: Callable[[], None]) -> None:
        store, config = self._mounted.store, self._mounted.config
        super().__init__(max_capacity_bytes=store.capacity_bytes)
        self._store = store
        self._counts = Counts()
        self._keys = KeyTranslator(config.identity, store.meta, self._counts)
        self._failed_stores = BurstLog(log, "store tasks failed")
        self._tasks = itertools.count()
        self._closed = False
        self._close_lock = threading.Lock()
        self._stores: Results[L2StoreResult] = Results()
        self._lookups: Results[Bitmap] = Results()
        self._loads: Results[Bitmap] = Results()
        self._replays = Replays(store, self._keys, self._counts)
        handlers: dict[type, Callable[[list[Any]], None]] = {
            PutDone: self._puts_done,
            LoadDone: self._loads_done,
            Deleted: self._deletions_done,
            Evicted: self._evictions_done,
        }
        self._events = EventThread(handlers, self._replays.step, self._counts)
        self._watch = StuckWatch(config.deadlines.stuck_io_s, self._stuck_members, terminate)
        self._seed_usage()
        block = max(m.logical_block_bytes for m in self._mounted.volume.members)
        self._bounces = all_are_copied(l1_memory_desc, block)
        store.on_evicted(lambda entries: self._events.post(Evicted(entries)))
        self._events.start()
        self._watch.start()
        self._metrics = publish(self.report_status, config.metrics, role="mp")

    def _seed_usage(self) -> None:
        for meta, length in self._store.bytes_by_meta().items():
            key = self._keys.key_of(bytes(DIGEST_BYTES), meta)
            if key is not None:
                self._total_bytes_used += length
                salts = self._bytes_by_cache_salt
                salts[key.cache_salt] = salts.get(key.cache_salt, 0) + length

    def get_store_event_fd(self) -> int:
        """Return the descriptor that says that store tasks are done."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that says that lookups are done."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Return the descriptor that says that load tasks are done."""
        return self._loads.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store objects; the task succeeds if all of them are stored or were there."""
        task = StoreTask(next(self._tasks), list(keys), list(objects), len(keys))
        try:
            items = self._put_items(task)
        except Exception as problem:
            self._counts.add("store_tasks_refused")
            log.exception("store task of %d objects refused", len(keys))
            task.reasons[str(problem)] += 1
            items, task.left = [], 0
        if not items:
            self._finish_store(task)
        for place, item in enumerate(items):
            self._put(task, place, item)
        return task.number

    def _put_items(self, task: StoreTask) -> list[PutItem | None]:
        items: list[PutItem | None] = []
        digests = self._keys.digests(task.keys)
        for key, digest, obj in zip(task.keys, digests, task.objects, strict=True):
            scope = self._keys.scope_of(key)
            meta = None if scope is None else packed_meta(scope, layout_of(obj))
            items.append(None if meta is None else PutItem(digest, meta, io_buffer(obj)))
        return items

    def _put(self, task: StoreTask, place: int, item: PutItem | None) -> None:
        """Put one object; one at a time, so that each is announced when it is published."""

        def done(results: list[PutResult]) -> None:
            self._events.post(PutDone(task, place, results[0]))

        if item is None:
            done([PutResult(False, reason="key refused")])
        elif self._closed:
            done([PutResult(False, reason="closing")])
        else:
            try:
                self._store.put([item], done)
            except Exception:
                log.exception("put failed")
                done([PutResult(False, reason="internal error")])

    def _puts_done(self, events: list[PutDone]) -> None:
        new = [e for e in events if e.result.stored and e.result.written]
        keys = [e.task.keys[e.place] for e in new]
        if keys:
            self._tell(self._notify_keys_stored, keys, [e.result.written for e in new])
            self._replays.note_used(keys)
        for event in events:
            task = event.task
            task.left -= 1
            task.written += event.result.written
            if not event.result.stored:
                task.reasons[event.result.reason] += 1
            if task.left == 0:
                self._finish_store(task)

    def _finish_store(self, task: StoreTask) -> None:
        if task.reasons:
            self._counts.add("store_tasks_failed")
            self._failed_stores.note(", ".join(sorted(task.reasons)))
        else:
            self._counts.add("store_tasks_done")
        task.objects.clear()
        self._stores.publish(task.number, L2StoreResult(not task.reasons, task.written))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return all finished store tasks, each once."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look keys up in memory and pin those that are there; done when it returns."""
        task, bitmap = next(self._tasks), Bitmap(len(keys))
        try:
            if not self._closed:
                digests = self._keys.digests(keys)
                accept = accepts(group_layout_descs)
                hits = self._store.lookup(digests, pin=True, accept=accept)
                bitmap.batched_set(np.flatnonzero(hits).tolist())
        except Exception:
            self._counts.add("lookup_errors")
            log.exception("lookup of %d keys failed", len(keys))
        self._lookups.publish(task, bitmap)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the bitmap of a lookup, once."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Give one pin back for each key."""
        try:
            self._store.unpin(self._keys.digests(keys))
        except Exception:  # they end by themselves, see `deadlines.pin_ttl`
            self._counts.add("unlock_errors")
            log.exception("unlock of %d keys failed", len(keys))

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Load objects straight into LMCache's buffers."""
        task = LoadTask(next(self._tasks), list(keys), list(objects))
        try:
            digests = self._keys.digests(task.keys)
            items = [] if self._closed else load_items(task, digests, self._counts)
            self._watch.begin(task.number)
            self._store.load(items, partial(self._load_done, task), hold=True)
        except Exception:
            self._counts.add("load_errors")
            log.exception("load of %d objects failed", len(keys))
            self._load_done(task, [])
        return task.number

    def _load_done(self, task: LoadTask, results: list[LoadResult]) -> None:
        self._watch.end(task.number)
        self._events.post(LoadDone(task, results))

    def _loads_done(self, events: list[LoadDone]) -> None:
        for event in events:
            task, bitmap = event.task, Bitmap(len(event.task.keys))
            try:
                loaded = sized_objects(task, event.results)
            except Exception:  # an object of LMCache's; without a result its request would hang
                self._counts.add("load_errors")
                log.exception("load of %d objects is reported as a miss", len(task.keys))
                loaded = []
            bitmap.batched_set(loaded)
            if loaded:
                keys = [task.keys[place] for place in loaded]
                self._tell(self._notify_keys_accessed, keys)
                self._replays.note_used(keys)
            task.objects.clear()
            self._loads.publish(task.number, bitmap)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the bitmap of a load, once."""
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete keys that nobody has locked; listeners have heard of it on return."""

        def gone(removed: list[tuple[bytes, int]]) -> None:
            told = [by_digest[digest] for digest, _ in removed]
            self._events.post(Deleted(told, [length for _, length in removed]))

        try:
            digests = self._keys.digests(keys)
            by_digest = dict(zip(digests, keys, strict=True))
            self._store.remove(digests, tell=gone)
            self._events.settle(SETTLE_S)
        except Exception:
            self._counts.add("delete_errors")
            log.exception("deletion of %d keys failed", len(keys))

    def _deletions_done(self, events: list[Deleted]) -> None:
        keys = [key for event in events for key in event.keys]
        sizes = [size for event in events for size in event.sizes]
        if keys:
            self._tell(self._notify_keys_deleted, keys, sizes)

    def _evictions_done(self, events: list[Evicted]) -> None:
        told = [
            (self._keys.key_of(digest, meta), length)
            for event in events
            for digest, length, meta in event.entries
        ]
        known = [(key, length) for key, length in told if key is not None]
        self._deletions_done([Deleted([k for k, _ in known], [n for _, n in known])])

    def _tell(self, notify: Callable[..., None], *what: list[Any]) -> None:
        """Notify listeners; what they raise must not lose a result."""
        try:
            notify(*what)
        except Exception:
            self._counts.add("listener_errors")
            log.exception("a listener of LMCache failed")

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Add a listener and tell it, in the background, of everything that is there."""
        super().register_listener(listener)
        if self._replays.add(listener):
            self._events.wake()

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List keys by their place on the media; a page may be short and yet not the last.

        Raises
        ------
        ValueError
            If ``page_size`` is not positive or ``cursor`` is none of ours.
        """
        return list_keys(self._store, self._keys, model_name, page_size, cursor)

    def _stuck_members(self) -> list[str]:
        return [member["name"] for member in self._store.status()["members"] if member["stuck"]]

    def report_status(self) -> dict[str, Any]:
        """Everything an operator may want to see, as plain values."""
        status = self._store.status()
        problems = list(status["problems"])
        if self._watch.escalated:
            problems.append("a load is stuck in the kernel; this process is about to end")
        if self._closed:
            problems.append("the adapter is closed")
        elif not self._events.alive:
            problems.append("the adapter's event thread has died: restart this server")
        return {
            **status,
            "is_healthy": not problems,
            "healthy": not problems,
            "problems": problems,
            "type": type(self).__name__,
            "loads_in_flight": self._watch.open_loads,
            "listeners_catching_up": self._replays.pending,
            "buffers_are_copied": self._bounces,
            "adapter_counts": self._counts.snapshot(),
        }

    def close(self) -> None:
        """Stop, within the configured deadline. May be called again."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._watch.close()
        left = self._mounted.close()
        if left:
            log.error("closed with %d transfers still in the kernel", left)
        self._events.close(FAREWELL_S)
        if self._metrics is not None:
            self._metrics.close()
        for results in (self._stores, self._lookups, self._loads):
            results.close()


def _config_path(adapter_params: Mapping[str, Any]) -> str:
    path = adapter_params.get("config")
    unknown = sorted(set(adapter_params) - {"config"})
    if not isinstance(path, str) or not path or unknown:
        wrong = f"; unknown: {', '.join(unknown)}" if unknown else ""
        raise FX100Error(
            'adapter_params must be {"config": "/path/to/fx100.yaml"}'
            + wrong
            + ". `fx100 l2-adapter CONFIG` prints the whole value of --l2-adapter"
        )
    return path


def _mount_when_there(path: str) -> Mounted:
    config = settings.load(path)
    wait_for_members(config, config.deadlines.start_s)
    return mount(config)
