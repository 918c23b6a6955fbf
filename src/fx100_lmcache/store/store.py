"""The store: the one place that ties volume, claims, recovery and pipelines together."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fx100_lmcache.buffers import return_memory
from fx100_lmcache.engine.jobs import Engine
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta
from fx100_lmcache.ondisk.reason import IMPOSSIBLE, TEXTS, Reason
from fx100_lmcache.store.clear import Clearer
from fx100_lmcache.store.erase import Eraser
from fx100_lmcache.store.heartbeat import Heartbeat
from fx100_lmcache.store.load import Loader
from fx100_lmcache.store.lookup import describe, lookup, touch, unpin
from fx100_lmcache.store.ownership import Ownership
from fx100_lmcache.store.put import Putter
from fx100_lmcache.store.report import problems_of, status_of
from fx100_lmcache.store.state import Core, Evicted, SpaceReport, StoreOptions
from fx100_lmcache.store.trials import SpaceTrials
from fx100_lmcache.store.types import LoadItem, LoadResult, PutItem, PutResult
from fx100_lmcache.volume.claiming import Claimer, Taken
from fx100_lmcache.volume.machine import Machine, this_machine
from fx100_lmcache.volume.recovery import Recovered, recover
from fx100_lmcache.volume.volume import Volume

log = logging.getLogger(__name__)

_UNDO_S = 5.0  # for what a constructor that fails has begun to write
_POLL_S = 0.002
_SHORTEST_WAIT_S = 0.1
_CONFIRMATIONS = 5  # looks at claims that have just been made, before giving up
_MANY_ENTRIES = 100_000  # from here on recovery leaves much memory to give back


class Store:
    """Objects by digest on the shards of a volume. Thread-safe.

    Callbacks may come from any thread, also from within the call that caused them, and while
    the store's lock is held: they must hand over and return.

    In a forked child the copy is inert: lookups and loads miss, puts are dropped, :meth:`close`
    returns at once, and the parent, its claims and its locks are left alone.

    Parameters
    ----------
    volume : Volume
        A complete volume; the caller closes its members after :meth:`close`.
    engine : Engine
        Moves pieces of the volume's members.
    shards : sequence of int or None
        Shards to own; all of them if None.
    wall_clock : callable
        Unix time in seconds, for claims.
    take_over : bool
        An operator's word that the owner on another host is dead.
    machine : Machine or None
        Where and by which clock claims are made; None for the one that this process runs on.
    heartbeat : bool
        Renew the claims on a thread. Without it somebody calls :meth:`beat`.

    Raises
    ------
    ClaimError
        If a shard is owned by somebody else. To find out may take the watched time.
    OSError
        If a member cannot be read.

    After an exception the claims are given back and the engine is closed.
    """

    def __init__(
        self,
        volume: Volume,
        engine: Engine,
        *,
        shards: Sequence[int] | None = None,
        options: StoreOptions | None = None,
        wall_clock: Callable[[], float] = time.time,
        take_over: bool = False,
        machine: Machine | None = None,
        heartbeat: bool = True,
    ) -> None:
        geometry = volume.geometry
        owned = list(range(geometry.shards)) if shards is None else list(shards)
        self.volume = volume
        self.options = options or StoreOptions()
        self._core = Core(geometry, volume.uuid, engine, owned, self.options)
        self._engine = engine  # not gated: for claims alone
        self._machine = machine or this_machine()
        self._ownership: Ownership | None = None
        claimer = Claimer(
            volume.members,
            geometry,
            volume.uuid,
            self._machine,
            self.options.claim_timing,
            take_over,
        )
        try:
            self._open(claimer.take(owned, wall_clock()), heartbeat)
        except BaseException:
            self._undo()
            raise
        _stores.add(self)

    def _undo(self) -> None:
        """Leave nothing behind: what was begun is ended before the claims are given back."""
        self._core.closing = True
        self._end(_UNDO_S)

    def _open(self, taken: Taken, heartbeat: bool) -> None:
        core, claims = self._core, taken.claims
        core.generations = {shard: claim.generation for shard, claim in claims.items()}
        core.epoch = max(claim.epoch for claim in claims.values())
        timing = self.options.claim_timing
        self._ownership = Ownership(core, self._engine, self._machine, timing, taken)
        core.engine.open_to_writes = self._ownership.may_write
        self._heartbeat = Heartbeat(self._ownership)
        if heartbeat:
            self._heartbeat.start()  # recovery may take longer than others watch
        self._eraser = Eraser(self._core)
        self._putter = Putter(self._core, self._eraser)
        self._loader = Loader(self._core, self._eraser)
        self._clearer = Clearer(self._core, self._ownership, self._eraser)
        self.recovery_s = 0.0
        self.torn_inodes = 0
        self.dropped_inodes: dict[str, int] = {}
        self._recover()
        self._engine.on_look = SpaceTrials(self._core, self._owner.check).look
        if len(self) > _MANY_ENTRIES:
            return_memory()

    def _recover(self) -> None:
        core = self._core
        started = time.perf_counter()
        found = recover(
            self.volume.members,
            core.geometry,
            core.volume,
            core.generations,
            claim_epoch=core.epoch,
        )
        core.epoch = max(core.epoch, found.next_epoch)
        core.generations.update(found.generations)  # a claim lost in a power cut said less
        self._adopt(found)
        self.recovery_s = time.perf_counter() - started
        self.torn_inodes = found.torn
        self.dropped_inodes = found.dropped_by_reason
        self._count(found)
        self._confirm()
        self._eraser.erase_stale(found.stale_rows + found.unreadable_rows)
        log.info(
            "recovered %d entries in %.2f s (%d torn, %d stale, %d unreadable inodes)",
            len(found),
            self.recovery_s,
            found.torn,
            len(found.stale_rows),
            len(found.unreadable_rows),
        )

    def _confirm(self) -> None:
        """Wait until our claims have settled.

        Raises
        ------
        ClaimError
            If somebody else was faster.
        OSError
            If the members do not answer, or memory lacks.
        """
        owner, within_s = self._owner, min(self.options.load_s, self.options.store_s) + 1
        for _ in range(_CONFIRMATIONS):
            if owner.may_write():
                return
            if owner.lost_to:
                raise ClaimError(
                    f"a shard was claimed by another host at the same time: {owner.lost_to}. A "
                    "shard has one owner",
                    remedy="stop one of the two servers",
                )
            if (wait_s := owner.settles_in_s) > 0:
                self._machine.sleep(1.01 * wait_s)  # not a rounding error too short
            answered = threading.Event()
            owner.renew(lambda _, answered=answered: answered.set())  # type: ignore[misc]
            answered.wait(within_s)
            if owner.failure is not None:
                break
        if not owner.may_write():
            why = f": {owner.failure!r}" if owner.failure is not None else ""
            what = f"the claims on the shards could not be confirmed{why}"
            raise OSError(errno.EIO, what) from owner.failure

    def _count(self, found: Recovered) -> None:
        """Count what was not taken, and say what should never have been there."""
        counts = self._core.counts
        counts["torn_inodes"] += found.torn
        counts["unreadable_inodes"] += len(found.unreadable_rows)
        for reason, number in self.dropped_inodes.items():
            counts[f"inodes_dropped_{reason}"] += number
            if number and reason in IMPOSSIBLE:
                log.error(
                    "volume %s: %d inodes dropped that no sound server writes: %s",
                    self.volume.label.volume,
                    number,
                    TEXTS[Reason(reason)],
                )

    def _adopt(self, found: Recovered) -> None:
        catalog = self._core.catalog
        for row in found.held_rows:
            self._core.space.hold_slot(row)
        numbers = np.array([catalog.intern_meta(meta) for meta in found.metas], np.int64)
        self._core.space.mark_recovered(found.rows, found.locations)
        self._core.ledger.recover(int(found.blocks.sum()))
        catalog.add_recovered(
            found.rows,
            found.words,
            length=found.length,
            blocks=found.blocks,
            meta=numbers[found.meta_ids] if len(found) else found.meta_ids,
            members=found.members,
            locations=found.locations,
            checksums=found.checksums,
            piece_counts=found.piece_counts,
            age=found.age,
        )

    def put(
        self,
        items: Sequence[PutItem],
        on_done: Callable[[list[PutResult]], None],
        deadline_s: float | None = None,
    ) -> None:
        """Store objects; see :class:`~fx100_lmcache.store.put.Putter`."""
        if self.forked:
            on_done([PutResult(False, reason="forked")] * len(items))
            return
        core = self._core
        until = core.engine.now() + (deadline_s or self.options.store_s)
        unanswered = [(items, on_done)]  # taken by the look at the claim, or at the deadline

        def answer(ours: bool, refused_since: str) -> None:
            with core.lock:
                if not unanswered:
                    return
                items, on_done = unanswered.pop()
            if ours:
                left_s = until - core.engine.now()  # the look at the claim took some of it
                self._putter.put(items, on_done, max(left_s, 1e-3))
            else:
                self._putter.refuse(items, on_done, refused_since)

        def go(ours: bool) -> None:
            answer(ours, "" if ours else self._owner.why_not())

        def too_late() -> None:
            answer(False, "deadline")

        self._owner.check(go)
        if unanswered:
            core.engine.call_at(until, too_late)

    def load(
        self,
        items: Sequence[LoadItem],
        on_done: Callable[[list[LoadResult]], None],
        *,
        hold: bool = True,
        deadline_s: float | None = None,
    ) -> None:
        """Read objects; see :class:`~fx100_lmcache.store.load.Loader`."""
        if self.forked:
            on_done([LoadResult(0, "forked")] * len(items))
            return
        self._loader.load(items, on_done, hold=hold, deadline_s=deadline_s)

    def lookup(
        self,
        digests: Sequence[bytes],
        *,
        pin: bool = False,
        prefix: bool = False,
        accept: Callable[[ChunkMeta], bool] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Say which objects could be loaded now, from memory alone.

        Parameters
        ----------
        pin : bool
            Take one pin on each object found; pinned objects are not evicted.
        prefix : bool
            What comes after the first miss is a miss too, and is neither pinned nor touched.
        accept : callable or None
            Whether an entry that describes itself so would do. Asked once for each distinct
            description.

        Returns
        -------
        bool array, one element for each digest.
        """
        if self.forked:
            return np.zeros(len(digests), np.bool_)
        pin_s = self.options.pin_ttl_s if pin else 0.0
        return lookup(self._core, digests, pin_s=pin_s, prefix=prefix, accept=accept)

    def describe(self, digests: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """Return ``(length, meta number)`` of each object, None for those that are not there."""
        return describe(self._core, digests)

    def touch(self, digests: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Mark objects as just used, the first most recently; return which are there."""
        if self.forked:
            return np.zeros(len(digests), np.bool_)
        return touch(self._core, digests)

    def unpin(self, digests: Sequence[bytes]) -> int:
        """Give back one pin for each digest; return how many were held."""
        if self.forked:
            return 0
        return unpin(self._core, digests)

    def remove(
        self,
        digests: Sequence[bytes],
        *,
        force: bool = False,
        on_removed: Callable[[list[tuple[bytes, int]]], None] | None = None,
    ) -> list[tuple[bytes, int]]:
        """Remove objects; return digest and length of those removed.

        Pinned objects stay, unless forced. An object that is being read goes at once from the
        catalog, and its space is reused after the last reader.

        Parameters
        ----------
        on_removed : callable or None
            Given the same list while the lock is held, so before anything else can happen.
        """
        core = self._core
        removed: list[tuple[bytes, int]] = []
        if not digests or self.forked:
            return removed
        with core.lock:
            for row in dict.fromkeys(core.catalog.find(digests).tolist()):
                if row < 0 or (core.catalog.pinned(row, core.engine.now()) and not force):
                    continue
                entry = self._eraser.drop(row)
                if entry is not None:
                    removed.append((entry.digest, entry.length))
            core.counts["removes"] += len(removed)
            if on_removed is not None and removed:
                on_removed(removed)
        return removed

    def clear(self) -> int:
        """Forget everything, pinned or not; return how many entries there were.

        0 also if the shards are not ours any more. Waits for one look at the claim.
        """
        if self.forked:
            return 0
        found: list[int] = []
        looked = threading.Event()

        def go(_: bool) -> None:
            # with every member away nobody can say whose the shards are, and nothing is written
            found.append(0 if self._owner.lost_to else self._clearer.clear())
            looked.set()

        self._owner.check(go, look=True)
        looked.wait(self.options.load_s + 1)
        return sum(found)

    def beat(self) -> float | None:
        """Renew the claims, as the heartbeat's thread does; return seconds until the next time."""
        return self._owner.beat()

    def adopt_member(self, member: Member) -> bool:
        """Claim our shards on a member that has come back under another name. May block.

        Raises
        ------
        OSError
            If it cannot be read or written.
        """
        return not self.forked and self._owner.adopt(member)

    def on_evicted(self, handler: Evicted) -> None:
        """Have ``handler`` called with ``(digest, length, meta number)`` of what was evicted."""
        self._core.on_evicted = handler

    def meta(self, number: int) -> ChunkMeta:
        """Metadata by its number."""
        return self._core.meta(number)

    def entries(
        self, start_row: int = 0, limit: int | None = None
    ) -> list[tuple[int, bytes, int, int]]:
        """List live entries as ``(row, digest, length, meta number)``, in row order."""
        core = self._core
        with core.lock:
            rows = core.catalog.live_rows(start_row, limit)
            return [(e.row, e.digest, e.length, e.meta) for e in map(core.catalog.entry, rows)]

    def oldest_first(self, batch: int = 4096) -> Iterator[list[tuple[bytes, int, int]]]:
        """Yield ``(digest, length, meta number)`` of all entries, least recently used first.

        Their order is that of now; those that are gone when their batch is made are left out.
        """
        with self._core.lock:
            rows, used_at = self._core.catalog.ages()
        # sorted without the lock: of millions that takes longer than a lookup may
        return self._in_batches(rows[np.argsort(used_at)], batch)

    def _in_batches(
        self, rows: npt.NDArray[np.int64], batch: int
    ) -> Iterator[list[tuple[bytes, int, int]]]:
        core = self._core
        for at in range(0, len(rows), batch):
            some = rows[at : at + batch].tolist()
            with core.lock:
                live = [row for row in some if core.catalog.is_live(row)]
                entries = [(e.digest, e.length, e.meta) for e in map(core.catalog.entry, live)]
            yield entries

    def bytes_by_meta(self) -> dict[int, int]:
        """Logical bytes of the entries by meta number."""
        with self._core.lock:
            return self._core.catalog.bytes_by_meta()

    def __len__(self) -> int:
        return len(self._core.catalog)

    @property
    def live_bytes(self) -> int:
        """Logical bytes of all entries."""
        return self._core.catalog.live_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes that entries can take before the store evicts by itself."""
        blocks = self._core.stocks().blocks
        reserve = blocks.reserve(self.options.reserve_fraction)
        return (blocks.total - reserve) * self._core.geometry.block_bytes

    @property
    def used_share(self) -> float:
        """Share in use of what is scarce, blocks or inodes: at 1 the store evicts by itself."""
        return self._core.used_share()

    def space(self) -> SpaceReport:
        """Count blocks by what they are used for."""
        return self._core.report()

    def counts(self) -> dict[str, int]:
        """Copy all counters."""
        core = self._core
        elsewhere = {
            "bounced_transfers": core.engine.bounced_transfers,
            "internal_errors": core.defects.count,
            "writes_without_claim": core.engine.refused,
        }
        with core.lock:
            return {**core.counts, **elsewhere}

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._core.closing

    @property
    def may_write(self) -> bool:
        """Whether the shards are known to be ours at this moment."""
        return self._core.engine.open_to_writes()

    @property
    def forked(self) -> bool:
        """Whether this is the copy in a forked child, which does nothing."""
        return self._core.forked

    def count(self, event: str) -> None:
        """Count an event of whoever opened the store among the store's own."""
        with self._core.lock:
            self._core.counts[event] += 1

    def problems(self) -> list[str]:
        """List what is wrong, in words for an operator; empty when all is well."""
        return problems_of(
            self._core, of_claims=self._owner.problems(), unerased=self._eraser.unerased
        )

    def status(self) -> dict[str, Any]:
        """Everything an operator may want to see, as plain values."""
        problems = self.problems()
        return {
            "healthy": not problems,
            "problems": problems,
            "volume": str(self.volume.label.volume),
            "shards": sorted(self._core.generations),
            "claims": self._owner.status(),
            "damaged_labels": list(self.volume.damaged_labels),
            "capacity_bytes": self.capacity_bytes,
            "recovery_s": round(self.recovery_s, 3),
            "dropped_inodes": dict(self.dropped_inodes),
            **status_of(self._core),
            "counts": self.counts(),
        }

    def close(self, deadline_s: float = 8.0) -> int:
        """Stop taking puts, let I/O in flight end until the deadline, give the claims back.

        Returns
        -------
        int
            Transfers that the kernel still holds; their buffers are left alone for ever.
        """
        core = self._core
        if core.forked:
            return 0
        with core.lock:
            if core.closing:
                return 0
            core.closing = True
        self._putter.abandon_waiting()
        return self._end(deadline_s)

    def _end(self, deadline_s: float) -> int:
        """Let what is under way end, give the claims back, and stop the engine."""
        began, kept = time.monotonic(), 0
        while self._engine.open_jobs and time.monotonic() - began < 0.6 * deadline_s:
            time.sleep(_POLL_S)
        if self._ownership is not None:
            self._heartbeat.stop()
            kept = self._give_back(began + 0.8 * deadline_s)
        left_s = began + deadline_s - time.monotonic()
        return self._engine.close(max(0.0, left_s)) + kept

    def _give_back(self, until: float) -> int:
        """Flush, and give the claims back; return how many calls the kernel keeps of it."""
        problems: list[OSError] = []

        def flush() -> None:
            try:
                self._engine.flush()
            except OSError as problem:
                problems.append(problem)

        # on a thread of its own: a device that hangs must not keep the caller
        flushing = threading.Thread(target=flush, name="fx100-flush", daemon=True)
        try:
            flushing.start()
        except RuntimeError as problem:  # no threads; under this kernel it can be opened again
            log.warning("claims not given back: %s", problem)
            return 0
        flushing.join(max(_SHORTEST_WAIT_S, until - time.monotonic()))
        hangs = flushing.is_alive()
        given = False
        if not problems and not hangs:
            given = self._owner.give_back(max(_SHORTEST_WAIT_S, until - time.monotonic()))
        if not given and not self._owner.lost_to:
            written = self._owner.failure or "they could not be written"
            why = "a flush hangs" if hangs else next(iter(problems), written)
            log.warning("claims not given back: %s", why)
        return int(hangs)

    @property
    def _owner(self) -> Ownership:
        assert self._ownership is not None, "the store was never open"
        return self._ownership


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _inert_in_child() -> None:
    for store in list(_stores):
        store._core.make_inert()


os.register_at_fork(after_in_child=_inert_in_child)
