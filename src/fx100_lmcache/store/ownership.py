"""Keeps the claims of an open store: renews them, looks at them, and notices when they are lost.

Every write of a claim block after the opening is made here, in *rounds*: look, compare, write. A
round is begun by the heartbeat, a clear, or the end; rounds do not overlap. Looks and writes are
urgent jobs of the engine: they wait for no bulk I/O, and nobody hangs in them.

Two things let the store write. A *lease*: the last renewal was begun no longer ago than
``ClaimTiming.lease_s``, so nobody who watches the claim can have replaced us. And a *look* no older
than ``claim_check_s``, for the operator's word, which replaces without a watch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.engine.jobs import Engine, Job, Transfer
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.claim_block import ClaimBlock
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES
from fx100_lmcache.store.state import Core
from fx100_lmcache.volume import claim as rules
from fx100_lmcache.volume.claim import (
    ClaimTiming,
    is_there,
    read_claims,
    rival_of,
    valid_claims,
    write_claim,
)
from fx100_lmcache.volume.claiming import Taken
from fx100_lmcache.volume.machine import Machine

log = logging.getLogger(__name__)

Answer = Callable[[bool], None]

_SHORTEST_BEAT_S = 0.1
_AGAIN_S = 1.0  # after a round that failed for want of memory
_COUNTERS = (
    "claim_renewals",
    "claim_renewal_failures",
    "claim_lost",
    "claims_taken_over",
    "claims_taken_over_by_watch",
)


@dataclass(slots=True, eq=False)
class _Round:
    """One look at the claims, and what is written after it.

    Attributes
    ----------
    lookers, writers : list of callable
        Told whether the shards are ours; whether our claims are on every member that is up. A
        round without ``writers`` writes nothing.
    pending : set of int
        Members that have not answered yet: first to the look, then to the write.
    seen : dict of int to bytes
        The claim areas that were read, by member.
    marred : bool
        A block was not ours: somebody's late write.
    problem : Exception or None
        What ended it before its time.
    """

    started: float
    lookers: list[Answer]
    writers: list[Answer]
    release: bool
    pending: set[int] = field(default_factory=set)
    seen: dict[int, bytes] = field(default_factory=dict)
    judged: bool = False
    marred: bool = False
    written: int = 0
    failed: int = 0
    over: bool = False
    problem: Exception | None = None


class Ownership:
    """Whether the shards are still ours. Thread-safe.

    Parameters
    ----------
    engine : Engine
        The one behind the gate: claims are written when a look has said that they are ours.
    taken : Taken
        Claims as they were written. Nothing else may be written until a renewal confirms them.

    Attributes
    ----------
    lost_to : str
        Who has taken our place; empty while the shards are ours.
    failure : Exception or None
        What ended the last round before its time, if anything did.
    """

    def __init__(
        self, core: Core, engine: Engine, machine: Machine, timing: ClaimTiming, taken: Taken
    ) -> None:
        self._core = core
        self._engine = engine
        self._machine = machine
        self._timing = timing
        self._claims = dict(taken.claims)
        self._area = range(min(self._claims), max(self._claims) + 1)
        self._held_since = taken.written_at  # while there is no lease, a later look may give one
        self._lease_until = self._looked_at = float("-inf")
        self._failing = self._mends = False
        # claim I/O under way on each member, also of rounds given up
        self._busy = [0] * len(core.geometry.members)
        self._lookers: list[Answer] = []
        self._writers: list[Answer] = []
        self._release = self._released = False
        self._round: _Round | None = None
        self.lost_to = ""
        self.failure: Exception | None = None
        core.counts.update(dict.fromkeys(_COUNTERS, 0))
        core.counts["claims_taken_over"] += len(taken.by_word)
        core.counts["claims_taken_over_by_watch"] += len(taken.watched)

    def may_write(self) -> bool:
        """Whether nobody who watches can have replaced us."""
        return (
            not self.lost_to
            and not self._released
            and not self._core.forked
            and self._machine.clock() <= self._lease_until
        )

    def why_not(self) -> str:
        """Name the reason why something is not stored."""
        if self.lost_to:
            return "claim_lost"
        if self._core.closing:
            return "closing"
        return "claim_unread" if self.may_write() else "claim_stale"

    @property
    def settles_in_s(self) -> float:
        """Seconds until a renewal could confirm what was written without a lease."""
        return max(0.0, self._held_since + rules.SETTLE_S - self._machine.clock())

    def check(self, go: Answer, *, look: bool = False) -> None:
        """Call ``go(ours)``: at once if it is known, else after a look.

        Parameters
        ----------
        look : bool
            Look in any case: for what would overwrite the claim of a new owner.
        """
        with self._core.lock:
            may = self.may_write()
            recent = self._machine.clock() - self._looked_at <= self._core.options.claim_check_s
            known = bool(self.lost_to) or self._released or (not look and (recent or not may))
            under_way = self._round if self._round and not self._round.judged else None
            if not known:
                (self._lookers if under_way is None else under_way.lookers).append(go)
        if known:
            go(may)
        else:
            self._begin()

    def renew(self, then: Answer, *, release: bool = False) -> None:
        """Look, compare, and write our claims, with the generations of now.

        Parameters
        ----------
        then : callable
            Told whether they are ours and were written to every member that is up.
        release : bool
            Write that nobody holds the shards; nothing is written afterwards.
        """
        with self._core.lock:
            known = bool(self.lost_to) or self._released
            if not known:
                self._writers.append(then)
                self._release |= release
        if known:
            then(False)
        else:
            self._begin()

    def beat(self) -> float | None:
        """Renew; return seconds until the next time, None when there is nothing to renew."""
        with self._core.lock:
            if self.lost_to or self._released or self._core.forked:
                return None
            current = self._round
            if current is not None and self._age_s(current) <= self._timing.renew_within_s:
                current = None  # a round is under way, and in time
            under_way = self._round is not None and current is None and bool(self._round.writers)
        if current is not None:
            self._abandon(current)
        if not under_way:
            self.renew(_nobody_asks)
        settling_s = max(rules.SETTLE_S, _SHORTEST_BEAT_S) * 1.1
        next_s = self._timing.heartbeat_s
        if self.failure is not None:
            next_s = min(next_s, _AGAIN_S)
        return next_s if self.may_write() else min(next_s, settling_s)

    def beat_failed(self, problem: Exception) -> None:
        """Note an exception of :meth:`beat`."""
        self._core.defects.caught("the claims were not renewed", problem)
        with self._core.lock:
            self._failing = True
            self._core.counts["claim_renewal_failures"] += 1

    def give_back(self, within_s: float) -> bool:
        """Say on the members that nobody holds the shards, if they are ours; wait for it so long.

        Returns
        -------
        bool
            Whether it was written to every member that is up.
        """
        answers: list[bool] = []
        answered = threading.Event()

        def then(written: bool) -> None:
            answers.append(written)
            answered.set()

        self.renew(then, release=True)
        answered.wait(within_s)
        return any(answers)

    def adopt(self, member: Member) -> bool:
        """Claim a member that has come back under another name; False if it may not be used.

        It may have missed a clear meanwhile, so our claim is written again. May block.

        Raises
        ------
        OSError
            If it cannot be read or written.
        """
        core = self._core
        with core.lock:
            claims = {} if self.lost_to or self._released else dict(self._claims)
        for shard in claims:
            if not member.try_lock(core.geometry.claim_offset(shard, 0), 2 * CLAIM_BYTES):
                log.error("%s: shard %d is in use by another process", member.name, shard)
                return False
        for shard, claim in claims.items():
            began, sure = self._machine.clock(), self.may_write()
            seen = valid_claims(read_claims([member], core.geometry, shard), core.volume, shard)
            if (rival := rival_of(claim, seen)) is not None:
                self._lose(shard, rival)
                return False
            late = self._machine.clock() - began > self._timing.renew_within_s
            if late or not (sure or is_there(claim, seen)):
                log.error("%s: shard %d may be somebody else's; not used yet", member.name, shard)
                return False
            write_claim(member, core.geometry, core.volume, claim)
        return bool(claims)

    def status(self) -> list[dict[str, Any]]:
        """Describe our claims, as plain values."""
        with self._core.lock:
            now, holds = self._machine.clock(), self.may_write()
            left_s = max(0.0, self._lease_until - now) if holds else 0.0
            return [
                {
                    "shard": shard,
                    "holder": claim.holder,
                    "epoch": claim.epoch,
                    "generation": claim.generation,
                    "renewals": claim.counter,
                    "lease_left_s": round(left_s, 3),
                    "lost_to": self.lost_to,
                }
                for shard, claim in sorted(self._claims.items())
            ]

    def problems(self) -> list[str]:
        """List what is wrong with our claims."""
        if self.lost_to:
            return [f"the claim was taken over by {self.lost_to}: nothing is stored"]
        if self._released or self._core.forked or (self.may_write() and not self._failing):
            return []
        if self.may_write():
            return ["the last renewal of the claims failed: if they go on, nothing is stored"]
        since = max(self._lease_until, self._held_since)
        away_s = max(0.0, self._machine.clock() - since)
        return [f"the claims are not confirmed since {away_s:.0f} s: nothing is stored until then"]

    # ----- rounds

    def _age_s(self, current: _Round) -> float:
        return self._machine.clock() - current.started

    def _begin(self) -> None:
        """Begin a round if there is reason for one, and none is under way."""
        with self._core.lock:
            if self._round is not None or not (self._lookers or self._writers):
                return
            current = _Round(self._machine.clock(), self._lookers, self._writers, self._release)
            self._lookers, self._writers, self._round = [], [], current
            current.judged = self._released  # what was asked for while the claims were given back
        with self._ends_if_it_fails(current):
            self._look(current)

    @contextmanager
    def _ends_if_it_fails(self, current: _Round) -> Iterator[None]:
        """End a round that memory lacks for: whoever waits for it is answered at once."""
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - whatever it is, the next round must begin
            self._core.defects.caught("the claims were not looked at or not renewed", problem)
            current.judged, current.problem = True, problem.with_traceback(None)  # holds buffers
            self._answer_lookers(current, ours=False)
            self._conclude(current)

    def _look(self, current: _Round) -> None:
        with self._core.lock:
            members = [] if current.judged else self._reachable()
            if not current.writers:
                members = members[:1]  # whoever takes over writes to all
            jobs = [self._look_job(current, member) for member in members]
            current.pending = set(members)
            self._note_begun(jobs)
        if jobs:
            self._core.submit(jobs, self._engine)
        elif current.judged:
            self._answer_lookers(current, ours=False)
            self._conclude(current)
        else:
            self._judge(current)

    def _reachable(self) -> list[int]:
        """Return members that are up and have no claim I/O of ours: so one write at most is late.

        A new owner writes both blocks, and one late write of ours destroys one.
        """
        down = self._engine.down_mask()
        members = range(len(self._core.geometry.members))
        return [m for m in members if not down >> m & 1 and not self._busy[m]]

    def _deadline(self) -> float:
        options = self._core.options
        return self._engine.now() + min(options.load_s, options.store_s)  # whole puts wait for it

    def _look_job(self, current: _Round, member: int) -> Job:
        buffer = zero_buffer(2 * CLAIM_BYTES * len(self._area))
        offset = self._core.geometry.claim_offset(self._area.start, 0)
        transfer = Transfer(member, offset, buffer, 0, buffer.length)

        def done(job: Job) -> None:
            self._looked(current, member, buffer, job)

        return Job(False, [transfer], self._deadline(), done, self._came_back, urgent=True)

    def _looked(self, current: _Round, member: int, buffer: IoBuffer, job: Job) -> None:
        with self._ends_if_it_fails(current):
            with self._core.lock:
                self._note_over(member, job)
                if current.judged:
                    return
                if job.ok:
                    current.seen[member] = bytes(buffer.view)
                current.pending.discard(member)
                ready = not current.pending
            if ready:
                self._judge(current)

    def _note_begun(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for transfer in job.transfers:
                self._busy[transfer.member] += 1

    def _note_over(self, member: int, job: Job) -> None:
        self._busy[member] -= sum(not transfer.in_kernel for transfer in job.transfers)

    def _came_back(self, transfer: Transfer) -> None:
        with self._core.lock:
            self._busy[transfer.member] -= 1

    def _judge(self, current: _Round) -> None:
        """Compare what was seen with our claims; if these hold, write those asked for."""
        with self._core.lock:
            if current.judged:
                return
            current.judged = True
            current.pending = set()
            ours = self._holds(current)
            if ours:
                self._looked_at = current.started
            in_time = self._age_s(current) <= self._timing.renew_within_s
            jobs = self._write_jobs(current) if ours and in_time and current.writers else []
        if jobs:
            self._core.submit(jobs, self._engine)
        self._answer_lookers(current, ours=ours)
        if not jobs:
            self._conclude(current)

    def _holds(self, current: _Round) -> bool:
        """Whether the shards are ours by what was seen; notes it if they are lost."""
        if not current.seen:
            return False
        sure = not current.writers or current.started <= self._lease_until
        for shard, claim in self._claims.items():
            at = 2 * CLAIM_BYTES * (shard - self._area.start)
            parts = [area[at : at + 2 * CLAIM_BYTES] for area in current.seen.values()]
            blocks = [half for p in parts for half in (p[:CLAIM_BYTES], p[CLAIM_BYTES:])]
            seen = valid_claims(blocks, self._core.volume, shard)
            if (rival := rival_of(claim, seen)) is not None:
                self._lose(shard, rival)
                return False
            if not seen and not current.writers:
                return False  # on one member alone that may be damage
            if not seen or not (sure or is_there(claim, seen)):
                self._lose(shard, None)
                return False
            current.marred |= len(seen) < len(blocks) or any(c.rank != claim.rank for c in seen)
        return True

    def _lose(self, shard: int, rival: ClaimBlock | None) -> None:
        with self._core.lock:
            if self.lost_to:
                return
            who = "somebody who overwrote it"
            if rival is not None:
                who = rival.holder or "somebody who has given it back since"
            self.lost_to = who
            self._core.counts["claim_lost"] += 1
        log.error("our claim on shard %d was taken over by %s; nothing more is stored", shard, who)

    def _write_jobs(self, current: _Round) -> list[Job]:
        generations = self._core.generations
        settled = self._settled_at(current.started)
        claims = {}
        for shard, claim in self._claims.items():
            holder = rules.confirmed(claim.holder) if settled else claim.holder
            claims[shard] = replace(
                claim,
                counter=claim.counter + 1,
                generation=generations.get(shard, claim.generation),
                holder="" if current.release else holder,
            )
        buffer = zero_buffer(CLAIM_BYTES * len(claims))
        for place, claim in enumerate(claims.values()):
            at = CLAIM_BYTES * place
            buffer.view[at : at + CLAIM_BYTES] = claim.pack(self._core.volume)
        members = [member for member in self._reachable() if member in current.seen]
        jobs = [self._write_job(current, member, buffer, claims) for member in members]
        current.pending = set(members)
        self._claims = claims
        self._released |= current.release
        self._note_begun(jobs)
        return jobs

    def _write_job(
        self, current: _Round, member: int, buffer: IoBuffer, claims: dict[int, ClaimBlock]
    ) -> Job:
        geometry = self._core.geometry
        transfers = [
            Transfer(
                member,
                geometry.claim_offset(shard, claim.counter % 2),
                buffer,
                CLAIM_BYTES * place,
                CLAIM_BYTES,
            )
            for place, (shard, claim) in enumerate(claims.items())
        ]

        def done(job: Job) -> None:
            self._written(current, member, job)

        return Job(True, transfers, self._deadline(), done, self._came_back, urgent=True)

    def _written(self, current: _Round, member: int, job: Job) -> None:
        with self._ends_if_it_fails(current):
            with self._core.lock:
                self._note_over(member, job)
                if current.over:
                    return
                if job.ok and self._age_s(current) <= self._timing.renew_within_s:
                    current.written += 1
                    self._extend(current.started)
                else:
                    current.failed += 1
                current.pending.discard(member)
                ready = not current.pending
            if ready:
                self._conclude(current)

    def _extend(self, started: float) -> None:
        """Note a renewal: on one member it is enough, since whoever watches reads all of them.

        Without a lease we are as an opener is: what was written must settle before it counts. Else
        somebody who looked before it may be about to write.
        """
        now, lease_s = self._machine.clock(), self._timing.lease_s
        if now <= self._lease_until or self._settled_at(started):
            self._lease_until = started + lease_s
        elif started > self._held_since + lease_s:
            self._held_since = now

    def _settled_at(self, started: float) -> bool:
        """Whether a look at that time confirms what we wrote without a lease."""
        return rules.SETTLE_S <= started - self._held_since <= self._timing.lease_s

    def _abandon(self, current: _Round) -> None:
        """Go on without the members that do not answer."""
        with self._ends_if_it_fails(current):
            if not current.judged:
                self._judge(current)
            else:
                self._conclude(current)

    def _conclude(self, current: _Round) -> None:
        with self._core.lock:
            if current.over:
                return
            current.over = True
            self._round = None
            self.failure = current.problem
            mends = self._mends = current.marred and current.written > 0 and not self._mends
            everywhere = current.written > 0 and not current.failed and not current.pending
            if current.writers and not self._released and not self.lost_to:
                self._failing = not current.written
                if self._failing:
                    self._core.counts["claim_renewal_failures"] += 1
                else:
                    self._core.counts["claim_renewals"] += 1
        self._answer(current.writers, lambda: everywhere)
        if mends:
            self.renew(_nobody_asks)  # the other block, before another late write hits this one
        else:
            self._begin()

    def _answer_lookers(self, current: _Round, *, ours: bool) -> None:
        with self._core.lock:
            lookers, current.lookers = current.lookers, []
        self._answer(lookers, lambda: ours and self.may_write())

    def _answer(self, answers: Sequence[Answer], ours: Callable[[], bool]) -> None:
        for answer in answers:
            with self._core.defects.guard("whoever waited for a claim failed to take the answer"):
                answer(ours())  # asked for each: what another one did with it may have taken long


def _nobody_asks(_: bool) -> None:
    """Whether a renewal worked is counted, and shown as a problem."""
