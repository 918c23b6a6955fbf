"""After a restart: tell listeners what is in the store already, without delaying service.

LMCache's eviction policies know only what they were told of. Batches are made and told on the
event thread, each between two events: an entry of a batch was live when the batch was made, and
whatever happens to it later is told later. So no listener keeps a key that is gone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from fx100_lmcache.lmcache.compat.mp import L2AdapterListener, ObjectKey
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.lmcache.mp.keys import KeyNamer
from fx100_lmcache.store import Store

log = logging.getLogger(__name__)

BATCH = 256
"""Keys told at once: some milliseconds of work."""

MAX_RECENT = 65_536


class Replays:
    """Listeners that have not heard of everything yet. Thread-safe."""

    def __init__(self, store: Store, keys: KeyNamer, boundary: ErrorBoundary) -> None:
        self._store = store
        self._keys = keys
        self._boundary = boundary
        self._lock = threading.Lock()  # listeners register while the event thread is at work
        self._open: deque[_Replay] = deque()

    def add(self, listener: L2AdapterListener) -> bool:
        """Begin to tell a listener what is in the store now; False if there is nothing."""
        if not len(self._store):
            return False
        replay = _Replay(listener, self._store.oldest_first(BATCH))
        with self._lock:
            self._open.append(replay)
        return True

    def note_used(self, keys: Sequence[ObjectKey]) -> None:
        """Remember what was stored or read meanwhile: it is newer than all that is replayed."""
        with self._lock:
            replays = list(self._open)
        for replay in replays:
            replay.note_used(keys)

    def step(self) -> bool:
        """Tell one batch to one listener; True if there is more. On the event thread only."""
        with self._lock:
            if not self._open:
                return False
            replay = self._open[0]
        ended = True
        with self._boundary.caught("event_errors", "a listener hears no more of what was there"):
            ended = replay.announce_batch(self._keys)
        with self._lock:
            self._open.rotate(-1)
            if ended:
                self._open.remove(replay)
            return bool(self._open)

    @property
    def pending(self) -> int:
        """Listeners still to be told something."""
        return len(self._open)


class _Replay:
    def __init__(
        self, listener: L2AdapterListener, batches: Iterator[list[tuple[bytes, int, int]]]
    ) -> None:
        self._listener = listener
        self._batches = batches
        self._recent: dict[ObjectKey, None] = {}
        self._announced = 0

    def note_used(self, keys: Sequence[ObjectKey]) -> None:
        for key in reversed(keys):  # of a request the first key is worth most
            self._recent.pop(key, None)
            self._recent[key] = None
        while len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    def announce_batch(self, keys: KeyNamer) -> bool:
        """Tell the next batch; True if that was all."""
        batch = next(self._batches, None)
        if batch is None:
            # policies take the first of a list as the most valuable, so newest first
            if self._recent:
                self._listener.on_l2_keys_accessed(list(reversed(self._recent)))
            log.info("told a listener of %d entries that were there before", self._announced)
            return True
        named = [(keys.key_of(digest, meta), length) for digest, length, meta in reversed(batch)]
        known = [(key, length) for key, length in named if key is not None]
        if known:
            self._listener.on_l2_keys_stored([k for k, _ in known], [n for _, n in known])
            self._announced += len(known)
        return False
