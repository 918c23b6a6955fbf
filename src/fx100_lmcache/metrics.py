"""Prometheus metrics of a store, for both faces.

The metrics are ordinary ``prometheus_client`` objects in the default registry, so they appear
where the host process shows its own: at ``/metrics`` of LMCache's server, and beside vLLM's where
``PROMETHEUS_MULTIPROC_DIR`` is set. A thread brings them up to date once a second from the
store's own counters; nothing on the data path knows of Prometheus.

Every series that is known in advance is there from the start, at zero: where none is, no store
was opened. ``docs/metrics.md`` lists them all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import ValueClass

from fx100_lmcache.config import MetricsConfig

log = logging.getLogger(__name__)

UPDATE_S = 1.0

COMMON_LABELS = ("role", "model_name", "worker_id")
"""As LMCache names them; empty where unknown."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes
    ----------
    name, text : str
        What Prometheus calls it (a counter gets the suffix ``_total``), and what it says.
    label : str
        The label beside the common ones; empty if there is none.
    values : mapping of str to str
        Values of that label that are known in advance, and what they mean.
    """

    name: str
    text: str
    label: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


LOOKUPS = {
    "hit": "it could be loaded",
    "miss": "absent, on a member that is not up, or of another layout",
}
LOADS = {
    "hit": "loaded and verified",
    "miss_absent": "not there (any more)",
    "miss_member_down": "part of it lies on a member that is not up",
    "miss_layout": "length, shapes, dtypes or format are not those of the destination",
    "miss_checksum": "the bytes read are not those that were written; dropped",
    "miss_error": "a read failed",
    "miss_deadline": "not there at `deadlines.load`",
}
PUTS = {
    "stored": "written, and found from now on",
    "present": "was there already; nothing was written",
    "dropped_backlog": "more than `io.max_write_in_flight`, or 16,384 that wait for space",
    "dropped_full": "no space came free in time",
    "dropped_being_erased": "the object that it replaces could not be erased",
    "dropped_deadline": "not written at `deadlines.store`",
    "dropped_error": "a write failed",
    "dropped_conflict": "the same name with another layout is being written",
    "dropped_impossible": "larger than the volume takes",
    "dropped_cleared": "the shard was cleared meanwhile",
    "dropped_claim_lost": "another process has taken the shard over",
    "dropped_claim_unread": "no member gave the claim to read, so it may be somebody else's",
    "dropped_closing": "the store is being closed",
    "dropped_internal": "a defect of ours; see the log",
}
EVENTS = {
    "evictions": "objects evicted by ourselves",
    "removes": "objects removed by LMCache, its evictor included",
    "clears": "times that a shard was cleared",
    "checksum_failures": "objects that were damaged, and dropped",
    "deadline_misses": "loads and puts that were not done in time",
    "bounced_transfers": "transfers copied through a buffer of our own",
    "internal_errors": "defects of ours, want of memory or threads; see the log",
    "erase_failures": "inodes that could not be erased; tried again",
    "nvme_reconnects": "NVMe-oF paths that the kernel had given up, connected again",
    "nvme_reconnect_failures": "attempts at that which failed",
    "torn_inodes": "inodes that a crash had left half written",
    "unreadable_inodes": "inodes that a device could not read when the volume was opened",
    "lookup_layout_mismatches": "layouts that a lookup refused",
    "puts_replacing": "objects that replaced one of another layout",
    "unpins_of_nothing": "unpins of what was not pinned (any more)",
    "keys_refused_long_hash": "keys with a chunk hash of more than 32 bytes",
    "keys_refused_no_namespace": "keys of models that `identity.require_namespace` shuts out",
    "keys_refused_scope": "keys with a field longer than an inode takes",
    "keys_refused_tags": "keys with a request tag that cannot be hashed",
    "load_errors": "defects while loading; see the log",
    "event_errors": "defects while handling results; see the log",
    "store_tasks_done": "mp: store tasks that succeeded",
    "store_tasks_failed": "mp: store tasks with an object that was not stored",
    "store_tasks_refused": "mp: store tasks that could not be begun; see the log",
    "load_buffers_refused": "mp: destinations that cannot be written to; see the log",
    "lookup_errors": "mp: defects in lookups; see the log",
    "unlock_errors": "mp: defects in unlocks; see the log",
    "delete_errors": "mp: defects in deletions; see the log",
    "listener_errors": "mp: listeners of LMCache that failed; see the log",
    "call_errors": "worker: calls that failed, answered with a miss; see the log",
    "callback_errors": "worker: callbacks of LMCache that failed; see the log",
    "layer_load_failures": "worker: layers not loaded; vLLM was told, or the engine stopped",
    "put_after_failed_load": "worker: chunks not stored, computed in a pass whose load failed",
    "load_no_memory": "worker: chunks not loaded since LMCache's host memory was full",
    "load_layout": "worker: chunks whose layout does not suit this rank",
    "loads_abandoned": "worker: loads given up at their deadline",
    "put_queue_full": "worker: chunks dropped, the queue holds half of the host memory",
    "put_duplicate": "worker: chunks that were queued already",
    "put_not_admitted": "worker: chunks offered for the first time, see `inprocess.admission`",
    "put_refused": "worker: chunks that cannot be stored; see the log",
    "put_failed": "worker: chunks that the store did not take",
    "put_errors": "worker: defects while storing; see the log",
    "put_closed": "worker: chunks offered while closing",
    "put_abandoned": "worker: chunks still queued when the store closed",
}
USES = {
    "free": "may be written to",
    "used": "hold objects, or are being written or erased, or read after that",
    "quarantined": "the kernel may still write there, or the inode is not erased yet",
}

COUNTERS = {
    "lookups": Metric("fx100_lookup_objects", "Objects asked for in lookups.", "outcome", LOOKUPS),
    "loads": Metric("fx100_load_objects", "Objects asked for in loads.", "outcome", LOADS),
    "puts": Metric("fx100_put_objects", "Objects given to be stored.", "outcome", PUTS),
    "read": Metric("fx100_read_bytes", "Bytes loaded and verified."),
    "written": Metric("fx100_written_bytes", "Bytes of objects stored."),
    "read_s": Metric("fx100_read_seconds", "Seconds of all loads; those at once are added up."),
    "written_s": Metric("fx100_write_seconds", "Seconds of all puts; those at once are added up."),
    "events": Metric("fx100_events", "Everything else that was counted.", "event", EVENTS),
    "errors": Metric("fx100_member_errors", "Failed transfers of a member.", "member"),
}

GAUGES = {
    "healthy": Metric("fx100_healthy", "1 if the tier really works, else 0; 0 once closed."),
    "entries": Metric("fx100_entries", "Objects stored."),
    "live": Metric("fx100_live_bytes", "Logical bytes of the objects stored."),
    "capacity": Metric("fx100_capacity_bytes", "Bytes before the store evicts by itself."),
    "blocks": Metric("fx100_space_bytes", "Data blocks by what they are used for.", "use", USES),
    "backlog": Metric("fx100_write_backlog_bytes", "Bytes of puts that the store is writing."),
    "queue": Metric("fx100_put_queue_bytes", "worker: host memory held by chunks to be stored."),
    "jobs": Metric("fx100_jobs_in_flight", "Reads and writes of objects, queued or in the kernel."),
    "recovery": Metric("fx100_recovery_seconds", "Seconds that it took to read the index."),
    "up": Metric("fx100_member_up", "1 if the member is up, 0 if suspect or down.", "member"),
    "stuck": Metric("fx100_member_stuck_io", "Transfers past their deadline.", "member"),
    "direct": Metric("fx100_member_direct_io", "1 if direct I/O is in force, else 0.", "member"),
}

# counters of the store -> (metric, value of its label); all others are events
_PLACES = {
    "lookup_hits": ("lookups", "hit"),
    "lookup_misses": ("lookups", "miss"),
    "load_hits": ("loads", "hit"),
    "puts_stored": ("puts", "stored"),
    "puts_present": ("puts", "present"),
    "read_bytes": ("read", ""),
    "written_bytes": ("written", ""),
    "read_us": ("read_s", ""),
    "written_us": ("written_s", ""),
}
_PREFIXES = {"load_miss_": ("loads", "miss_"), "put_drop_": ("puts", "dropped_")}
_COUNTS_OF_STATUS = ("counts", "adapter_counts", "plugin_counts")


class MetricsPublisher:
    """Keeps the metrics of one store up to date until it is closed.

    Parameters
    ----------
    status : callable
        Returns `Store.status`, with what the face adds to it: ``adapter_counts``,
        ``plugin_counts``, ``put_queue_bytes``.
    labels : tuple of str
        Values of `COMMON_LABELS`.
    """

    def __init__(
        self,
        status: Callable[[], Mapping[str, Any]],
        labels: tuple[str, str, str],
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._status = status
        self._labels = labels
        self._metrics = _metrics(registry)
        self._seen: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fx100-metrics", daemon=True)
        for key, metric in (COUNTERS | GAUGES).items():
            for value in metric.values if metric.label else ("",):
                self._series(key, value)
        self.update()
        self._thread.start()

    def _run(self) -> None:
        failing = False
        while not self._closing.wait(UPDATE_S):
            try:
                self.update()
                failing = False
            except Exception:
                if not failing:  # once a second would hide everything else
                    log.exception("metrics are not up to date")
                failing = True

    def close(self) -> None:
        """Stop; the last values stay, and the tier counts as not healthy."""
        self._closing.set()
        self.update()

    def update(self) -> None:
        """Bring all metrics up to date."""
        status = self._status()
        with self._lock:
            for kind in _COUNTS_OF_STATUS:
                for name, total in status.get(kind, {}).items():
                    metric, value = _place(name)
                    self._count(metric, value, total * (1e-6 if name.endswith("_us") else 1))
            for member in status["members"]:
                name = member["name"]
                self._count("errors", name, member["errors"])
                self._set("up", member["state"] == "up", name)
                self._set("stuck", member["stuck"], name)
                self._set("direct", member["io_mode"] == "direct", name)
            for use in USES:
                self._set("blocks", status["blocks"][use] * status["block_bytes"], use)
            self._set("entries", status["entries"])
            self._set("live", status["live_bytes"])
            self._set("capacity", status["capacity_bytes"])
            self._set("backlog", status["write_backlog_bytes"])
            self._set("queue", status.get("put_queue_bytes", 0))
            self._set("jobs", status["jobs_in_flight"])
            self._set("recovery", status["recovery_s"])
            self._set("healthy", status["healthy"] and not self._closing.is_set())

    def _series(self, key: str, value: str) -> Any:
        return self._metrics[key].labels(*self._labels, *([value] if value else []))

    def _count(self, key: str, value: str, total: float) -> None:
        """Raise a counter to a total that the store counted; counters only ever grow."""
        grown = total - self._seen.get((key, value), 0.0)
        series = self._series(key, value)
        if grown > 0:
            self._seen[key, value] = total
            series.inc(grown)

    def _set(self, key: str, number: float, value: str = "") -> None:
        self._series(key, value).set(number)


def _place(name: str) -> tuple[str, str]:
    """Return the metric that a counter of the store is shown in, and the value of its label."""
    if name in _PLACES:
        return _PLACES[name]
    for prefix, (metric, shown) in _PREFIXES.items():
        if name.startswith(prefix):
            return metric, shown + name.removeprefix(prefix)
    return "events", name


_made: WeakKeyDictionary[CollectorRegistry, dict[str, Any]] = WeakKeyDictionary()
_serving: set[tuple[str, int]] = set()
_lock = threading.Lock()


def _metrics(registry: CollectorRegistry) -> dict[str, Any]:
    """Make the metrics of a registry once: a second store of the process shares them."""
    with _lock:
        if registry not in _made:
            _made[registry] = {
                key: Counter(m.name, m.text, _label_names(m), registry=registry)
                for key, m in COUNTERS.items()
            } | {
                # of processes that live, the value set last: labels tell their processes apart
                key: Gauge(
                    m.name,
                    m.text,
                    _label_names(m),
                    registry=registry,
                    multiprocess_mode="livemostrecent",
                )
                for key, m in GAUGES.items()
            }
        return _made[registry]


def _label_names(metric: Metric) -> tuple[str, ...]:
    return (*COMMON_LABELS, metric.label) if metric.label else COMMON_LABELS


def publish(
    status: Callable[[], Mapping[str, Any]],
    config: MetricsConfig,
    *,
    role: str,
    model_name: str = "",
    worker_id: str = "",
) -> MetricsPublisher | None:
    """Publish a store's metrics as configured.

    Parameters
    ----------
    status : callable
        As for `MetricsPublisher`.
    role : {"mp", "worker"}
        LMCache's server, or a worker of vLLM.

    Returns
    -------
    MetricsPublisher or None
        None if metrics are switched off, or cannot be had: the cache works without them.
    """
    if not config.enabled:
        return None
    try:
        publisher = MetricsPublisher(status, (role, model_name, worker_id))
    except OSError as problem:
        log.error("no metrics: %s; does PROMETHEUS_MULTIPROC_DIR name a directory?", problem)
        return None
    if config.port is not None:
        _serve(config.host, config.port)
    return publisher


def _serve(host: str, port: int) -> None:
    """Serve the process' metrics over HTTP; of all processes where they share a directory."""
    with _lock:
        if (host, port) in _serving:
            return
        registry = REGISTRY
        if ValueClass._multiprocess:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        try:
            start_http_server(port, addr=host, registry=registry)
        except OSError as problem:
            log.warning(
                "no metrics at %s:%d: %s. Another worker may serve it; set "
                "PROMETHEUS_MULTIPROC_DIR, so that one of them shows all, or choose another "
                "metrics.port",
                host,
                port,
                problem.strerror,
            )
            return
        _serving.add((host, port))
