"""Puts: a bounded queue, so that the model's thread only hands over and goes on.

Objects in the queue keep LMCache's host memory. Past the bound they are dropped and counted: it
is a cache, and the next request that computes them offers them again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.lmcache.buffers import io_buffer, layout_of, packed_meta
from fx100_lmcache.lmcache.compat.inprocess import CacheEngineKey
from fx100_lmcache.lmcache.compat.memory import MemoryObj
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.lmcache.events import EventThread, Handler
from fx100_lmcache.ondisk.chunk_meta import Scope
from fx100_lmcache.store import PutItem, PutResult, Store

log = logging.getLogger(__name__)

Notified = Callable[[CacheEngineKey], None]

AFTER_S = 1.0
"""So long after its deadline a put whose call failed is surely over."""

MAX_REMEMBERED = 131_072
"""Chunks seen once, under second-touch admission: about 1,100 sessions of 29,800 tokens."""


@dataclass(slots=True, eq=False)
class Offer:
    """One object to store.

    Attributes
    ----------
    scope : Scope
        Everything of the key but its hash.
    on_complete : callable or None
        Given the key when the object can be read back.
    """

    key: CacheEngineKey
    digest: bytes
    scope: Scope
    obj: MemoryObj
    on_complete: Notified | None = None
    size: int = 0


@dataclass(slots=True)
class _Done:
    offer: Offer
    result: PutResult


class SecondTouch:
    """Admits what is offered a second time: one-shot prompts are then never written."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._seen: dict[int, None] = {}

    def admits(self, digest: bytes) -> bool:
        """Whether this is the second offer; otherwise remember the first."""
        mark = hash(digest)  # two that collide are admitted a little too early
        if mark in self._seen:
            del self._seen[mark]
            return True
        self._seen[mark] = None
        if len(self._seen) > self._limit:
            del self._seen[next(iter(self._seen))]
        return False


class PutQueue:
    """Objects on their way into the store. Thread-safe.

    Parameters
    ----------
    limit_bytes : int
        Host memory that queued objects may hold; one object is always taken.
    second_touch : SecondTouch or None
        What is written; None: everything.
    """

    def __init__(
        self, store: Store, counts: Counts, limit_bytes: int, second_touch: SecondTouch | None
    ) -> None:
        self._store = store
        self._counts = counts
        self._boundary = ErrorBoundary(counts)
        self._limit_bytes = limit_bytes
        self._second_touch = second_touch
        self._lock = threading.Condition()
        self._held: dict[bytes, Offer] = {}
        self._held_bytes = 0
        self._released = 0
        self._closed = False
        self._dropped = BurstLog(log, "chunks were not stored")
        handlers = {Offer: Handler(each=self._begin), _Done: Handler(each=self._finish)}
        self._events = EventThread(handlers, lambda: False, self._boundary, name="fx100-puts")
        self._events.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs that writes what is queued."""
        return self._events.alive

    def offer(self, offers: Sequence[Offer]) -> None:
        """Take objects over, as far as the bound allows; each taken gets a reference."""
        for offer in offers:
            with self._boundary.caught("put_refused", "a chunk cannot be stored"):
                reason = self._take(offer)
                if reason is not None:
                    self._not_taken(reason)

    def _not_taken(self, reason: str) -> None:
        self._counts.add(f"put_{reason}")
        if reason == "queue_full":
            self._dropped.note(f"the queue holds {self._limit_bytes} bytes of host memory already")

    def _take(self, offer: Offer) -> str | None:
        """Keep an object, or say why not."""
        offer.size = int(offer.obj.get_size())
        with self._lock:
            if self._closed:
                return "closed"
            if offer.digest in self._held:
                return "duplicate"
            if self._held and self._held_bytes + offer.size > self._limit_bytes:
                return "queue_full"
            if self._second_touch is not None and not self._second_touch.admits(offer.digest):
                return "not_admitted"
            offer.obj.ref_count_up()
            self._held[offer.digest] = offer
            self._held_bytes += offer.size
        self._events.post(offer)
        return None

    def holds(self, digest: bytes) -> bool:
        """Whether an object is on its way."""
        return digest in self._held

    @property
    def held_bytes(self) -> int:
        """Host memory held."""
        return self._held_bytes

    @property
    def released(self) -> int:
        """Objects given back so far."""
        return self._released

    def wait_for_release(self, since: int, until: float) -> bool:
        """Wait until more objects were given back than ``since``.

        Returns
        -------
        bool
            False if none is on its way, or at ``until`` on the monotonic clock.
        """
        with self._lock:
            self._lock.wait_for(
                lambda: self._released != since or not self._held_bytes, until - time.monotonic()
            )
            return self._released != since

    def _begin(self, offer: Offer) -> None:
        """Put one object; one at a time, so that each is let go when it is written."""

        def done(results: list[PutResult]) -> None:
            self._events.post(_Done(offer, results[0]))

        item = None
        with self._boundary.caught("put_refused", "a chunk cannot be stored"):
            meta = packed_meta(offer.scope, layout_of(offer.obj))
            item = PutItem(offer.digest, meta, io_buffer(offer.obj))
        if item is None:
            self._release(offer)
            return
        with self._boundary.caught("put_errors", "a chunk was not stored"):
            self._store.put([item], done)
            return
        # it may be on its way, and its bytes are hashed only as they are written: the memory must
        # not be used again before the store publishes it no more
        failed = _Done(offer, PutResult(False, reason="internal error"))
        self._events.post(failed, delay_s=self._store.options.store_s + AFTER_S)

    def _finish(self, event: _Done) -> None:
        offer, result = event.offer, event.result
        if not self._release(offer):
            return
        if not result.stored:
            self._counts.add("put_failed")
            self._dropped.note(result.reason)
        elif offer.on_complete is not None:
            self._notify(offer.on_complete, offer.key)

    def _notify(self, on_complete: Notified, key: CacheEngineKey) -> None:
        with self._boundary.caught("callback_errors", "an on_complete_callback failed"):
            on_complete(key)

    def _release(self, offer: Offer) -> bool:
        """Give an object back, once."""
        with self._lock:
            if self._held.get(offer.digest) is not offer:
                return False
            del self._held[offer.digest]
        with self._boundary.caught("put_errors", "LMCache did not take an object back"):
            offer.obj.ref_count_down()
        with self._lock:
            self._held_bytes -= offer.size
            self._released += 1
            self._lock.notify_all()
        return True

    def drain(self, timeout_s: float) -> None:
        """Take nothing more, and wait until everything is written or the time is over."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._held_bytes, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Stop after the store has closed, and let go of what is left."""
        self._events.close(timeout_s)
        with self._lock:
            left = list(self._held.values())
        for offer in left:
            self._release(offer)
        self._counts.add("put_abandoned", len(left))
