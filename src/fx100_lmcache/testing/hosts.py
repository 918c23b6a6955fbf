"""Several hosts on one volume: every schedule of their writes, clocks, pauses and deaths.

Each host runs the product's own store on in-line lanes, on a thread of its own, but only one of
them runs at a time: at each write, at each look at a claim and whenever a host sleeps, the schedule
may go on with another one, or stop this host for a while, or kill it. What a host had in the kernel
may reach the media long after. Kernel locks are seen under one boot only.

What must hold is checked as it happens; what does not raises :class:`Violation`.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.deadlines import Expiry
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.ondisk.claim_block import ClaimBlock
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES, round_up
from fx100_lmcache.store import LoadItem, LoadResult, PutItem, PutResult, Store, StoreOptions
from fx100_lmcache.testing.harness import META, Rig, digest_of, small_geometry
from fx100_lmcache.testing.inline import InlineLanes, inline_engine
from fx100_lmcache.testing.memory import Fault, MemoryMember
from fx100_lmcache.volume.claim import WRITE_WITHIN_S, ClaimTiming, valid_claims
from fx100_lmcache.volume.machine import Machine
from fx100_lmcache.volume.volume import assemble, format_volume

TIMING = ClaimTiming()
RATES = (0.95, 1.05)  # of a host's clock: far worse than any real one
SECTOR_BYTES = 512
NAMES = [f"object{n}" for n in range(6)]
LENGTHS = (700, 4096, 16384, 21000)
PAUSES_S = (0.3, 2.0, 5.0, 8.0, 9.5, 13.0, 14.0, 15.0, 16.0, 25.0)
_TICK_S = 0.005  # I/O that takes no longer holds up everybody, and is cheaper to simulate
_REPORT_EVERY = 500
_RUSH_S = 4.0  # at each multiple of this those in a rush open the volume
_OPENING_S = 3.0  # beyond watch and settling, for what an opener's own I/O may take


class Violation(AssertionError):  # noqa: N818 - a finding, not a fault of ours
    """A promise was broken; the message says by whom and how."""


class _Crash(BaseException):
    """The process dies here."""


class _Over(BaseException):
    """The schedule has ended; threads go home."""


@dataclass(frozen=True)
class Odds:
    """How often things happen, at each place where a host can be stopped.

    Attributes
    ----------
    switch, pause, crash, slow : float
        Another host goes on; this one is stopped for a while; it dies; its I/O takes long.
    late, late_claim : float
        A write stays in the kernel, at each operation; one of a claim, at each heartbeat.
    rush : float
        A host that has nothing open waits for the moment at which others do so, too.
    operator : float
        An open comes with the operator's word.
    clock_stops : float
        A pause also stops the host's clock, as a paused virtual machine's.
    io_s : float
        The longest ordinary I/O, in seconds.
    arrive : float
        A late write of a dead process reaches the media, whenever another host goes on.
    """

    switch: float = 0.25
    pause: float = 0.01
    crash: float = 0.004
    slow: float = 0.005
    late: float = 0.1
    late_claim: float = 0.02
    rush: float = 0.3
    operator: float = 0.1
    clock_stops: float = 0.0
    io_s: float = 0.004
    arrive: float = 0.02


VARIETIES = (
    Odds(),
    Odds(rush=1.0, pause=0.03, crash=0.01, late_claim=0.2),
    Odds(rush=0.7, pause=0.02, crash=0.01, late_claim=0.1, slow=0.0, io_s=0.06),
    Odds(rush=0.5, crash=0.02, late_claim=0.7, arrive=0.1),
    Odds(rush=0.5, pause=0.03, operator=0.0),
    Odds(rush=0.5, pause=0.03, clock_stops=0.5),
)
"""Each is good at another thing: races of openers, slow media, late claims, dead owners, clocks."""


class HostMember(MemoryMember):
    """A member as one process of one host sees it: the media are shared."""

    def __init__(self, shared: MemoryMember, process: Process) -> None:
        super().__init__(0, block=shared.logical_block_bytes, index=shared.index)
        self.size_bytes = shared.size_bytes
        self.media = shared.media
        self._process = process

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read; a look at the claims may be interrupted before and after."""
        claims = self._process.world.is_claim(offset)
        if claims:
            self._process.may_stop()
        moved = super().read_into(offset, buffer)
        if claims and len(buffer) == 2 * CLAIM_BYTES:
            self._process.looked(self.index, bytes(buffer))
        return moved

    def write_from(self, offset: int, buffer: memoryview) -> int:
        """Write; the host may stop before it, or between two of its sectors."""
        process = self._process
        process.may_stop()
        process.check_may_write(offset)
        claim = process.world.is_claim(offset)  # all of it is in the first sector
        part = 0 if claim else process.world.torn_at(len(buffer))
        if part:
            super().write_from(offset, buffer[:part])
            process.may_stop()
            super().write_from(offset + part, buffer[part:])
        else:
            super().write_from(offset, buffer)
        process.world.wrote(process, self.index, offset, bytes(buffer[:CLAIM_BYTES]))
        return len(buffer)

    def _apply(self, at: int, data: bytes) -> None:
        self.media[at : at + len(data)] = data

    def try_lock(self, offset: int, length: int) -> bool:
        """Take a lock that processes under the same boot see."""
        locks = self._process.world.locks[self._process.boot_id]
        return locks.setdefault((self.index, offset), self._process) is self._process


