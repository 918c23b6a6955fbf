"""The adapter for LMCache's multiprocess mode, loaded by ``lmcache server --l2-adapter``.

``{"type": "plugin", "module_path": "fx100_lmcache.lmcache.l2_adapter",
"class_name": "FX100L2Adapter", "adapter_params": {"config": "/path/to/fx100.yaml"}}``
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from fx100_lmcache import config as settings
from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.counters import ADAPTER, defects_in
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.lmcache.buffers import (
    accepts,
    all_are_copied,
    io_buffer,
    layout_of,
    packed_meta,
)
from fx100_lmcache.lmcache.compat.memory import MemoryObj
from fx100_lmcache.lmcache.compat.mp import (
    ADAPTER_CONTRACT,
    AdapterUsage,
    Bitmap,
    KeyListPage,
    L1MemoryDesc,
    L2AdapterInterface,
    L2AdapterListener,
    L2StoreResult,
    MemoryLayoutDesc,
    ObjectKey,
    memory_tags,
)
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.lmcache.events import EventThread, Handler
from fx100_lmcache.lmcache.mp.keys import KeyNamer
from fx100_lmcache.lmcache.mp.listeners import PatientListener
from fx100_lmcache.lmcache.mp.listing import check_page, list_keys
from fx100_lmcache.lmcache.mp.replay import Replays
from fx100_lmcache.lmcache.mp.results import Results
from fx100_lmcache.lmcache.mp.stuck import StuckWatch, terminate_process
from fx100_lmcache.lmcache.mp.tasks import (
    Deleted,
    Evicted,
    LoadDone,
    LoadTask,
    PutDone,
    StoreTask,
    Touched,
    listed,
    plan_load,
    size_objects,
    stored_now,
)
from fx100_lmcache.lmcache.mp.usage import scarce_usage
from fx100_lmcache.lmcache.versions import LMCACHE, version_warnings
from fx100_lmcache.metrics import publish
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.ondisk.chunk_meta import DIGEST_BYTES
from fx100_lmcache.store import LoadResult, PutItem, PutResult
from fx100_lmcache.volume.arrival import wait_for_members

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""How long ``delete`` waits for listeners to hear of it."""

FAREWELL_S = 0.5
"""How long ``close`` waits for the event thread, after the store's own deadline."""

