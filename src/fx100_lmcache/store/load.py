"""Load: read objects back into the caller's memory, verified."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fx100_lmcache.catalog import Entry
from fx100_lmcache.engine.base import IoBuffer, Job, Status, Transfer
from fx100_lmcache.identity import ChunkMeta
from fx100_lmcache.ondisk.inode import unpack_location
from fx100_lmcache.store.core import Core
from fx100_lmcache.store.erase import Eraser

log = logging.getLogger(__name__)

_SLICE = 32  # objects submitted at a time

Accept = Callable[[ChunkMeta, int], bool]


@dataclass(slots=True)
class LoadItem:
    """One object wanted.

    Attributes
    ----------
    buffer : IoBuffer
        Where it goes. Its contents are undefined unless the load succeeds.
    accept : callable
        Given what the entry says of itself and its length, whether it fits the destination.
    on_released : callable or None
        Called after a result that is ``in_kernel``, when the kernel has let go of the buffer.
    """

    digest: bytes
    buffer: IoBuffer
    accept: Accept
    on_released: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Fate of one load.

    Attributes
    ----------
    length : int
        Of the object, in bytes; 0 for a miss.
    reason : str
        Why it is a miss.
    in_kernel : bool
        The deadline passed and the kernel may still write to the buffer: it must not be reused
        before the item's ``on_released`` was called. Only for loads without ``hold``.
    """

    length: int
    reason: str = ""
    in_kernel: bool = False


@dataclass(slots=True, eq=False)
class _Batch:
    results: list[LoadResult | None]
    on_done: Callable[[list[LoadResult]], None]
    started: float
    open_: int = 0


class Loader:
    """Reads entries."""

    def __init__(self, core: Core, eraser: Eraser) -> None:
        self._core = core
        self._eraser = eraser
        self._failed_once: set[int] = set()

    def load(
        self,
        items: Sequence[LoadItem],
        on_done: Callable[[list[LoadResult]], None],
        *,
        hold: bool,
        deadline_s: float | None = None,
    ) -> None:
        """Read objects; ``on_done`` gets a result for each, in order, from any thread.

        Parameters
        ----------
        hold : bool
            Do not report before the kernel has let go of the buffers, whatever the deadline:
            for memory whose owner reuses it after the report.
        """
        core = self._core
        now = core.engine.now()
        deadline = now + (deadline_s or core.options.load_s)
        batch = _Batch([None] * len(items), on_done, now)
        if not items:
            on_done([])
            return
        admitted = []
        with core.lock:
            down = core.engine.down_mask()
            rows = core.catalog.find([item.digest for item in items]).tolist()
            for number, (item, row) in enumerate(zip(items, rows, strict=True)):
                found = self._admit(item, row, down)
                if isinstance(found, LoadResult):
                    batch.results[number] = found
                else:
                    admitted.append((found, item, number))
            batch.open_ = len(admitted)
        for at in range(0, len(admitted), _SLICE):
            # the first reads are under way while the next jobs are made
            part = admitted[at : at + _SLICE]
            core.engine.submit([self._job(*each, batch, deadline, hold) for each in part])
        if not admitted:
            on_done([r for r in batch.results if r is not None])

    def _admit(self, item: LoadItem, row: int, down: int) -> Entry | LoadResult:
        core = self._core
        if row < 0:
            return self._miss("absent")
        entry = core.catalog.entry(row)
        if not core.catalog.blocks_up(row, down):
            return self._miss("member_down")
        if entry.length > item.buffer.length or not item.accept(
            core.meta(entry.meta), entry.length
        ):
            return self._miss("layout")
        core.catalog.start_reading(row)
        return entry

    def _miss(self, reason: str) -> LoadResult:
        self._core.counts[f"load_miss_{reason}"] += 1
        return LoadResult(0, reason)

    def _job(
        self,
        entry: Entry,
        item: LoadItem,
        number: int,
        batch: _Batch,
        deadline: float,
        hold: bool,
    ) -> Job:
        core = self._core
        transfers = []
        start = 0
        for location, checksum in entry.pieces:
            member, block, blocks = unpack_location(location)
            length = min(blocks * core.geometry.block_bytes, entry.length - start)
            offset = core.geometry.block_offset(member, block)
            transfers.append(Transfer(member, offset, item.buffer, start, length, checksum))
            start += length
        stuck = [0]

        def done(job: Job) -> None:
            stuck[0] = sum(t.in_kernel for t in job.transfers)
            result = self._outcome(job, entry, batch.started)
            if stuck[0]:
                result = replace(result, in_kernel=True)
            else:
                self._let_go(entry.row)
            self._collect(batch, number, result)

        def late(_: Transfer) -> None:
            with core.lock:
                stuck[0] -= 1
                free = stuck[0] == 0
            if free:
                self._let_go(entry.row)
                if item.on_released is not None:
                    item.on_released()

        return Job(False, transfers, deadline, done, late, hold)

    def _let_go(self, row: int) -> None:
        with self._core.lock:
            if self._core.catalog.stop_reading(row):
                self._eraser.erase_hidden(row)

    def _outcome(self, job: Job, entry: Entry, started: float) -> LoadResult:
        """Judge a finished read, and drop an entry that has proven bad."""
        core = self._core
        statuses = {t.status for t in job.transfers}
        with core.lock:
            core.counts["read_us"] += round((job.finished_at - started) * 1e6)
            if statuses == {Status.OK}:
                core.counts["load_hits"] += 1
                core.counts["read_bytes"] += entry.length
                self._failed_once.discard(entry.row)
                return LoadResult(entry.length)
            if Status.MISMATCH in statuses:
                core.counts["checksum_failures"] += 1
                log.error("checksum mismatch on %s; dropped", _where(job))
                self._drop(entry.row)
                return self._miss("checksum")
            if Status.ERROR in statuses:
                # once may be a path that is being lost; twice, while the rest works, is bad media
                failed = (t for t in job.transfers if t.status is Status.ERROR)
                alone = not core.engine.down_mask() and all(t.first_failure for t in failed)
                if alone and entry.row in self._failed_once:
                    log.error("unreadable twice, dropped: %s", _where(job))
                    self._drop(entry.row)
                elif alone:
                    self._failed_once.add(entry.row)
                return self._miss("error")
            core.counts["deadline_misses"] += 1
            return self._miss("deadline")

    def _drop(self, row: int) -> None:
        core = self._core
        self._failed_once.discard(row)
        if core.catalog.is_live(row):  # else another reader was faster
            entry = core.catalog.entry(row)
            self._eraser.drop(row)
            core.on_evicted([(entry.digest, entry.length, entry.meta)])

    def _collect(self, batch: _Batch, number: int, result: LoadResult) -> None:
        with self._core.lock:
            batch.results[number] = result
            batch.open_ -= 1
            finished = batch.open_ == 0
        if finished:
            batch.on_done([r for r in batch.results if r is not None])


def _where(job: Job) -> str:
    bad = next(t for t in job.transfers if t.status is not Status.OK)
    return f"member {bad.member} at byte {bad.offset}"
