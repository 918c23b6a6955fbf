"""What the store's pipelines share: the lock, the catalog, free space, counters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fx100_lmcache.buffers import BufferPool, zero_buffer
from fx100_lmcache.catalog import Catalog
from fx100_lmcache.counters import STORE, Tally
from fx100_lmcache.engine.defects import Guard
from fx100_lmcache.engine.jobs import Engine, Job, Status
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta
from fx100_lmcache.ondisk.geometry import Geometry
from fx100_lmcache.space.ledger import BlockLedger
from fx100_lmcache.space.scarcity import Stock, Stocks
from fx100_lmcache.space.space import Extent, Space
from fx100_lmcache.store.backing import Backing
from fx100_lmcache.store.gate import GatedEngine
from fx100_lmcache.store.lock import StoreLock
from fx100_lmcache.store.waiting import WaitingRoom
from fx100_lmcache.volume.claim import ClaimTiming

log = logging.getLogger(__name__)

GIB = 1024**3

Evicted = Callable[[Sequence[tuple[bytes, int, int]]], None]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Limits of a store; every one has a default.

    Attributes
    ----------
    load_s, store_s : float
        Deadlines of a load and of a put. A put must be over before LMCache may reuse its
        buffer (its read locks last 300 s), hence at most 60 s.
    pin_ttl_s : float
        After this, pins that were never given back do not count (LMCache's own is 300 s).
    claim_check_s : float
        A writer looks at its claim again when its last look is older than this.
    claim_timing : ClaimTiming
        How often the claim is renewed, and how long one that stands still is watched.
    max_write_bytes : int
        Bytes of puts in flight; what comes beyond is dropped and counted, it never waits.
    max_waiting_puts : int
        Puts that wait for space, or for an older copy to be erased; likewise.
    reserve_fraction : float
        Share of the space kept free by evicting ahead of need, so that pieces stay as long as in
        a fresh volume.
    evict_batch_fraction : float
        Share of the space that one round of eviction frees, so that rounds are few.
    width : int
        Members that one object is spread over; 0 means all.
    """

    load_s: float = 10.0
    store_s: float = 60.0
    pin_ttl_s: float = 300.0
    claim_check_s: float = 1.0
    claim_timing: ClaimTiming = field(default_factory=ClaimTiming)
    max_write_bytes: int = 8 * GIB
    max_waiting_puts: int = 16_384
    reserve_fraction: float = 0.03
    evict_batch_fraction: float = 0.01
    width: int = 0


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """Data blocks by what they are used for; all kinds together are ``total``, always."""

    total: int
    free: int
    used: int
    quarantined: int
    withheld: int = 0
    """Never written, while the storage below has no room."""