class HostStore(Store):
    """A store that does nothing more when its process dies while it is opened."""

    def __init__(self, process: Process, *arguments: Any, **options: Any) -> None:
        self._process = process
        super().__init__(*arguments, **options)

    def _undo(self) -> None:
        if not self._process.dead:
            super()._undo()


@dataclass(eq=False)
class Process:
    """One run of a server on a host.

    Attributes
    ----------
    rank : tuple or None
        Of the claim that it wrote last.
    opened : str
        How it became the owner: ``at once``, ``watch`` or ``operator``; empty until then.
    knows : bool
        It has read a claim that beats its own.
    told : bool
        It opens with the operator's word.
    overruled : bool
        An operator said that it is dead, so it may go on until it looks.
    releasing : bool
        The kernel finishes what it kept: nothing of that is the process' own doing.
    """

    world: World
    host: Host
    boot_id: str
    rank: tuple[int, str] | None = None
    opened: str = ""
    knows: bool = False
    releasing: bool = False
    told: bool = False
    released: bool = False
    dead: bool = False
    overruled: bool = False
    looked_at: float = 0.0
    first_write: int = 0
    next_beat: float = 0.0
    store: Store = field(init=False)
    engine: LaneEngine = field(init=False)
    lanes: InlineLanes = field(init=False)

    def may_stop(self) -> None:
        """Let the schedule interrupt, unless it is the kernel that is at work."""
        if not self.releasing:
            self.host.may_stop()

    def looked(self, member: int, area: bytes) -> None:
        """Note what a look at the claims must have told."""
        if member == 0:
            self.looked_at = self.world.now  # where every look begins
        if self.rank is not None and self.opened:
            blocks = (area[:CLAIM_BYTES], area[CLAIM_BYTES:])
            seen = valid_claims(blocks, self.world.volume, 0)
            self.knows = self.knows or any(claim.rank > self.rank for claim in seen)

    def check_may_write(self, offset: int) -> None:
        """Whoever has seen that it was replaced writes nothing."""
        if self.knows and not self.releasing:
            what = "a claim" if self.world.is_claim(offset) else "data"
            raise Violation(f"{self} wrote {what} after it had seen that it was replaced")

    def abandon(self) -> None:
        """Die: whatever is unwound afterwards does nothing."""
        self.dead = True
        if hasattr(self, "engine"):
            self.engine._inert = True  # as in a forked child: it queues nothing more
            self.engine._expiry = Expiry()  # and nobody waits for what it had queued

    def __str__(self) -> str:
        return f"host {self.host.index} ({self.opened or 'opening'}, rank {self.rank})"


