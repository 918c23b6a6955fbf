"""Stores that are open in this process.

LMCache's API can construct a plugin again without closing the first one. A second opener of a
shard would be refused, so the second plugin attaches to the store that is open; the last one to
close closes it. A plugin that was dropped without being closed does not count: it is only not
the one that closes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fx100_lmcache.config import Config
from fx100_lmcache.counters import PLUGIN, defects_in
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.inprocess.layers import Promises
from fx100_lmcache.lmcache.inprocess.loads import Loads
from fx100_lmcache.lmcache.inprocess.notices import FOLDER, Notices, open_notices
from fx100_lmcache.lmcache.inprocess.puts import PutQueue, SecondTouch
from fx100_lmcache.metrics import MetricsPublisher, publish
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.volume.arrival import wait_for_members

log = logging.getLogger(__name__)

CLOSE_S = 9.5
"""For all of close: LMCache gives its whole engine 15 s."""

MAX_DRAIN_S = 2.0
FAREWELL_S = 0.25

Key = tuple[Path, int]


@dataclass(eq=False)
class OpenStore:
    """A store with the threads around it.

    Attributes
    ----------
    shard : int
        The one that is open.
    limit_bytes : int
        Host memory that queued puts may hold.
    users : WeakSet
        Plugins attached.
    promises : Promises
        What lookups of layerwise mode have promised.
    metrics : MetricsPublisher or None
        Of this store, once its labels are known.
    notices : Notices or None
        Shared with the other ranks of the engine, if there are any.
    """

    mounted: Mounted
    shard: int
    limit_bytes: int
    counts: Counts = field(default_factory=lambda: Counts(PLUGIN))
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    promises: Promises = field(default_factory=Promises)
    metrics: MetricsPublisher | None = None
    notices: Notices | None = None
    closed: bool = False
    puts: PutQueue = field(init=False)
    loads: Loads = field(init=False)

    def __post_init__(self) -> None:
        store, config = self.mounted.store, self.mounted.config
        second_touch = SecondTouch() if config.inprocess.admission == "second_touch" else None
        limit_bytes = min(self.limit_bytes, config.io.max_write_bytes)
        self.puts = PutQueue(store, self.counts, limit_bytes, second_touch)
        try:
            self.loads = Loads(store, self.counts, config.deadlines.load_s, self.puts)
        except BaseException:
            self.puts.close(FAREWELL_S)
            raise

    def status(self) -> dict[str, Any]:
        """Say how the store and its threads are, as plain values."""
        status, counts = self.mounted.store.status(), self.counts.snapshot()
        problems = [*status["problems"], *defects_in(counts)]
        if not self.closed and not (self.puts.alive and self.loads.alive):
            problems.append("a thread of the plugin has died: restart vLLM")
        return {
            **status,
            "healthy": not problems,
            "problems": problems,
            "put_queue_bytes": self.puts.held_bytes,
            "plugin_counts": counts,
        }

    def publish(self, model_name: str, worker_id: str) -> None:
        """Show metrics, unless a plugin attached before has begun that."""
        if self.metrics is None:
            self.metrics = publish(
                self.status,
                self.mounted.config.metrics,
                role="worker",
                volume=str(self.mounted.volume.label.volume),
                shard=str(self.shard),
                model_name=model_name,
                worker_id=worker_id,
            )

    def close(self) -> None:
        """Write what is queued, as far as the time goes, and close the store."""
        self.closed = True
        with ExitStack() as steps:  # each is taken whatever the others do; the last one first
            if self.metrics is not None:
                steps.callback(self.metrics.close)
            if self.notices is not None:
                steps.callback(self.notices.close)
            steps.callback(self.loads.close, FAREWELL_S)
            steps.callback(self.puts.close, FAREWELL_S)
            steps.callback(self._close_store)

    def _close_store(self) -> None:
        close_s = self.mounted.config.deadlines.close_s
        self.puts.drain(max(0.0, min(MAX_DRAIN_S, CLOSE_S - close_s)))
        left = self.mounted.close()
        if left:
            log.error("closed with %d transfers still in the kernel", left)


_lock = threading.Lock()
_open: dict[Key, OpenStore] = {}


def attach(
    user: Any,
    path: Path,
    shard: int,
    config: Config,
    limit_bytes: int,
    first_shard: int | None = None,
) -> OpenStore:
    """Return the store of a configuration file and shard, opening it if need be.

    Parameters
    ----------
    user : object
        The plugin that attaches.
    config : Config
        What the file says now.
    limit_bytes : int
        Host memory that queued puts may hold.
    first_shard : int or None
        That of the first of several ranks that tell each other of failed loads.

    Raises
    ------
    FX100Error
        If it cannot be opened; says which device is wrong, and what to do.
    """
    key = path.resolve(), shard
    if key not in _open:  # not under the lock, so that others can detach meanwhile
        wait_for_members(config, config.deadlines.start_s)
    with _lock:
        opened = _open.get(key)
        if opened is None:
            opened = _open[key] = _opened(config, shard, limit_bytes, first_shard)
        elif opened.mounted.config != config:
            log.warning("%s was changed; that takes effect after a restart", path)
        opened.users.add(user)
        return opened


def _opened(config: Config, shard: int, limit_bytes: int, first_shard: int | None) -> OpenStore:
    mounted = mount(config, shards=[shard])
    try:
        opened = OpenStore(mounted, shard, limit_bytes)
    except BaseException:
        mounted.close()
        raise
    if first_shard is not None:
        name = f"fx100-{mounted.volume.label.volume.hex}-{first_shard}.failed-loads"
        opened.notices = open_notices(FOLDER, name)
    return opened


def detach(user: Any, opened: OpenStore) -> None:
    """Let go of a store; the last one closes it."""
    with _lock:
        opened.users.discard(user)
        if opened.users:
            return
        for key in [key for key, value in _open.items() if value is opened]:
            del _open[key]
        opened.close()
