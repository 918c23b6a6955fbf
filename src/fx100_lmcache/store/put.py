"""Put: hash and write the pieces, then the inode, then publish.

Nothing is visible before its inode was written, so a crash at any point leaves the entry whole
or absent. Space that the kernel may still write to is quarantined until it lets go.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.engine.base import Job, Status, Transfer
from fx100_lmcache.ondisk.inode import InodePlace, max_pieces, pack_inode, pack_location
from fx100_lmcache.space import Extent
from fx100_lmcache.store.core import Core
from fx100_lmcache.store.erase import Eraser
from fx100_lmcache.store.items import PutItem, PutResult

log = logging.getLogger(__name__)

_EVICTED_AHEAD = 64  # entries in one go, so that lookups do not wait for long


@dataclass(slots=True, eq=False)
class _Put:
    item: PutItem
    started: float
    deadline: float
    tell: list[Callable[[PutResult], None]]
    generation: dict[int, int] = field(default_factory=dict)
    extent: Extent | None = None
    stuck: int = 0
    evictions: int = 0


class Putter:
    """Writes objects."""

    def __init__(self, core: Core, eraser: Eraser) -> None:
        self._core = core
        self._eraser = eraser
        self._pending: dict[bytes, _Put] = {}
        self._waiting: deque[_Put] = deque()
        self._failures = BurstLog(log, "objects not stored")
        core.space_freed = self._retry_waiting

    def put(
        self,
        items: Sequence[PutItem],
        on_done: Callable[[list[PutResult]], None],
        deadline_s: float | None = None,
    ) -> None:
        """Store objects; ``on_done`` gets a result for each, in order, from any thread."""
        core = self._core
        if not items:
            on_done([])
            return
        now = core.engine.now()
        deadline = now + (deadline_s or core.options.store_s)
        results: list[PutResult | None] = [None] * len(items)
        left = [len(items)]

        def teller(number: int) -> Callable[[PutResult], None]:
            def tell(result: PutResult) -> None:
                with core.lock:
                    results[number] = result
                    left[0] -= 1
                    finished = left[0] == 0
                if finished:
                    on_done([r for r in results if r is not None])

            return tell

        jobs = []
        for number, item in enumerate(items):
            job = self._begin(item, now, deadline, teller(number))
            if job is not None:
                jobs.append(job)
        core.engine.submit(jobs)

    def _begin(
        self,
        item: PutItem,
        started: float,
        deadline: float,
        tell: Callable[[PutResult], None],
    ) -> Job | None:
        core = self._core
        with core.lock:
            self._eraser.retry_failed()  # what waits for it keeps space from us
            early = self._answer_at_once(item, tell)
            if early is None:
                put = _Put(item, started, deadline, [tell])
                self._pending[item.digest] = put
                core.write_bytes += item.buffer.length
                return self._allocate(put)
        if early.reason != "joined":
            tell(early)
        return None

    def _answer_at_once(self, item: PutItem, tell: Callable[[PutResult], None]) -> PutResult | None:
        """Settle what needs no writing; None if the object must be written."""
        core = self._core
        length = item.buffer.length
        if (pending := self._pending.get(item.digest)) is not None:
            if (pending.item.meta, pending.item.buffer.length) != (item.meta, length):
                return self._drop("conflict")  # same name, other layout: one at a time
            pending.tell.append(tell)  # the same fate as the put in flight
            return PutResult(False, reason="joined")
        if core.closing:
            return self._drop("closing")
        blocks = core.geometry.blocks_for(length)
        if not 0 < length < 1 << 32 or not core.space.could_hold(blocks, self._max_pieces(item)):
            return self._drop("impossible")
        if core.write_bytes + length > core.options.max_write_bytes:
            return self._drop("backlog")
        row = core.catalog.find_one(item.digest)
        if row >= 0:
            entry = core.catalog.entry(row)
            if entry.length == length and core.catalog.metas[entry.meta] == item.meta:
                core.counts["puts_present"] += 1
                return PutResult(True)
            # same name, other layout: it can never be loaded again
            core.counts["puts_replacing"] += 1
            self._eraser.drop(row)
            core.on_evicted([(entry.digest, entry.length, entry.meta)])
        return None

    def _drop(self, reason: str) -> PutResult:
        self._core.counts[f"put_drop_{reason}"] += 1
        return PutResult(False, reason=reason)

    def _max_pieces(self, item: PutItem) -> int:
        return max_pieces(self._core.geometry.inode_bytes, len(item.meta))

    def _allocate(self, put: _Put) -> Job | None:
        """Find space, evicting if need be; what must wait for it is kept aside."""
        core = self._core
        if put.item.digest in core.dying:
            # the media never hold two inodes of one object: a crash could bring the old one back
            self._eraser.retry_failed()
            self._wait(put, "being_erased")
            return None
        blocks = core.geometry.blocks_for(put.item.buffer.length)
        down = core.engine.down_mask()
        pieces = self._max_pieces(put.item)
        extent = core.space.allocate(blocks, down, pieces)
        while extent is None and put.evictions < 3:
            self._make_room(put, blocks)
            extent = core.space.allocate(blocks, down, pieces)
            if core.erasing_blocks:
                break  # wait and see
        if extent is None:
            self._wait(put, "full")
            return None
        core.reserved_blocks += extent.blocks
        put.extent = extent
        put.generation = dict(core.generations)
        self._keep_reserve()
        return self._data_job(put, extent)

    def _make_room(self, put: _Put, blocks: int) -> None:
        """Evict for an object that found no space, or none in few enough pieces.

        First the oldest, if blocks are short; then what lies in frames that are nearly free; then
        the oldest once more.
        """
        core = self._core
        # those who wait count on what is being erased
        claimed = sum(core.geometry.blocks_for(p.item.buffer.length) for p in self._waiting)
        free = core.space.free_blocks_up(core.engine.down_mask())
        frame = core.geometry.frame_blocks
        scattered = free + core.erasing_blocks - claimed >= blocks + frame
        put.evictions = max(put.evictions + 1, 2 if scattered else 1)
        if put.evictions == 2:
            self._eraser.evict_frames(-(-blocks // frame))
        else:
            self._eraser.evict(max(blocks, 2 * frame) + claimed - core.erasing_blocks)

    def _wait(self, put: _Put, reason: str) -> None:
        """Keep a put until an erase in flight ends; drop it if there is none."""
        if self._core.erasing_blocks:
            self._waiting.append(put)
        else:
            self._finish(put, self._drop(reason))

    def _keep_reserve(self) -> None:
        core = self._core
        total = core.space.total_blocks
        reserve = int(total * core.options.reserve_fraction)
        free = core.space.free_blocks_up(core.engine.down_mask())
        missing = reserve - free - core.erasing_blocks
        if missing > 0:
            batch = int(total * core.options.evict_batch_fraction)
            self._eraser.evict(max(missing, batch), at_most=_EVICTED_AHEAD)

    def _retry_waiting(self) -> None:
        core = self._core
        jobs = []
        with core.lock:
            for _ in range(len(self._waiting)):
                if not self._waiting:
                    break
                put = self._waiting.popleft()
                if core.engine.now() > put.deadline:
                    self._finish(put, self._drop("full"))
                    continue
                job = self._allocate(put)
                if job is not None:
                    jobs.append(job)
        if jobs:
            core.engine.submit(jobs)

    def abandon_waiting(self) -> None:
        """Drop the puts that wait for space."""
        with self._core.lock:
            while self._waiting:
                self._finish(self._waiting.popleft(), self._drop("closing"))

    def _data_job(self, put: _Put, extent: Extent) -> Job:
        core = self._core
        buffer = put.item.buffer
        transfers = []
        start = 0
        for member, block, blocks in extent.runs:
            length = min(blocks * core.geometry.block_bytes, buffer.length - start)
            offset = core.geometry.block_offset(member, block)
            transfers.append(Transfer(member, offset, buffer, start, length))
            start += length
        return Job(
            True,
            transfers,
            put.deadline,
            lambda job: self._data_done(put, job),
            lambda transfer: self._late(put, wrote_inode=False),
        )

    def _data_done(self, put: _Put, job: Job) -> None:
        if not job.ok:
            self._failed(put, job, wrote_inode=False)
            return
        if job.finished_at > put.deadline:
            # the owner may have reused the buffer before it was hashed
            self._failed(put, job, wrote_inode=False, reason="deadline")
            return
        inode_job: Job | None = None
        with self._core.defects.guard("an inode was not written"):
            inode_job = self._inode_job(put, job)
        if inode_job is None:
            self._failed(put, job, wrote_inode=False, reason="error")
        else:
            self._core.engine.submit([inode_job])

    def _inode_job(self, put: _Put, job: Job) -> Job:
        core = self._core
        extent = put.extent
        assert extent is not None
        member, shard, slot = core.geometry.place(extent.row)
        buffer = core.inodes.take()
        with core.lock:
            order = core.next_order()
        inode = pack_inode(
            InodePlace(core.volume, shard, member, slot),
            inode_bytes=core.geometry.inode_bytes,
            generation=put.generation[shard],
            order=order,
            digest=put.item.digest,
            length=put.item.buffer.length,
            pieces=[
                (pack_location(*run), transfer.checksum)
                for run, transfer in zip(extent.runs, job.transfers, strict=True)
            ],
            meta=put.item.meta,
        )
        buffer.view[:] = inode
        checksums = [t.checksum for t in job.transfers]
        offset = core.geometry.slot_offset(member, shard, slot)

        def done(inode_job: Job) -> None:
            if not inode_job.transfers[0].in_kernel:
                core.inodes.give_back(buffer)
            self._inode_done(put, inode_job, checksums)

        def late(_: Transfer) -> None:
            core.inodes.give_back(buffer)
            self._late(put, wrote_inode=True)

        transfer = Transfer(member, offset, buffer, 0, core.geometry.inode_bytes)
        return Job(True, [transfer], put.deadline, done, late)

    def _inode_done(self, put: _Put, job: Job, checksums: list[int]) -> None:
        core = self._core
        extent = put.extent
        assert extent is not None
        if not job.ok:
            self._failed(put, job, wrote_inode=True)
            return
        with core.lock:
            shard = core.geometry.place(extent.row)[1]
            if put.generation[shard] != core.generations[shard]:
                self._failed(put, job, wrote_inode=True, reason="cleared")
                return
            self._publish(put, extent, checksums)
            length = put.item.buffer.length
            core.counts["puts_stored"] += 1
            core.counts["written_bytes"] += length
            self._finish(put, PutResult(True, length))

    def _publish(self, put: _Put, extent: Extent, checksums: list[int]) -> None:
        core = self._core
        pieces = [
            (pack_location(*run), checksum)
            for run, checksum in zip(extent.runs, checksums, strict=True)
        ]
        home = core.geometry.place(extent.row)[0]
        members = 1 << home
        for member, _, _ in extent.runs:
            members |= 1 << member
        core.reserved_blocks -= extent.blocks
        core.catalog.add(
            extent.row,
            put.item.digest,
            length=put.item.buffer.length,
            blocks=extent.blocks,
            meta=core.catalog.intern_meta(put.item.meta),
            members=members,
            pieces=pieces,
        )

    def _failed(self, put: _Put, job: Job, *, wrote_inode: bool, reason: str = "") -> None:
        """Give the space back, at once or when the kernel lets go of it."""
        core = self._core
        extent = put.extent
        assert extent is not None
        with core.lock:
            put.stuck = sum(t.in_kernel for t in job.transfers)
            if put.stuck:
                core.quarantined_blocks += extent.blocks
            else:
                self._give_back(put, extent, wrote_inode)
            if not reason:
                timed_out = any(t.status is Status.TIMED_OUT for t in job.transfers)
                reason = "deadline" if timed_out else "error"
            if reason == "deadline":
                core.counts["deadline_misses"] += 1
            error = next((t.error for t in job.transfers if t.error is not None), None)
            self._failures.note(f"{reason}: {error}" if error else reason)
            self._finish(put, self._drop(reason))

    def _late(self, put: _Put, *, wrote_inode: bool) -> None:
        """Note that a write past its deadline came back; after the last one the space is ours."""
        core = self._core
        extent = put.extent
        assert extent is not None
        with core.lock:
            put.stuck -= 1
            if put.stuck == 0:
                core.quarantined_blocks -= extent.blocks
                self._give_back(put, extent, wrote_inode)
        core.space_freed()

    def _give_back(self, put: _Put, extent: Extent, wrote_inode: bool) -> None:
        core = self._core
        if wrote_inode:  # it may be on the media: erase it before the space is used again
            self._eraser.erase_unpublished(extent, put.item.digest)
        else:
            core.reserved_blocks -= extent.blocks
            core.space.free(extent)

    def _finish(self, put: _Put, result: PutResult) -> None:
        core = self._core
        core.write_bytes -= put.item.buffer.length
        core.counts["written_us"] += round((core.engine.now() - put.started) * 1e6)
        del self._pending[put.item.digest]
        for position, tell in enumerate(put.tell):
            # those who joined wrote nothing themselves
            tell(result if position == 0 else PutResult(result.stored, 0, result.reason))
        put.tell = []
