"""Prometheus metrics of a store, for both adapters.

The metrics are ordinary ``prometheus_client`` objects in the default registry, so they appear
where the host process shows its own: at ``/metrics`` of LMCache's server, and beside vLLM's where
``PROMETHEUS_MULTIPROC_DIR`` is set. A thread brings them up to date once a second from the
store's own counters; nothing on the data path knows of Prometheus.

Every series that is known in advance is there from the start, at zero: where none is, no store
was opened. ``docs/metrics.md`` lists them all.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import ValueClass

from fx100_lmcache.config import MetricsConfig
from fx100_lmcache.counters import ADAPTER, PLUGIN, STORE

log = logging.getLogger(__name__)

UPDATE_S = 1.0

COMMON_LABELS = ("role", "model_name", "worker_id", "volume", "shard")
"""The first three as LMCache names them; empty where unknown."""


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


def place_of(counter: str) -> tuple[str, str]:
    """Return the metric that a counter is shown in, and the value of its label."""
    if counter in _PLACES:
        return _PLACES[counter]
    for prefix, (metric, shown) in _PREFIXES.items():
        if counter.startswith(prefix):
            return metric, shown + counter.removeprefix(prefix)
    return "events", counter


def _shown_in(wanted: str) -> dict[str, str]:
    """Return the values of a metric's label, and what they mean."""
    placed = [(place_of(name), text) for name, text in ({**STORE, **ADAPTER, **PLUGIN}).items()]
    return {value: text for (metric, value), text in placed if metric == wanted}


LOOKUPS = _shown_in("lookups")
LOADS = _shown_in("loads")
PUTS = _shown_in("puts")
EVENTS = _shown_in("events")
USES = {
    "free": "may be written to",
    "used": "hold objects, or are being written or erased, or read after that",
    "quarantined": "the kernel may still write there, or the inode is not erased yet",
    "withheld": "were never written, and the storage below has no room for them",
}
INODE_USES = {
    "free": "one more object each",
    "used": "belong to an object, or to one that is being written or erased",
    "withheld": "were never written, and the storage below has no room for them",
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
    "inodes": Metric("fx100_inodes", "Inodes by what they are used for.", "use", INODE_USES),
    "share": Metric("fx100_used_share", "Larger of the shares of blocks and of inodes in use."),
    "backlog": Metric("fx100_write_backlog_bytes", "Bytes of puts that the store is writing."),
    "queue": Metric("fx100_put_queue_bytes", "worker: host memory held by chunks to be stored."),
    "jobs": Metric("fx100_jobs_in_flight", "Reads and writes of objects, queued or in the kernel."),
    "recovery": Metric("fx100_recovery_seconds", "Seconds that it took to read the index."),
    "up": Metric("fx100_member_up", "1 if the member is up, 0 if suspect or down.", "member"),
    "stuck": Metric("fx100_member_stuck_io", "Transfers past their deadline.", "member"),
    "short": Metric("fx100_member_no_space", "1 if the storage below is out of space.", "member"),
    "direct": Metric("fx100_member_direct_io", "1 if direct I/O is in force, else 0.", "member"),
}


class MetricsPublisher:
    """Keeps the metrics of one store up to date until it is closed.

    Parameters
    ----------
    status : callable
        Returns `Store.status`, with what the adapter adds to it: ``adapter_counts``,
        ``plugin_counts``, ``put_queue_bytes``.
    labels : tuple of str
        Values of `COMMON_LABELS`.
    """

    def __init__(
        self,
        status: Callable[[], Mapping[str, Any]],
        labels: tuple[str, str, str, str, str],
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._status = status
        self._labels = labels
        self._metrics = _metrics(registry)
        self._seen: dict[tuple[str, str], float] = {}
        self._members: set[str] = set()
        self._lock = threading.Lock()
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fx100-metrics", daemon=True)
        for key, metric in (COUNTERS | GAUGES).items():
            for value in metric.values if metric.label else ("",):
                self._series(key, value)
        self._thread.start()
        self._refresh()

    def _run(self) -> None:
        while not self._closing.wait(UPDATE_S):
            self._refresh()

    def close(self) -> None:
        """Stop; the last values stay, and the tier counts as not healthy. Never raises."""
        self._closing.set()
        self._refresh()

    def _refresh(self) -> None:
        """Update; when that fails the tier is not known to work, so it is not shown as healthy."""
        try:
            self.update()
            self._failing = False
        except Exception:
            if not self._failing:  # once a second would hide everything else
                log.exception("metrics are not up to date")
            self._failing = True
            with contextlib.suppress(Exception):
                self._set("healthy", 0)

    def update(self) -> None:
        """Bring all metrics up to date."""
        status = self._status()
        with self._lock:
            for kind in _COUNTS_OF_STATUS:
                for name, total in status.get(kind, {}).items():
                    metric, value = place_of(name)
                    self._count(metric, value, total * (1e-6 if name.endswith("_us") else 1))
            self._show_members(status["members"])
            for use in USES:
                self._set("blocks", status["blocks"][use] * status["block_bytes"], use)
            for use in INODE_USES:
                self._set("inodes", status["inodes"][use], use)
            self._set("share", status["used_share"])
            self._set("entries", status["entries"])
            self._set("live", status["live_bytes"])
            self._set("capacity", status["capacity_bytes"])
            self._set("backlog", status["write_backlog_bytes"])
            self._set("queue", status.get("put_queue_bytes", 0))
            self._set("jobs", status["jobs_in_flight"])
            self._set("recovery", status["recovery_s"])
            self._set("healthy", status["healthy"] and not self._closing.is_set())

    def _show_members(self, members: Sequence[Mapping[str, Any]]) -> None:
        for member in members:
            name = member["name"]
            self._count("errors", name, member["errors"])
            self._set("up", member["state"] == "up", name)
            self._set("stuck", member["stuck"], name)
            self._set("short", member["no_space_below"], name)
            self._set("direct", member["io_mode"] == "direct", name)
        names = {member["name"] for member in members}
        for name in self._members - names:  # it came back under another name
            for gauge in ("up", "stuck", "short", "direct"):
                self._set(gauge, float("nan"), name)
        self._members = names

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
    volume: str,
    shard: str = "",
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
    volume : str
        UUID of the volume, as `fx100 status` shows it.
    shard : str
        Of a worker.

    Returns
    -------
    MetricsPublisher or None
        None if metrics are switched off, or cannot be had: the cache works without them.
    """
    if not config.enabled:
        return None
    try:
        publisher = MetricsPublisher(status, (role, model_name, worker_id, volume, shard))
    except OSError as problem:
        log.error("no metrics: %s; does PROMETHEUS_MULTIPROC_DIR name a directory?", problem)
        return None
    except Exception:
        log.exception("no metrics")
        return None
    if config.port is not None:
        _serve(config.host, config.port)
    return publisher


def _serve(host: str, port: int) -> None:
    """Serve the process' metrics over HTTP; of all processes where they share a directory."""
    with _lock:
        if (host, port) in _serving:
            return
        try:
            registry = REGISTRY
            if ValueClass._multiprocess:
                registry = CollectorRegistry()
                MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
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
        except Exception:
            log.exception("no metrics at %s:%d", host, port)
        else:
            _serving.add((host, port))