class Host:
    """A machine with a clock of its own, which opens the volume again and again."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.rng = random.Random(world.rng.random())
        self.boots = 0
        self.rate = self.rng.uniform(*RATES)
        self.skew_s = self.rng.choice((-40, 0, 0, 3))
        self.wakes_at = 0.0
        self.stopped_s = 0.0  # by which its clock is behind
        self.pauses = 0
        self.process: Process | None = None
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread = threading.Thread(target=self._run, name=f"host{index}", daemon=True)

    # ----- time and turns

    def clock(self) -> float:
        """Read this host's clock."""
        return 1000.0 * self.index + self.rate * (self.world.now - self.stopped_s)

    def sleep(self, seconds: float) -> None:
        """Let time pass on this host's clock."""
        self._wait_until(self.world.now + seconds / self.rate)

    def _wait_until(self, moment: float) -> None:
        self.wakes_at = moment
        while self.world.now < moment:
            self.world.switch(self)

    def may_stop(self) -> None:
        """Let time pass, and perhaps others go on, or this host stop or its process die."""
        world, rng, odds = self.world, self.rng, self.world.odds
        process = self.process
        if process is not None and process.dead:
            raise _Crash
        takes_s = rng.uniform(0, odds.io_s)
        if rng.random() < odds.slow:
            takes_s = rng.uniform(0.3, 1.2)
            self.pauses += 1
        if takes_s > _TICK_S:
            self._wait_until(world.now + takes_s)
        else:
            world.now += takes_s
        if rng.random() < odds.crash and process is not None:
            world.counts["crashes"] += 1
            process.abandon()
            raise _Crash
        if rng.random() < odds.pause:
            self._pause()
        elif rng.random() < odds.switch:
            world.switch(self)

    def _pause(self) -> None:
        world, before = self.world, self.world.now
        stops = self.rng.random() < world.odds.clock_stops
        self.pauses += 1
        world.counts["pauses"] += 1
        self._wait_until(before + self.rng.choice(PAUSES_S))
        if stops:
            self.stopped_s += world.now - before

    def _run(self) -> None:
        self.turn.acquire()
        try:
            while self.world.now < self.world.ends_at:
                self._step()
        except _Over:
            pass
        except BaseException as problem:  # noqa: BLE001 - told to whoever runs the schedule
            self.world.fail(problem)
        finally:
            self.world.leave(self)

    def _step(self) -> None:
        try:
            if self.process is None:
                rush = self.rng.random() < self.world.odds.rush
                wait_s = _RUSH_S - self.world.now % _RUSH_S if rush else self.rng.uniform(0, 6)
                self.sleep(wait_s * self.rate)
                self.boots += self.rng.random() < 0.3
                self._open()
            else:
                self._tend(self.process)
                self._act(self.process)
                self.sleep(self.rng.expovariate(2.0))
        except _Crash:
            self._die()

    # ----- what a server does

    def _open(self) -> None:
        world, rng = self.world, self.rng
        process = self.process = Process(world, self, f"boot{self.index}.{self.boots}")
        told = process.told = rng.random() < world.odds.operator
        members = [HostMember(shared, process) for shared in world.members]
        volume = assemble(members)
        process.engine, process.lanes, _ = inline_engine(
            volume.members,
            clock=self.clock,  # type: ignore[arg-type]  # not a clock that tests advance
            probe=lambda _, member: member,
        )
        machine = Machine(process.boot_id, "localhost", "", self.clock, self.sleep, world.new_nonce)
        began, before = self.clock(), (self.pauses, len(world.claim_writers))
        world.opening.add(process)
        try:
            process.store = HostStore(
                process,
                volume,
                process.engine,
                options=StoreOptions(reserve_fraction=0.0, load_s=4.0, store_s=8.0),
                wall_clock=lambda: 1_000_000 + self.skew_s + world.now,
                take_over=told,
                machine=machine,
                heartbeat=False,
            )
        except (ClaimError, OSError):
            world.counts["refused"] += 1
            if self._undisturbed(process, before):
                world.check_refused(process)
            if self.pauses == before[0]:
                world.check_turned_away(process)
            self._die()
            return
        finally:
            world.opening.discard(process)
        took_s = self.clock() - began
        watched = process.store.counts()["claims_taken_over_by_watch"]
        process.opened = "operator" if told else "watch" if watched else "at once"
        world.counts[f"opened: {process.opened}"] += 1
        if self._undisturbed(process, before):
            world.check_opening(process, took_s)
        world.confirmed(process)

    def _undisturbed(self, process: Process, before: tuple[int, int]) -> bool:
        """Whether since then this host ran on, and nobody else wrote a claim."""
        pauses, writes = before
        others = any(by is not process for by in self.world.claim_writers[writes:])
        return self.pauses == pauses and not others

    def _tend(self, process: Process) -> None:
        """Do what the engine's and the heartbeat's threads do."""
        process.engine.expire_due()
        for index in range(len(self.world.members)):
            process.engine.probe(index)
        if self.clock() >= process.next_beat:
            if self.rng.random() < self.world.odds.late_claim:
                self._stall(process, "claim")
            delay_s = process.store.beat()
            process.next_beat = self.clock() + (delay_s if delay_s is not None else 1e9)

    def _act(self, process: Process) -> None:
        rng = self.rng
        actions = (self._put, self._load, self._remove, self._clear, self._release, self._close)
        if rng.random() < self.world.odds.late:
            self._stall(process, "any")
        rng.choices(actions, (10, 6, 2, 0.5, 2, 0.5))[0](process)
        if self.process is process:
            for index in range(len(self.world.members)):
                process.engine.member(index).faults = []  # type: ignore[attr-defined]

    def _stall(self, process: Process, what: str) -> None:
        """Have the kernel keep one write, until it is released or long after the process died."""
        member = process.engine.member(self.rng.randrange(len(self.world.members)))
        assert isinstance(member, HostMember)
        claims = self.world.claims_at
        if what == "claim":
            fault = Fault("stall", "write", first_byte=claims.start, last_byte=claims.stop - 1)
        else:
            fault = Fault("stall", "write", after=self.rng.randrange(3), first_byte=claims.start)
        member.faults = [fault]

    def _put(self, process: Process) -> None:
        world, name = self.world, self.rng.choice(NAMES)
        value = _value(f"{name}.{len(world.values[name])} ", self.rng.choice(LENGTHS))
        world.values[name].add(value)
        buffer = zero_buffer(-(-len(value) // 4096) * 4096)
        buffer.view[: len(value)] = value
        buffer.length = len(value)

        def answered(results: list[PutResult]) -> None:
            if results[0].stored:
                world.acknowledged(process)
            else:
                world.counts[f"not stored: {results[0].reason}"] += 1

        process.store.put([PutItem(digest_of(name), META, buffer)], answered)

    def _load(self, process: Process) -> None:
        self.world.check_loads(process, [self.rng.choice(NAMES)])

    def _remove(self, process: Process) -> None:
        process.store.remove([digest_of(self.rng.choice(NAMES))])

    def _clear(self, process: Process) -> None:
        if not process.lanes.stalled:  # it would wait for the look
            process.store.clear()

    def _release(self, process: Process) -> None:
        process.releasing = True
        try:
            process.lanes.release()
        finally:
            process.releasing = False

    def _close(self, process: Process) -> None:
        process.store.close(0.0)
        self.world.counts["closes"] += 1
        self._die()

    def _die(self) -> None:
        """End the process: the kernel drops its locks, and keeps what it is writing."""
        process, self.process = self.process, None
        assert process is not None
        process.abandon()
        if hasattr(process, "lanes"):
            self.world.late_writes += process.lanes.kept_writes()
        locks = self.world.locks[process.boot_id]
        for place in [place for place, owner in locks.items() if owner is process]:
            del locks[place]


class World:
    """One volume, several hosts, one schedule.

    Parameters
    ----------
    seed : int
        The same seed gives the same schedule.
    """

    def __init__(
        self, seed: int, *, hosts: int = 2, odds: Odds | None = None, lasts_s: float = 45.0
    ) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.odds = odds or Odds()
        self.now, self.ends_at = 1.0, 1.0 + lasts_s
        self.members = [
            MemoryMember(96 * 1024, index=index) for index in range(self.rng.choice((1, 2)))
        ]
        volume = format_volume(self.members, small_geometry(self.members), unix_s=1)
        self.geometry, self.volume = volume.geometry, volume.uuid
        self.claims_at = range(
            self.geometry.claim_offset(0, 0), self.geometry.claim_offset(0, 0) + 2 * CLAIM_BYTES
        )
        self._halves = (self.claims_at.start, self.claims_at.start + CLAIM_BYTES)
        self.locks: defaultdict[str, dict[tuple[int, int], Process]] = defaultdict(dict)
        self.values: defaultdict[str, set[bytes]] = defaultdict(set)
        self.late_writes: list[tuple[int, int, bytes]] = []
        self.counts: Counter[str] = Counter()
        self.claim_writers: list[Process | None] = []
        self.renewed_at: dict[tuple[int, str], float] = {}
        self.stale_writers: set[object] = set()
        self.opening: set[Process] = set()
        self.owner: Process | None = None
        self.hosts = [Host(self, index) for index in range(hosts)]
        self.problem: BaseException | None = None
        self._over = threading.Lock()
        self._over.acquire()
        self._alive = list(self.hosts)

    def run(self) -> Counter[str]:
        """Run the schedule, then look at what is left; return how often things happened.

        Raises
        ------
        Violation
            If a promise was broken.
        """
        for host in self.hosts:
            host.thread.start()
        self.rng.choice(self.hosts).turn.release()
        self._over.acquire()
        for host in self.hosts:
            host.thread.join()
        if self.problem is not None:
            raise self.problem
        self._check_what_is_left()
        return self.counts

    # ----- turns

    def switch(self, host: Host) -> None:
        """Go on with any host that is awake; return when it is this one's turn again."""
        if self.problem is None:
            self._next(host)
        if self.problem is not None:
            if host.process is not None:
                host.process.abandon()
            raise _Over

    def _next(self, host: Host | None) -> None:
        if self.late_writes and self.rng.random() < self.odds.arrive:
            self._let_arrive()
        awake = [each for each in self._alive if each.wakes_at <= self.now]
        if not awake:
            self.now = min(each.wakes_at for each in self._alive)
            awake = [each for each in self._alive if each.wakes_at <= self.now]
        chosen = self.rng.choice(awake)
        if chosen is not host:
            chosen.turn.release()
            if host is not None:
                host.turn.acquire()

    def leave(self, host: Host) -> None:
        """Take a host out; the last one ends the schedule."""
        self._alive.remove(host)
        if self._alive:
            if self.problem is not None:
                self._alive[0].turn.release()
            else:
                self._next(None)
        else:
            self._over.release()

    def fail(self, problem: BaseException) -> None:
        """End the schedule with a finding."""
        if self.problem is None:
            self.problem = problem

    def new_nonce(self) -> str:
        """Make a random word, the same for the same seed."""
        return f"{self.rng.getrandbits(48):012x}"

    # ----- what happens on the media

    def is_claim(self, offset: int) -> bool:
        """Whether the claim blocks begin or lie there."""
        return offset in self.claims_at

    def torn_at(self, length: int) -> int:
        """Choose where in a write the host may stop; 0 for nowhere."""
        if length <= SECTOR_BYTES or self.rng.random() < 0.9:
            return 0
        return self.rng.randrange(SECTOR_BYTES, length, SECTOR_BYTES)

    def _let_arrive(self) -> None:
        """Let a write of a process that is dead reach the media."""
        member, offset, data = self.late_writes.pop(self.rng.randrange(len(self.late_writes)))
        self.members[member].media[offset : offset + len(data)] = data
        self.counts["late writes"] += 1
        if self.is_claim(offset):
            self.counts["late claims"] += 1
            self._note_claim(None, data)

    def wrote(self, process: Process, member: int, offset: int, data: bytes) -> None:
        """Note a write that has reached the media."""
        if self.is_claim(offset):
            self._note_claim(process, data)

    def _note_claim(self, process: Process | None, data: bytes) -> None:
        claims = valid_claims([data], self.volume, 0)
        if not claims:
            return
        claim = claims[0]
        self.claim_writers.append(process)
        if process is not None:
            self._check_replacing(process, claim)
            if claim.holder:
                if process.rank is None:
                    process.first_write = len(self.claim_writers)
                process.rank = claim.rank
        owner = self.owner
        if owner is not None and not claim.holder and claim.epoch == (owner.rank or (0, ""))[0]:
            owner.released = True
        if process is not None and (not process.opened or process.store.may_write):
            self.renewed_at[claim.rank] = self.now
        self._check_order(process, claim)

    # ----- what must hold

    def _check_replacing(self, process: Process, claim: ClaimBlock) -> None:
        """Refuse to see an owner replaced that renews its claim, unless an operator says so.

        An opener that is stopped between its look and its write may do so. It is not the owner then
        before it has watched for the whole time, and so not before the other has stopped.
        """
        owner = self.owner
        new = bool(claim.holder) and claim.rank != process.rank
        if new and process.told:
            self._overrule(process)
        if not new or owner is None or owner is process or owner.released:
            return
        if owner.boot_id == process.boot_id:
            if not owner.dead:
                raise Violation(f"{process} claims the shard of {owner}, which lives")
            return
        assert owner.rank is not None
        still_s = self.now - self.renewed_at[owner.rank]
        slow = self.now - process.looked_at > WRITE_WITHIN_S / RATES[1]
        if (
            still_s < TIMING.watch_s / RATES[1] - 0.01
            and not owner.overruled
            and not slow
            and not self.odds.clock_stops
        ):
            raise Violation(f"{process} replaces {owner}, which renewed {still_s:.1f} s before")

    def _overrule(self, process: Process) -> None:
        for other in (self.owner, *(host.process for host in self.hosts)):
            if other is not None and other is not process:
                other.overruled = True

    def _check_order(self, process: Process | None, claim: ClaimBlock) -> None:
        """See that the owner's claim stays in force, whatever one stale host still writes.

        An opener that was stopped between its look and its write may hide it until the owner's next
        renewal: it writes both blocks, and watches them then. So may two stale writes.
        """
        owner = self.owner
        if owner is None or owner.rank is None or owner.released:
            return
        if claim.rank < owner.rank:
            self.stale_writers.add(process or object())
        blocks = [
            bytes(m.media[at : at + CLAIM_BYTES]) for m in self.members for at in self._halves
        ]
        there = [c.rank >= owner.rank for c in valid_claims(blocks, self.volume, 0)]
        if all(there) and len(there) == len(blocks):
            self.stale_writers.clear()
        visible = any(there)
        if (
            visible
            or len(self.stale_writers) > 1
            or not self.stale_writers.isdisjoint(self.opening)
        ):
            return
        raise Violation(f"the claim of {owner} was destroyed by {process or 'a late write'}")

    def _check_alone(self, process: Process) -> None:
        """Nobody else may write, unless an operator said so or a clock stood still."""
        if self.odds.clock_stops:
            return
        for host in self.hosts:
            other = host.process
            if other is None or other is process or not other.opened or other.dead:
                continue
            if other.store.may_write and not (process.overruled or other.overruled):
                raise Violation(f"{process} and {other} may both write")

    def confirmed(self, process: Process) -> None:
        """Note a new owner."""
        self._check_alone(process)
        self.owner = process
        self.stale_writers.clear()

    def acknowledged(self, process: Process) -> None:
        """Note that a put was said to be stored."""
        self.counts["acknowledged"] += 1
        if process.knows:
            raise Violation(f"{process} acknowledged a put after it had seen that it was replaced")
        self._check_alone(process)

    def check_opening(self, process: Process, took_s: float) -> None:
        """See that a claim that stands still is replaced within the stated time."""
        watch_s = TIMING.watch_s if process.opened == "watch" else 0.0
        if took_s > watch_s + _OPENING_S:
            raise Violation(f"{process} took {took_s:.1f} s to open")

    def check_refused(self, process: Process) -> None:
        """Nobody is refused without a reason: nobody wrote, and no lock was held."""
        locked = any(p is not process for p in self.locks[process.boot_id].values())
        if not locked:
            raise Violation(f"{process} was refused, although no claim changed")

    def check_turned_away(self, process: Process) -> None:
        """See that one late write of the dead does not cost an opener its claim."""
        since = self.claim_writers[process.first_write :]
        if process.rank is not None and since.count(None) == 1 and {*since} <= {None, process}:
            raise Violation(f"{process} was turned away by a late write")

    def check_loads(self, process: Process, names: Sequence[str]) -> None:
        """See that a load gives what was once put under that name, or misses."""
        for name in names:
            buffer = zero_buffer(round_up(max(LENGTHS), 4096))
            item = LoadItem(digest_of(name), buffer, lambda _meta, _length: True)
            results: list[LoadResult] = []
            process.store.load([item], results.extend)
            if results and results[0].length:
                self.counts["loaded"] += 1
                if bytes(buffer.view[: results[0].length]) not in self.values[name]:
                    raise Violation(f"{process} loaded wrong bytes for {name}")

    def _check_what_is_left(self) -> None:
        """Whoever opens the volume afterwards finds it in order."""
        while self.late_writes:
            self._let_arrive()
        rig = Rig(self.members, StoreOptions(reserve_fraction=0.0), wall_s=2_000_000)
        rig.open(take_over=True)
        for _ in range(2):
            rig.check_space()
            for name in NAMES:
                found = rig.get(name)
                if found is not None and found not in self.values[name]:
                    raise Violation(f"wrong bytes for {name} after all has ended")
            rig.check_space()
            if not rig.put("afterwards", b"x" * 5000).stored:
                raise Violation("nothing can be stored after all has ended")
            rig.reopen()


def _value(words: str, length: int) -> bytes:
    unit = words.encode()
    return (unit * (length // len(unit) + 1))[:length]


def run_schedules(seeds: Iterable[int]) -> Counter[str]:
    """Run a schedule for each seed, with 2 or 3 hosts and each of `VARIETIES` in turn.

    Returns
    -------
    Counter
        How often things happened in all of them.

    Raises
    ------
    Violation
        With the seed that broke a promise.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        kind, hosts = seed % len(VARIETIES), 2 + seed // len(VARIETIES) % 2
        try:
            counts += World(seed, hosts=hosts, odds=VARIETIES[kind]).run()
        except Exception as problem:
            raise Violation(f"seed {seed} ({hosts} hosts): {problem}") from problem
        counts["schedules"] += 1
    return counts


def main() -> None:
    """Run schedules from the command line: ``python -m fx100_lmcache.testing.hosts 0 100000``."""
    logging.getLogger("fx100_lmcache").setLevel(logging.CRITICAL)
    first, last = map(int, sys.argv[1:3])
    counts: Counter[str] = Counter()
    for start in range(first, last, _REPORT_EVERY):
        counts += run_schedules(range(start, min(start + _REPORT_EVERY, last)))
        print(f"{time.process_time():.0f} s of CPU: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
