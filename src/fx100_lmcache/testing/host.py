"""One host of several on a volume: a machine with a clock, and the processes that run on it."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.deadlines import DeadlineQueue
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES
from fx100_lmcache.store import PutItem, PutResult, Store, StoreOptions
from fx100_lmcache.testing.harness import META, digest_of
from fx100_lmcache.testing.inline import InlineLanes, RaisingDefects
from fx100_lmcache.testing.memory import Fault, MemoryMember
from fx100_lmcache.volume.claim import valid_claims
from fx100_lmcache.volume.machine import Machine
from fx100_lmcache.volume.volume import assemble

if TYPE_CHECKING:  # which imports this module
    from fx100_lmcache.testing.hosts import World

RATES = (0.95, 1.05)  # of a host's clock: far worse than any real one
NAMES = [f"object{n}" for n in range(6)]
LENGTHS = (700, 4096, 16384, 21000)
PAUSES_S = (0.3, 2.0, 5.0, 8.0, 9.5, 13.0, 14.0, 15.0, 16.0, 25.0)
_TICK_S = 0.005  # I/O that takes no longer holds up everybody, and is cheaper to simulate
_RUSH_S = 4.0  # at each multiple of this those in a rush open the volume


class Crash(BaseException):
    """The process dies here."""


class Over(BaseException):
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
        process.world.wrote(process, offset, bytes(buffer[:CLAIM_BYTES]))
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
    by_word : bool
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
    by_word: bool = False
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
            self.world.promises.broken(
                f"{self} wrote {what} after it had seen that it was replaced"
            )

    def abandon(self) -> None:
        """Die: whatever is unwound afterwards does nothing."""
        self.dead = True
        if hasattr(self, "engine"):
            self.engine._inert = True  # as in a forked child: it queues nothing more
            self.engine._expiry = DeadlineQueue()  # and nobody waits for what it had queued

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
            raise Crash
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
            raise Crash
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
        except Over:
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
        except Crash:
            self._die()

    # ----- what a server does

    def _open(self) -> None:
        world, rng = self.world, self.rng
        process = self.process = Process(world, self, f"boot{self.index}.{self.boots}")
        by_word = process.by_word = rng.random() < world.odds.operator
        members = [HostMember(shared, process) for shared in world.members]
        volume = assemble(members)
        process.lanes = InlineLanes()
        process.engine = LaneEngine(
            volume.members,
            EngineOptions(),
            lambda _, member: member,
            lanes=process.lanes,
            clock=self.clock,
            defects=RaisingDefects(),
        )
        machine = Machine(process.boot_id, "localhost", "", self.clock, self.sleep, world.new_nonce)
        began, before = self.clock(), (self.pauses, len(world.promises.claim_writers))
        world.promises.opening.add(process)
        try:
            process.store = HostStore(
                process,
                volume,
                process.engine,
                options=StoreOptions(reserve_fraction=0.0, load_s=4.0, store_s=8.0),
                wall_clock=lambda: 1_000_000 + self.skew_s + world.now,
                take_over=by_word,
                machine=machine,
                heartbeat=False,
            )
        except (ClaimError, OSError):
            world.counts["refused"] += 1
            if self._undisturbed(process, before):
                world.promises.check_refused(process)
            if self.pauses == before[0]:
                world.promises.check_turned_away(process)
            self._die()
            return
        finally:
            world.promises.opening.discard(process)
        took_s = self.clock() - began
        watched = process.store.counts()["claims_taken_over_by_watch"]
        process.opened = "operator" if by_word else "watch" if watched else "at once"
        world.counts[f"opened: {process.opened}"] += 1
        if self._undisturbed(process, before):
            world.promises.check_opening(process, took_s)
        world.promises.confirmed(process)

    def _undisturbed(self, process: Process, before: tuple[int, int]) -> bool:
        """Whether since then this host ran on, and nobody else wrote a claim."""
        pauses, writes = before
        others = any(by is not process for by in self.world.promises.claim_writers[writes:])
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
        value = _value(f"{name}.{len(world.promises.values[name])} ", self.rng.choice(LENGTHS))
        world.promises.values[name].add(value)
        buffer = zero_buffer(-(-len(value) // 4096) * 4096)
        buffer.view[: len(value)] = value
        buffer.length = len(value)

        def answered(results: list[PutResult]) -> None:
            if results[0].stored:
                world.promises.acknowledged(process)
            else:
                world.counts[f"not stored: {results[0].reason}"] += 1

        process.store.put([PutItem(digest_of(name), META, buffer)], answered)

    def _load(self, process: Process) -> None:
        self.world.promises.check_loads(process, [self.rng.choice(NAMES)])

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


def _value(words: str, length: int) -> bytes:
    unit = words.encode()
    return (unit * (length // len(unit) + 1))[:length]