class Core:
    """State of an open store. Fields other than constants are guarded by ``lock``."""

    def __init__(
        self,
        geometry: Geometry,
        volume: bytes,
        engine: Engine,
        shards: Sequence[int],
        options: StoreOptions,
    ) -> None:
        self.geometry = geometry
        self.volume = volume
        self.engine = GatedEngine(engine)
        self.options = options
        self.defects = engine.defects
        self.lock = StoreLock(self.count_fault)
        self.catalog = Catalog(geometry.rows)
        self.space = Space(geometry, shards, options.width)
        self.backing = Backing(geometry, engine, self.space, options.store_s)
        self.ledger = BlockLedger(self.space.total_blocks)
        self.counts = Tally(STORE)
        self._metas: dict[int, ChunkMeta] = {}
        self.inodes = BufferPool(geometry.inode_bytes)
        self.zeros = zero_buffer(geometry.inode_bytes)
        self.generations: dict[int, int] = {}
        self.epoch = 0
        self.counter = 0
        self.room = WaitingRoom()
        self.write_bytes = 0
        self.closing = False
        self.forked = False  # this is the copy in a forked child
        self.on_evicted: Evicted = _ignore_evicted
        self.go_on: Callable[[], None] = _nobody_waits
        self._going_on = False
        self._outgoing: list[Job] = []

    def meta(self, number: int) -> ChunkMeta:
        """Metadata by its number in the catalog."""
        known = self._metas.get(number)
        if known is None:
            known = self._metas[number] = ChunkMeta.unpack(self.catalog.metas[number])
        return known

    def next_order(self) -> tuple[int, int]:
        """Return the order of the next inode: later inodes win over earlier ones."""
        self.counter += 1
        return self.epoch, self.counter

    def make_inert(self) -> None:
        """Make this the copy in a forked child: it does nothing, and waits for nobody.

        Whoever held the lock in the parent is not here to give it back.
        """
        self.lock = StoreLock(self.count_fault)
        self.forked = self.closing = True

    def send(self, job: Job) -> None:
        """Hand a job to the engine when the lock, which is held, has been released."""
        if not self._outgoing:
            self.lock.put_off(self._send)
        self._outgoing.append(job)

    def _send(self) -> None:
        with self.lock:
            jobs, self._outgoing = self._outgoing, []
        self.submit(jobs)

    def submit(self, jobs: Sequence[Job], engine: Engine | None = None) -> None:
        """Hand jobs to the engine, or to the one behind the gate; what it does not take failed."""
        try:
            (engine or self.engine).submit(jobs)
        except Exception:
            log.exception("internal error: %d jobs were not queued", len(jobs))
            self.count_fault()
            for job in jobs:
                for transfer in job.transfers:
                    transfer.status = Status.ERROR
                job.on_done(job)

    def reserve(self, blocks: int, max_pieces: int) -> Extent | None:
        """Take space for a put, on members that are up; None if there is none. The lock is held."""
        extent = self.space.allocate(blocks, self.closed_mask(), max_pieces)
        if extent is not None:
            try:
                self.ledger.reserve(extent.row, extent.blocks)
            except BaseException:
                self.space.free(extent)
                raise
        return extent

    def free(self, extent: Extent) -> None:
        """Give an extent's space back, in the books and in space. The lock is held."""
        self.ledger.free(extent.row)
        self.space.free(extent)
        self.wake()

    def wake(self) -> None:
        """Have the puts that wait go on when the lock, which is held, has been released."""
        if self.room.puts and not self._going_on:
            self._going_on = True
            self.lock.put_off(self._wake)

    def _wake(self) -> None:
        with self.lock:
            self._going_on = False
        self.go_on()

    def tell_evicted(self, evicted: Sequence[tuple[bytes, int, int]]) -> None:
        """Tell who wants to know, in the order in which things happen. The lock is held."""
        try:
            self.on_evicted(evicted)
        except Exception:
            log.exception("internal error: a listener to evictions failed")
            self.count_fault()

    def guard(self, what: str) -> Guard:
        """Run a block whose exceptions, our own or those of a callback, go no further."""
        return self.defects.guard(what)

    def count_fault(self) -> None:
        """Count an exception, of our own or of a callback, that was logged and goes no further."""
        self.defects.add()

    def report(self) -> SpaceReport:
        """Count blocks: what is free by the allocators, all else by the ledger."""
        with self.lock:
            return SpaceReport(
                self.space.total_blocks,
                self.space.free_blocks,
                self.ledger.used_blocks,
                self.ledger.quarantined_blocks,
                self.space.withheld_blocks,
            )

    def closed_mask(self) -> int:
        """Bit map of the members that cannot be written to at present."""
        return self.engine.down_mask() | self.backing.closed_mask

    def any_open(self, closed_mask: int) -> bool:
        """Whether a mask leaves any member."""
        return closed_mask != (1 << len(self.geometry.members)) - 1

    def stocks(self, closed_mask: int = 0) -> Stocks:
        """Count blocks and inodes; what is free, only on the members not in the mask."""
        space = self.space
        with self.lock:
            blocks = space.total_blocks - space.withheld_blocks
            return Stocks(
                Stock(blocks, space.free_blocks_up(closed_mask)),
                Stock(space.slots, space.free_slots_up(closed_mask)),
            )

    def used_share(self) -> float:
        """Share in use of what is scarce, without what is being erased: 0 to 1.

        LMCache's evictor looks right after a delete; it would take too much if that still counted.
        """
        with self.lock:
            now, ledger = self.stocks(), self.ledger
            after = Stocks(
                now.blocks.after(ledger.erasing_blocks), now.inodes.after(ledger.erases_in_flight)
            )
        return after.used_share(self.options.reserve_fraction)


def _ignore_evicted(evicted: Sequence[tuple[bytes, int, int]]) -> None:
    """Nobody wants to know."""


def _nobody_waits() -> None:
    """Nobody waits for space."""