AFTER_S = 1.0
"""So long after its deadline a put whose call failed is surely over."""


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
        for found in version_warnings([LMCACHE]):
            log.warning(found.line)
        self._mounted = mounted or _mount_when_there(_config_path(adapter_params))
        with ExitStack() as undo:
            undo.callback(self._mounted.close)
            self._build(l1_memory_desc, terminate, undo)
            undo.pop_all()

    def _build(
        self, l1_memory_desc: L1MemoryDesc | None, terminate: Callable[[], None], undo: ExitStack
    ) -> None:
        store, config = self._mounted.store, self._mounted.config
        super().__init__(max_capacity_bytes=store.capacity_bytes)
        ADAPTER_CONTRACT.check_instance(self)
        self._store = store
        self._counts = Counts(ADAPTER)
        self._boundary = ErrorBoundary(self._counts)
        self._keys = KeyNamer(config.identity, store.meta, self._counts)
        self._failed_stores = BurstLog(log, "store tasks failed")
        self._tasks = itertools.count()
        self._closed = False
        self._close_lock = threading.Lock()
        self._make_results(undo)
        self._replays = Replays(store, self._keys, self._boundary)
        handlers = {
            PutDone: Handler(self._tell_stored, self._put_done),
            LoadDone: Handler(self._tell_accessed, self._load_done),
            Deleted: Handler(self._tell_deleted),
            Touched: Handler(self._notify_touched),
            Evicted: Handler(self._tell_evicted),
        }
        self._events = EventThread(handlers, self._replays.step, self._boundary)
        self._watch = StuckWatch(config.deadlines.stuck_io_s, self._stuck_members, terminate)
        self._seed_usage()
        block = max(m.logical_block_bytes for m in self._mounted.volume.members)
        self._bounces = all_are_copied(l1_memory_desc, block)
        store.on_evicted(lambda entries: self._events.post(Evicted(entries)))
        self._events.start()
        undo.callback(self._events.close, FAREWELL_S)
        self._watch.start()
        undo.callback(self._watch.close)
        volume = self._mounted.volume.label.volume
        self._metrics = publish(self.report_status, config.metrics, role="mp", volume=str(volume))

    def _make_results(self, undo: ExitStack) -> None:
        self._stores: Results[L2StoreResult] = Results(self._boundary)
        undo.callback(self._stores.close)
        self._lookups: Results[Bitmap] = Results(self._boundary)
        undo.callback(self._lookups.close)
        self._loads: Results[Bitmap] = Results(self._boundary)
        undo.callback(self._loads.close)

    def _seed_usage(self) -> None:
        for meta, length in self._store.bytes_by_meta().items():
            key = self._keys.key_of(bytes(DIGEST_BYTES), meta)
            if key is not None:
                self._total_bytes_used += length
                salts = self._bytes_by_cache_salt
                salts[key.cache_salt] = salts.get(key.cache_salt, 0) + length

    def get_usage(self) -> AdapterUsage:
        """Return the usage that LMCache's evictor goes by: its fraction is of what is scarce."""
        return scarce_usage(super().get_usage(), self._store.used_share)

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
        task = StoreTask(next(self._tasks), listed(keys), listed(objects))
        items = None
        with self._boundary.caught("store_tasks_refused", f"a store of {len(task.keys)} objects"):
            items = self._put_items(task, keys, objects)
        if items is None:
            task.reasons["refused"] += 1
        if not items:
            self._finish_store(task)
            return task.number
        task.waiting.update(range(len(items)))
        for place, item in enumerate(items):
            self._put(task, place, item)
        return task.number

    def _put_items(self, task: StoreTask, *given: Any) -> list[PutItem | None]:
        if not all(isinstance(each, Sequence) for each in given):
            raise TypeError("keys and objects must be lists")
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
            with self._boundary.caught("store_errors", "a put failed"):
                self._store.put([item], done)
                return
            # it may be on its way, and its bytes are hashed only as they are written: LMCache must
            # not have them back before the store publishes it no more
            failed = PutDone(task, place, PutResult(False, reason="internal error"))
            self._events.post(failed, delay_s=self._store.options.store_s + AFTER_S)

    def _tell_stored(self, events: list[PutDone]) -> None:
        new = stored_now(events)
        keys = [key for key, _ in new]
        if keys:
            self._notify(self._notify_keys_stored, keys, [size for _, size in new])
            self._replays.note_used(keys)

    def _put_done(self, event: PutDone) -> None:
        if event.task.settle(event.place, event.result):
            self._finish_store(event.task)

    def _finish_store(self, task: StoreTask) -> None:
        task.objects.clear()
        with self._boundary.caught("event_errors", "a store task was not counted"):
            if task.reasons:
                self._counts.add("store_tasks_failed")
                self._failed_stores.note(", ".join(sorted(task.reasons)))
            else:
                self._counts.add("store_tasks_done")
        self._stores.publish(task.number, L2StoreResult(not task.reasons, task.written))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return all finished store tasks, each once."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look keys up in memory and pin those that are there; done when it returns."""
        task = next(self._tasks)
        self._lookups.publish(task, self._looked_up(listed(keys), group_layout_descs))
        return task

    def _looked_up(
        self, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc] | None
    ) -> Bitmap:
        bitmap = self._bitmap(len(keys))
        hits: Sequence[bool] = ()
        with self._boundary.caught("lookup_errors", f"a lookup of {len(keys)} keys failed"):
            if not self._closed:
                digests = self._keys.digests(keys)
                hits = self._store.lookup(digests, pin=True, accept=accepts(descs)).tolist()
                bitmap.batched_set([place for place, hit in enumerate(hits) if hit])
            return bitmap
        self.submit_unlock([key for key, hit in zip(keys, hits, strict=False) if hit])
        return self._bitmap(len(keys))

    def _bitmap(self, size: int) -> Bitmap:
        with self._boundary.caught("call_errors", "no memory for a bitmap; trying again"):
            return Bitmap(size)
        return Bitmap(size)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the bitmap of a lookup, once."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Give one pin back for each key."""
        names = listed(keys)
        for _ in range(2):  # LMCache does not try again; and they end, see `deadlines.pin_ttl`
            with self._boundary.caught("unlock_errors", f"an unlock of {len(names)} keys failed"):
                self._store.unpin(self._keys.digests(names))
                return

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Load objects straight into LMCache's buffers."""
        names = listed(keys)
        task = LoadTask(next(self._tasks), names, listed(objects), self._bitmap(len(names)))
        with self._boundary.caught("load_errors", f"a load of {len(names)} objects failed"):
            if not self._closed:
                self._watch.begin(task.number)
                plan_load(task, self._keys.digests(names), self._boundary)
        if not task.parts:
            self._end_load(task)
        for part in range(len(task.parts)):
            self._load(task, part)
        return task.number

    def _load(self, task: LoadTask, part: int) -> None:
        """Ask the store for a part of a task; the task waits until it has come back."""

        def done(results: list[LoadResult]) -> None:
            if task.come_back(part, results):
                self._end_load(task)

        items = task.parts[part]
        with self._boundary.caught("load_errors", f"a load of {len(items)} objects failed"):
            self._store.load(items, done, hold=True)
            return
        done([])  # it raises before anything of this part is begun, or not at all

    def _end_load(self, task: LoadTask) -> None:
        """Have a task reported: nothing of it is out."""
        self._watch.end(task.number)
        self._events.post(LoadDone(task))

    def _tell_accessed(self, events: list[LoadDone]) -> None:
        for event in events:
            keys = [event.task.keys[place] for place, _ in event.task.loaded()]
            if keys:
                self._notify(self._notify_keys_accessed, keys)
                self._replays.note_used(keys)

    def _load_done(self, event: LoadDone) -> None:
        task = event.task
        try:
            size_objects(task, self._boundary)
            task.objects.clear()
        finally:
            self._loads.publish(task.number, task.bitmap)

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Mark keys as used that were found in host memory; LMCache calls it from 0.5.7 on.

        Without it, what is served from host memory alone would grow cold here.
        """
        with self._boundary.caught("call_errors", "keys could not be marked as used"):
            names = [] if self._closed else listed(keys)
            there = self._store.touch(self._keys.digests(names))
            used = [key for key, found in zip(names, there, strict=True) if found]
            if used:
                self._events.post(Touched(used))

    def _notify_touched(self, events: list[Touched]) -> None:
        for event in events:
            self._notify(self._notify_keys_accessed, event.keys)
            self._replays.note_used(event.keys)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the bitmap of a load, once."""
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete keys that nobody has locked; listeners have heard of it on return."""
        with self._boundary.caught("delete_errors", "a deletion failed"):
            names = listed(keys)
            digests = self._keys.digests(names)
            by_digest = dict(zip(digests, names, strict=True))
            on_removed = partial(self._post_deleted, by_digest)
            self._store.remove(digests, on_removed=on_removed)
            self._events.settle(SETTLE_S)

    def _post_deleted(self, keys: dict[bytes, ObjectKey], removed: list[tuple[bytes, int]]) -> None:
        self._events.post(Deleted(keys, removed))

    def _tell_deleted(self, events: list[Deleted]) -> None:
        gone = [(e.keys[digest], size) for e in events for digest, size in e.removed]
        if gone:
            self._notify(self._notify_keys_deleted, [k for k, _ in gone], [n for _, n in gone])

    def _tell_evicted(self, events: list[Evicted]) -> None:
        named = [
            (self._keys.key_of(digest, meta), length)
            for event in events
            for digest, length, meta in event.entries
        ]
        gone = [(key, length) for key, length in named if key is not None]
        if gone:
            self._notify(self._notify_keys_deleted, [k for k, _ in gone], [n for _, n in gone])

    def _notify(self, notify: Callable[..., None], *what: list[Any]) -> None:
        """Notify listeners, which are patient, and LMCache's event bus, which may raise."""
        with self._boundary.caught("listener_errors", "LMCache's event bus failed"):
            notify(*what)

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Add a listener and tell it, in the background, of everything that is there."""
        with self._boundary.caught("listener_errors", "a listener could not be added"):
            if not isinstance(listener, L2AdapterListener):
                raise TypeError(f"a {type(listener).__name__} is no listener")
            patient = PatientListener(listener, self._boundary)
            super().register_listener(patient)
            if self._replays.add(patient):
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
        check_page(page_size, cursor)
        with self._boundary.caught("call_errors", "keys could not be listed"):
            if not self._closed:
                return list_keys(self._store, self._keys, model_name, page_size, cursor)
        return KeyListPage((), None)

    def get_memory_tags(self) -> Any:
        """Say where the bytes lie; LMCache asks from 0.5.7 on."""
        return memory_tags(remote=self._mounted.remote or getattr(self, "_shared", False))

    def _stuck_members(self) -> list[str]:
        return [member["name"] for member in self._store.status()["members"] if member["stuck"]]

    def report_status(self) -> dict[str, Any]:
        """Everything an operator may want to see, as plain values."""
        status: dict[str, Any] = {"problems": ["the store's status cannot be had; see the log"]}
        with self._boundary.caught("call_errors", "the store's status cannot be had"):
            status = self._store.status()
        counts = self._counts.snapshot()
        problems = [*status["problems"], *self._own_problems(), *defects_in(counts)]
        return {
            **status,
            "is_healthy": not problems,
            "healthy": not problems,
            "problems": problems,
            "type": type(self).__name__,
            "loads_in_flight": self._watch.open_loads,
            "listeners_catching_up": self._replays.pending,
            "buffers_are_copied": self._bounces,
            "adapter_counts": counts,
        }

    def _own_problems(self) -> list[str]:
        found = []
        if self._watch.escalated:
            found.append("a load is stuck in the kernel; this process is about to end")
        if self._closed:
            found.append("the adapter is closed")
        elif not self._events.alive:
            found.append("the adapter's event thread has died: restart this server")
        return found

    def close(self) -> None:
        """Stop, within the configured deadline. May be called again."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        for step in (
            self._watch.close,
            self._close_store,
            partial(self._events.close, FAREWELL_S),
            self._close_metrics,
            self._stores.close,
            self._lookups.close,
            self._loads.close,
        ):
            with self._boundary.caught("call_errors", "a part of the adapter was not closed"):
                step()

    def _close_store(self) -> None:
        left = self._mounted.close()
        if left:
            log.error("closed with %d transfers still in the kernel", left)

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


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


ADAPTER_CONTRACT.check(FX100L2Adapter)  # Python makes no instance that lacks a method
