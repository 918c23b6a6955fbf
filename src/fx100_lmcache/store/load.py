"""Load: read objects back into the caller's memory, verified."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from fx100_lmcache.catalog.index import Rows
from fx100_lmcache.engine.jobs import Job, ReadBatch, Status, Transfer
from fx100_lmcache.members.base import MEDIA_ERRORS
from fx100_lmcache.store.columns import PieceColumns, piece_columns
from fx100_lmcache.store.erase import Eraser
from fx100_lmcache.store.state import Core
from fx100_lmcache.store.types import LoadItem, LoadResult

log = logging.getLogger(__name__)

_SLICE = 80
"""Objects in one batch: arrays stay small enough for numpy not to give up the GIL, see
:mod:`fx100_lmcache.catalog.index`."""


@dataclass(slots=True, eq=False)
class _Request:
    """One call of :meth:`Loader.load`."""

    items: Sequence[LoadItem]
    on_done: Callable[[list[LoadResult]], None]
    started: float
    deadline: float
    hold: bool
    results: list[LoadResult | None] = field(init=False)
    open_: int = field(init=False)

    def __post_init__(self) -> None:
        self.open_ = len(self.items)
        self.results = [None] * self.open_


@dataclass(slots=True, eq=False)
class _Reading:
    """The items of a request that go to the engine together.

    Attributes
    ----------
    numbers, rows, lengths
        Of each object: its number in the request, its row in the catalog, its bytes.
    ends, pieces, checksums
        Where each object's pieces end in the columns of all pieces.
    """

    request: _Request
    numbers: list[int]
    rows: Rows
    lengths: Rows
    ends: list[int]
    pieces: PieceColumns
    checksums: npt.NDArray[np.uint64]

    def transfers(self, place: int) -> list[Transfer]:
        """Make the transfers of one object."""
        buffer = self.request.items[self.numbers[place]].buffer
        part = slice(self.ends[place - 1] if place else 0, self.ends[place])
        _, members, offsets, starts, lengths = (column[part].tolist() for column in self.pieces)
        sums = self.checksums[part].tolist()
        return [
            Transfer(member, offset, buffer, start, length, checksum)
            for member, offset, start, length, checksum in zip(
                members, offsets, starts, lengths, sums, strict=True
            )
        ]


@dataclass(slots=True, eq=False)
class _Looked:
    """What the lookup of some items of a request came to.

    Attributes
    ----------
    reading : list of int
        Rows that count a reader for it.
    missed, misses
        Numbers of the items that are not read, and why.
    batch : ReadBatch or None
        The reads of the others.
    """

    reading: Sequence[int] = ()
    missed: Sequence[int] = ()
    misses: Sequence[LoadResult] = ()
    batch: ReadBatch | None = None


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

        Either it raises, and then nothing was queued and ``on_done`` is never called; or it does
        not, and then ``on_done`` is called once, whatever fails. Until then, with ``hold``, the
        buffers are in use; afterwards they are not.

        Parameters
        ----------
        hold : bool
            Do not report before the kernel has let go of the buffers, whatever the deadline:
            for memory whose owner reuses it after the report.
        """
        now = self._core.engine.now()
        deadline = now + (deadline_s or self._core.options.load_s)
        request = _Request(items, on_done, now, deadline, hold)
        if not items:
            self._hand_over(request)
            return
        slices = -(-len(items) // _SLICE)
        ends = [len(items) * part // slices for part in range(slices + 1)]
        looked_up = [_Looked() for _ in range(slices)]
        try:
            for looked, part in zip(looked_up, itertools.pairwise(ends), strict=True):
                self._look_up(request, range(*part), looked)
            batches = [each.batch for each in looked_up if each.batch is not None]
            self._core.engine.read(batches)  # raises nothing once it has begun
        except BaseException:
            for looked in looked_up:
                self._let_go(looked.reading)
            raise
        for looked in looked_up:
            self._collect(request, looked.missed, looked.misses)

    def _look_up(self, request: _Request, numbers: range, looked: _Looked) -> None:
        """Look some items up, and lay out the reads of those that are there."""
        core = self._core
        items = [request.items[number] for number in numbers]
        with core.lock:
            rows = core.catalog.find([item.digest for item in items])
            reasons = self._judge(items, rows)
            admitted = [place for place, reason in enumerate(reasons) if not reason]
            rows = rows[admitted]
            piece_counts, locations, checksums = core.catalog.pieces(rows)
            lengths = core.catalog.lengths(rows).astype(np.int64)
            reading = rows.tolist()
            core.catalog.start_reading(reading)
            looked.reading = reading
        looked.missed = [numbers[place] for place, reason in enumerate(reasons) if reason]
        looked.misses = [self._miss(reason) for reason in reasons if reason]
        if not admitted:
            return
        pieces = piece_columns(core.geometry, piece_counts, locations, lengths)
        buffers = [items[place].buffer for place in admitted]
        addresses = np.array([buffer.address for buffer in buffers], np.int64)
        rooms = np.array([len(buffer.view) for buffer in buffers], np.int64)
        ends = np.cumsum(piece_counts).tolist()
        chosen = [numbers[place] for place in admitted]
        part = _Reading(request, chosen, rows, lengths, ends, pieces, checksums)
        looked.batch = ReadBatch(
            piece_counts,
            pieces.members,
            pieces.offsets,
            pieces.lengths,
            addresses[pieces.owners] + pieces.starts,
            rooms[pieces.owners] - pieces.starts,
            checksums,
            request.deadline,
            partial(self._job, part),
            partial(self._all_good, part),
            partial(self._not_queued, part),
        )

    def _judge(self, items: Sequence[LoadItem], rows: Rows) -> list[str]:
        """Why each item is a miss; empty where it can be read."""
        core = self._core
        up = core.catalog.readable(rows, core.engine.down_mask()).tolist()
        lengths = core.catalog.lengths(rows).tolist()
        metas = core.catalog.meta_numbers(rows).tolist()
        reasons = []
        for item, row, is_up, length, meta in zip(
            items, rows.tolist(), up, lengths, metas, strict=True
        ):
            if row < 0:
                reasons.append("absent")
            elif not is_up:
                reasons.append("member_down")
            elif length > item.buffer.length or not item.accept(core.meta(meta), length):
                reasons.append("layout")
            else:
                reasons.append("")
        return reasons

    def _miss(self, reason: str) -> LoadResult:
        with self._core.lock:
            self._core.counts[f"load_miss_{reason}"] += 1
        return LoadResult(0, reason)

    def _job(self, reading: _Reading, place: int) -> Job:
        """Make the job of one object."""
        core, request = self._core, reading.request
        number, row = reading.numbers[place], int(reading.rows[place])
        length = int(reading.lengths[place])
        item = request.items[number]
        transfers = reading.transfers(place)
        stuck = [0]

        def done(job: Job) -> None:
            stuck[0] = sum(t.in_kernel for t in job.transfers)
            result = LoadResult(0, "error")
            with core.defects.guard("the outcome of a load was lost"):
                result = self._outcome(job, row, length, request.started)
            if stuck[0]:
                result = replace(result, in_kernel=True)
            else:
                self._let_go([row])
            self._collect(request, [number], [result])

        def late(_: Transfer) -> None:
            with core.lock:
                stuck[0] -= 1
                free = stuck[0] == 0
            if free:
                self._let_go([row])
                if item.on_released is not None:
                    item.on_released()

        return Job(False, transfers, request.deadline, done, late, request.hold)

    def _all_good(self, reading: _Reading, places: Sequence[int]) -> None:
        """Report objects that were read without a job."""
        rows, lengths = reading.rows[places].tolist(), reading.lengths[places].tolist()
        results = [LoadResult(length) for length in lengths]
        with self._core.defects.guard("loads were not counted"):
            self._count_hits(reading.request, rows, lengths)
        self._answer(reading, places, results)

    def _not_queued(self, reading: _Reading, places: Sequence[int]) -> None:
        """Report objects that the engine could not begin to read."""
        self._answer(reading, places, [self._miss("error") for _ in places])

    def _answer(
        self, reading: _Reading, places: Sequence[int], results: Sequence[LoadResult]
    ) -> None:
        numbers = [reading.numbers[place] for place in places]
        self._let_go(reading.rows[places].tolist())
        self._collect(reading.request, numbers, results)

    def _count_hits(self, request: _Request, rows: Sequence[int], lengths: Sequence[int]) -> None:
        core = self._core
        with core.lock:
            elapsed_us = (core.engine.now() - request.started) * 1e6
            core.counts["read_us"] += round(elapsed_us * len(rows))
            core.counts["load_hits"] += len(rows)
            core.counts["read_bytes"] += sum(lengths)
            if self._failed_once:
                self._failed_once.difference_update(rows)

    def _let_go(self, rows: Sequence[int]) -> None:
        """Count a reader less of each row; the last one of an erased entry frees its blocks."""
        core = self._core
        with core.lock, core.guard("an entry was not freed after its last reader"):
            self._eraser.read_out(core.catalog.stop_reading(rows))

    def _outcome(self, job: Job, row: int, length: int, started: float) -> LoadResult:
        """Judge a finished read, and drop an entry that has proven bad."""
        core = self._core
        statuses = {t.status for t in job.transfers}
        with core.lock:
            core.counts["read_us"] += round((job.finished_at - started) * 1e6)
            if statuses == {Status.OK}:
                core.counts["load_hits"] += 1
                core.counts["read_bytes"] += length
                self._failed_once.discard(row)
                return LoadResult(length)
            if Status.MISMATCH in statuses:
                core.counts["checksum_failures"] += 1
                log.error("checksum mismatch on %s; dropped", _where(job))
                self._drop(row)
                return self._miss("checksum")
            if Status.ERROR in statuses:
                # once may be a path that is being lost; twice, while the rest works, is bad media
                failed = [t for t in job.transfers if t.status is Status.ERROR]
                alone = not core.engine.down_mask() and all(map(_bad_media, failed))
                if alone and row in self._failed_once:
                    log.error("unreadable twice, dropped: %s", _where(job))
                    self._drop(row)
                elif alone:
                    self._failed_once.add(row)
                return self._miss("error")
            core.counts["deadline_misses"] += 1
            return self._miss("deadline")

    def _drop(self, row: int) -> None:
        core = self._core
        self._failed_once.discard(row)
        entry = self._eraser.drop(row)
        if entry is not None:  # else another reader was faster
            core.tell_evicted([(entry.digest, entry.length, entry.meta)])

    def _collect(
        self, request: _Request, numbers: Sequence[int], results: Sequence[LoadResult]
    ) -> None:
        """Note results; with the last one the request is answered."""
        if not numbers:
            return
        with self._core.lock:
            for number, result in zip(numbers, results, strict=True):
                request.results[number] = result
            request.open_ -= len(numbers)
            finished = request.open_ == 0
        if finished:
            self._hand_over(request)

    def _hand_over(self, request: _Request) -> None:
        with self._core.defects.guard("whoever asked for a load failed to take the answer"):
            request.on_done([r for r in request.results if r is not None])


def _bad_media(failed: Transfer) -> bool:
    """Whether an error may be the media's: a device that is gone says something else."""
    error = failed.error
    return failed.first_failure and error is not None and error.errno in MEDIA_ERRORS


def _where(job: Job) -> str:
    bad = next(t for t in job.transfers if t.status is not Status.OK)
    return f"member {bad.member} at byte {bad.offset}"
