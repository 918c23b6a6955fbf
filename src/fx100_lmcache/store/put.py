"""Put: hash and write the pieces, then the inode, then publish.

Nothing is visible before its inode was written, so a crash at any point leaves the entry whole
or absent. Space that the kernel may still write to is quarantined until it lets go. Every put is
answered exactly once, by its deadline, whatever fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.ondisk.inode import InodePlace, max_pieces, pack_inode
from fx100_lmcache.ondisk.location import pack_location
from fx100_lmcache.space.ledger import Use
from fx100_lmcache.space.space import Extent
from fx100_lmcache.store.backing import without_space
from fx100_lmcache.store.erase import Eraser
from fx100_lmcache.store.evict import Evictor, Outlook
from fx100_lmcache.store.state import Core
from fx100_lmcache.store.types import PutItem, PutResult
from fx100_lmcache.store.waiting import Put

log = logging.getLogger(__name__)

_AT_ONCE = 64  # waiting puts served without letting go of the lock, so that lookups go between


class Putter:
    """Writes objects."""

    def __init__(self, core: Core, eraser: Eraser) -> None:
        self._core = core
        self._eraser = eraser
        self._evictor = Evictor(core, eraser)
        self._pending: dict[bytes, Put] = {}
        self._room = core.room
        self._alarm_at: float | None = None
        self._failures = BurstLog(log, "objects not stored")
        core.go_on = self._serve

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

        def answer(number: int, result: PutResult) -> None:
            with core.lock:
                results[number] = result
                left[0] -= 1
                finished = left[0] == 0
            if finished:
                try:
                    on_done([r for r in results if r is not None])
                except Exception:
                    log.exception("internal error: whoever stored objects did not take the answer")
                    core.count_fault()

        jobs = []
        for number, item in enumerate(items):
            job = self._begin(item, now, deadline, partial(answer, number))
            if job is not None:
                jobs.append(job)
        core.submit(jobs)

    def refuse(
        self, items: Sequence[PutItem], on_done: Callable[[list[PutResult]], None], reason: str
    ) -> None:
        """Answer a call of :meth:`put` that may not be made."""
        with self._core.lock:
            self._core.counts[f"put_drop_{reason}"] += len(items)
        on_done([PutResult(False, reason=reason)] * len(items))

    def _begin(
        self,
        item: PutItem,
        started: float,
        deadline: float,
        answer: Callable[[PutResult], None],
    ) -> Job | None:
        """Settle an object at once, join it to others, or begin to write it."""
        core = self._core
        job = early = None
        with core.lock:
            try:
                self._eraser.retry_failed()  # what waits for it keeps space from us
                early = self._answer_at_once(item, answer)
                if early is None:
                    blocks = core.geometry.blocks_for(item.buffer.length)
                    put = Put(item, blocks, started, deadline, [answer])
                    self._pending[item.digest] = put
                    core.write_bytes += item.buffer.length
                    job = self._go_on(put)
            except Exception:
                log.exception("internal error: a put could not be judged")
                core.count_fault()
                early = self._drop("internal")
        if early is not None and early.reason != "joined":
            answer(early)
        return job

    def _answer_at_once(
        self, item: PutItem, answer: Callable[[PutResult], None]
    ) -> PutResult | None:
        """Settle what needs no writing; None if the object must be written."""
        core = self._core
        length = item.buffer.length
        if (pending := self._pending.get(item.digest)) is not None:
            if (pending.item.meta, pending.item.buffer.length) != (item.meta, length):
                return self._drop("conflict")  # same name, other layout: one at a time
            pending.answers.append(answer)  # the same fate as the put in flight
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
            core.tell_evicted([(entry.digest, entry.length, entry.meta)])
        return None

    def _drop(self, reason: str) -> PutResult:
        self._core.counts[f"put_drop_{reason}"] += 1
        return PutResult(False, reason=reason)

    def _max_pieces(self, item: PutItem) -> int:
        return max_pieces(self._core.geometry.inode_bytes, len(item.meta))

    def _go_on(self, put: Put) -> Job | None:
        """Begin to write a put, keep it waiting, or drop it: also if something raises."""
        try:
            if self._eraser.leaving(put.item.digest):
                # never two inodes of one object: a crash could bring the old one back
                if self._eraser.in_flight(put.item.digest):
                    self._wait(put, for_erase=True)
                else:
                    self._finish(put, self._drop("being_erased"))
                return None
            job = None if len(self._room) else self._try_space(put)
            if job is None:
                self._wait(put, for_erase=False)
        except Exception:
            log.exception("internal error: a put could not be begun")
            self._abort(put)
            return None
        return job

    def _try_space(self, put: Put) -> Job | None:
        """Take space and make the job that writes there; None if there is no space."""
        core = self._core
        extent = core.reserve(put.blocks, self._max_pieces(put.item))
        if extent is None:
            return None
        put.extent = extent
        put.generation = dict(core.generations)
        self._evictor.keep_reserve()
        return self._data_job(put, extent)

    def _wait(self, put: Put, *, for_erase: bool) -> None:
        """Keep a put for what is on its way; its deadline ends that in any case."""
        core, room = self._core, self._room
        if core.closing:
            self._finish(put, self._drop("closing"))
        elif room.puts >= core.options.max_waiting_puts:
            self._finish(put, self._drop("backlog"))
        elif for_erase:
            room.seat(put)
            self._eraser.await_change(put.item.digest)
            self._set_alarm()
        else:
            room.queue(put)
            self._set_alarm()
            self._evictor.make_up(room)
            core.wake()

    def _serve(self) -> None:
        """Let waiting puts go on: some, and then others get the lock."""
        core = self._core
        with core.lock:
            for _ in range(_AT_ONCE):
                digest = self._eraser.take_changed()
                if digest is None:
                    break
                put = self._room.seated(digest)
                if put is not None and self._room.leave(put):
                    job = self._go_on(put)
                    if job is not None:
                        core.send(job)
            else:
                core.wake()
            for _ in range(_AT_ONCE):
                if not self._serve_first():
                    return
            core.wake()

    def _serve_first(self) -> bool:
        """Let the first in line go on, or drop it; False if it has to wait."""
        put = self._room.first
        if put is None:
            return False
        try:
            return self._serve_one(put)
        except Exception:
            log.exception("internal error: a waiting put could not go on")
            self._abort(put)
            return True

    def _serve_one(self, put: Put) -> bool:
        core = self._core
        if put.deadline <= core.engine.now():
            self._give_up(put)
            return True
        job = self._try_space(put)
        if job is not None:
            self._room.leave(put)
            core.send(job)
            return True
        outlook = self._evictor.make_room(put, self._room)
        if outlook is Outlook.NEVER:
            self._give_up(put)
        elif outlook is Outlook.AGAIN:
            core.wake()
        return outlook is Outlook.NEVER

    def _set_alarm(self) -> None:
        due = self._room.next_deadline()
        if due is not None and (self._alarm_at is None or due < self._alarm_at):
            self._alarm_at = due
            self._core.engine.call_at(due, partial(self._ring, due))

    def _ring(self, due: float) -> None:
        """Drop the puts that have waited long enough."""
        core = self._core
        with core.lock:
            self._alarm_at = None
            # before its time only when the engine closes: then nothing comes any more
            now = core.engine.now()
            until = now if now >= due else float("inf")
            for _ in range(_AT_ONCE):
                put = self._room.overdue(until)
                if put is None:
                    break
                self._give_up(put)
            self._set_alarm()
            core.wake()  # those behind them may fit

    def _give_up(self, put: Put) -> None:
        """Drop a put that waits, with what it has waited for as the reason."""
        seated = self._room.seated(put.item.digest) is put
        self._room.leave(put)
        if self._core.closing:
            self._finish(put, self._drop("closing"))
        elif seated:
            self._finish(put, self._drop("being_erased"))
        elif self._core.backing.is_short:
            self._finish(put, self._drop("no_space_below"))
        else:
            self._finish(put, self._drop("full"))

    def abandon_waiting(self) -> None:
        """Drop the puts that wait: the store is being closed."""
        with self._core.lock:
            for put in self._room.all():
                self._give_up(put)

    def _data_job(self, put: Put, extent: Extent) -> Job:
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
            lambda job: self._guarded(put, job, self._data_done),
            lambda _: self._late(put),
        )

    def _guarded(self, put: Put, job: Job, step: Callable[[Put, Job], None]) -> None:
        """Go on after a write; whatever raises there, the put is answered and its space kept."""
        try:
            step(put, job)
        except Exception:
            log.exception("internal error: a put failed half way")
            with self._core.lock:
                put.stuck = sum(t.in_kernel for t in job.transfers)
                self._abort(put)

    def _abort(self, put: Put) -> None:
        """Answer a put whose handling has raised, and keep its space until it is safe."""
        core = self._core
        core.count_fault()
        self._room.leave(put)
        extent = put.extent
        try:
            if extent is not None and core.ledger.use(extent.row) is Use.RESERVED:
                if put.stuck or put.inode_begun:
                    self._quarantine(put, extent)
                else:
                    core.free(extent)
        except Exception:
            log.exception("internal error: the space of a put is lost until the next start")
        if self._pending.get(put.item.digest) is put:
            self._finish(put, self._drop("internal"))

    def _data_done(self, put: Put, job: Job) -> None:
        if not job.ok:
            self._failed(put, job)
            return
        if job.finished_at > put.deadline:
            # the owner may have reused the buffer before it was hashed
            self._failed(put, job, reason="deadline")
            return
        self._core.submit([self._inode_job(put, job)])

    def _inode_job(self, put: Put, job: Job) -> Job:
        """Make the job that writes the inode of a put whose pieces are written."""
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
            self._guarded(put, inode_job, partial(self._inode_done, checksums=checksums))

        def late(_: Transfer) -> None:
            core.inodes.give_back(buffer)
            self._late(put)

        put.inode_begun = True
        transfer = Transfer(member, offset, buffer, 0, core.geometry.inode_bytes)
        return Job(True, [transfer], put.deadline, done, late)

    def _inode_done(self, put: Put, job: Job, checksums: list[int]) -> None:
        core = self._core
        extent = put.extent
        assert extent is not None
        if not job.ok:
            self._failed(put, job)
            return
        if not core.engine.open_to_writes():  # it came late: a new owner may not have seen it
            self._failed(put, job, reason="claim_stale")
            return
        with core.lock:
            shard = core.geometry.place(extent.row)[1]
            if put.generation[shard] != core.generations[shard]:
                self._failed(put, job, reason="cleared")
                return
            self._publish(put, extent, checksums)
            length = put.item.buffer.length
            core.counts["puts_stored"] += 1
            core.counts["written_bytes"] += length
            self._finish(put, PutResult(True, length))

    def _publish(self, put: Put, extent: Extent, checksums: list[int]) -> None:
        core = self._core
        pieces = [
            (pack_location(*run), checksum)
            for run, checksum in zip(extent.runs, checksums, strict=True)
        ]
        home = core.geometry.place(extent.row)[0]
        members = 1 << home
        for member, _, _ in extent.runs:
            members |= 1 << member
        core.catalog.add(
            extent.row,
            put.item.digest,
            length=put.item.buffer.length,
            blocks=extent.blocks,
            meta=core.catalog.intern_meta(put.item.meta),
            members=members,
            pieces=pieces,
        )
        core.ledger.publish(extent.row)

    def _failed(self, put: Put, job: Job, *, reason: str = "") -> None:
        """Give the space back, at once or when the kernel lets go of it."""
        core = self._core
        extent = put.extent
        assert extent is not None
        with core.lock:
            put.stuck = sum(t.in_kernel for t in job.transfers)
            if put.stuck:
                self._quarantine(put, extent)
            else:
                self._give_back(put, extent)
            if without_space(job.transfers):
                core.backing.note_failed(job.transfers)
                reason = reason or "no_space_below"
            if not reason:
                timed_out = any(t.status is Status.TIMED_OUT for t in job.transfers)
                reason = "deadline" if timed_out else "error"
            if reason == "deadline":
                core.counts["deadline_misses"] += 1
            error = next((t.error for t in job.transfers if t.error is not None), None)
            self._failures.note(f"{reason}: {error}" if error else reason)
            self._finish(put, self._drop(reason))

    def _quarantine(self, put: Put, extent: Extent) -> None:
        """Keep the space until the kernel lets go or, if it has, until the inode is erased."""
        if put.inode_begun:
            self._eraser.quarantine_unpublished(extent, put.item.digest, retry=not put.stuck)
        else:
            self._core.ledger.quarantine(extent.row)

    def _late(self, put: Put) -> None:
        """Note that a write past its deadline came back; after the last one the space is ours."""
        extent = put.extent
        assert extent is not None
        with self._core.lock:
            put.stuck -= 1
            if put.stuck == 0:
                self._give_back(put, extent)

    def _give_back(self, put: Put, extent: Extent) -> None:
        if put.inode_begun:  # it may be on the media: erase it before the space is used again
            self._eraser.erase_unpublished(extent, put.item.digest)
        else:
            self._core.free(extent)

    def _finish(self, put: Put, result: PutResult) -> None:
        """Answer a put, once: whoever put it, and those who put the same meanwhile."""
        core = self._core
        core.write_bytes -= put.item.buffer.length
        core.counts["written_us"] += round((core.engine.now() - put.started) * 1e6)
        del self._pending[put.item.digest]
        answers, put.answers = put.answers, []
        for position, answer in enumerate(answers):
            # those who joined wrote nothing themselves
            answer(result if position == 0 else PutResult(result.stored, 0, result.reason))
