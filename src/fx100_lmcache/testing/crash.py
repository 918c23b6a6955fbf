"""Crash enumeration: run a workload, then reopen the volume as every crash would leave it.

Three families of states are made from the recorded writes:

* the process dies: a prefix of the writes, with nothing lost;
* a torn write: a prefix whose last write stops at a sector (512 or 4,096 bytes);
* a power cut: of the writes since the last flush any subset arrives, some of them torn.

Each state is opened and compared with the :class:`~fx100_lmcache.testing.oracle.Oracle`. A
difference raises :class:`Violation`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from fx100_lmcache.errors import VolumeError
from fx100_lmcache.testing.harness import Rig
from fx100_lmcache.testing.memory import Event, MemoryMember
from fx100_lmcache.testing.workload import Recording

EXHAUSTIVE_WRITES = 5  # of the last writes since a flush, every subset is tried


class Violation(AssertionError):  # noqa: N818 - a finding, not a fault of ours
    """A promise was broken; the message says in which state and how."""


@dataclass(frozen=True, slots=True)
class State:
    """One crash.

    Attributes
    ----------
    at : int
        Journal position of the crash.
    changed : tuple of (int, int)
        For writes that did not arrive whole: their number, and how many of their bytes did.
    power_cut : bool
        Whether writes since the last flush may have been lost.
    """

    at: int
    changed: tuple[tuple[int, int], ...] = ()
    power_cut: bool = False


def states(recording: Recording, seed: int, limit: int) -> Iterator[State]:
    """Yield crash states: all prefixes, then torn writes and power cuts, up to ``limit``."""
    events = recording.journal.events
    rng = random.Random(seed)
    count = 0
    for at in range(recording.start, len(events) + 1):
        yield State(at)
        count += 1
    families = [
        _torn(events, recording.start, rng),
        _subsets(events, recording.start, rng),
        _random_cuts(events, recording.start, rng),
    ]
    for family in itertools.cycle(families):
        state = next(family, None)
        if count >= limit or state is None:
            return
        yield state
        count += 1


def _torn(events: list[Event], start: int, rng: random.Random) -> Iterator[State]:
    while True:
        at = rng.randrange(start + 1, len(events) + 1)
        data = events[at - 1].data
        if data is None:
            continue
        unit = rng.choice((512, 4096))
        yield State(at, ((at - 1, rng.randrange(0, len(data), unit)),))


def _unflushed(events: list[Event], at: int) -> list[int]:
    since = last_flush(events, at)
    return [n for n in range(since, at) if events[n].data is not None]


def last_flush(events: list[Event], at: int) -> int:
    """Position up to which every member's writes are safe when the power goes at ``at``."""
    flushed: dict[int, int] = {}
    for number in range(at - 1, -1, -1):
        event = events[number]
        if event.data is None:
            flushed.setdefault(event.member, number)
    members = {event.member for event in events}
    return min((flushed.get(member, 0) for member in members), default=0)


def _subsets(events: list[Event], start: int, rng: random.Random) -> Iterator[State]:
    """All subsets of the last few unflushed writes, with a random one of them torn."""
    while True:
        at = rng.randrange(start + 1, len(events) + 1)
        tail = _unflushed(events, at)[-EXHAUSTIVE_WRITES:]
        for lost in itertools.product((False, True), repeat=len(tail)):
            changed = {n: 0 for n, gone in zip(tail, lost, strict=True) if gone}
            kept = [n for n in tail if n not in changed]
            if kept and rng.random() < 0.5:
                torn = rng.choice(kept)
                changed[torn] = rng.randrange(0, len(events[torn].data or b""), 512)
            yield State(at, tuple(changed.items()), power_cut=True)


def _random_cuts(events: list[Event], start: int, rng: random.Random) -> Iterator[State]:
    while True:
        at = rng.randrange(start + 1, len(events) + 1)
        share = rng.random()
        changed = {}
        for number in _unflushed(events, at):
            if rng.random() < share:
                length = len(events[number].data or b"")
                changed[number] = rng.choice((0, 0, rng.randrange(0, length, 512)))
        yield State(at, tuple(changed.items()), power_cut=True)


class Checker:
    """Opens states of one recording and compares them with its oracle."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._cached_at = -1
        self._cache: list[MemoryMember] = []

    def members(self, state: State) -> list[MemoryMember]:
        """Build the members as the crash leaves them."""
        changed = dict(state.changed)
        first = min(changed, default=state.at)
        base = self._prefix(first)
        for number in range(first, state.at):
            event = self._recording.journal.events[number]
            if event.data is not None:
                data = event.data[: changed.get(number, len(event.data))]
                base[event.member].media[event.offset : event.offset + len(data)] = data
        return base

    def _prefix(self, at: int) -> list[MemoryMember]:
        if at < self._cached_at or self._cached_at < 0:
            self._cache = [_copy(m, blank=True) for m in self._recording.members]
            self._cached_at = 0
        for event in self._recording.journal.events[self._cached_at : at]:
            if event.data is not None:
                media = self._cache[event.member].media
                media[event.offset : event.offset + len(event.data)] = event.data
        self._cached_at = at
        return [_copy(m) for m in self._cache]

    def check(self, state: State) -> None:
        """Open one state and compare.

        Raises
        ------
        Violation
            If a promise is broken.
        """
        rig = Rig(self.members(state), self._recording.options, wall_s=self._recording.wall_s)
        try:
            rig.open()
        except VolumeError as problem:
            if not self._recording.formatting(state.at):
                raise Violation(f"{state}: not openable: {problem}") from problem
            return
        try:
            self._compare(rig, state)
        except Violation:
            raise
        except Exception as problem:
            raise Violation(f"{state}: {type(problem).__name__}: {problem}") from problem

    def _compare(self, rig: Rig, state: State) -> None:
        rig.check_space()
        oracle = self._recording.oracle
        flushed = last_flush(self._recording.journal.events, state.at)
        for name in oracle.changes:
            if state.power_cut:
                possible = oracle.after_power_cut(name, state.at, flushed)
            elif state.changed:  # one torn write: it counts as not acknowledged
                possible = oracle.after_crash(name, state.at - 1)
                possible = possible | oracle.after_crash(name, state.at)
            else:
                possible = oracle.after_crash(name, state.at)
            found = rig.get(name)
            if found not in possible:
                raise Violation(
                    f"{state}: {name} is {_short(found)}, may be {sorted(map(_short, possible))}"
                )
        failures = rig.store.counts().get("checksum_failures", 0)
        if failures and not state.changed:
            raise Violation(f"{state}: {failures} entries were promised and not readable")
        rig.check_space()
        if state.at % 5 == 0:
            self._go_on(rig, state)

    def _go_on(self, rig: Rig, state: State) -> None:
        """Use the reopened store: it must work, and a clear must hold over the next crash."""
        if not rig.put("afterwards", b"x" * 5000).stored:
            raise Violation(f"{state}: nothing can be stored after the crash")
        rig.reopen()
        rig.check_space()
        if rig.get("afterwards") != b"x" * 5000:
            raise Violation(f"{state}: what was stored after the crash is gone")
        rig.store.clear()
        rig.reopen()
        rig.check_space()
        if len(rig.store):
            raise Violation(f"{state}: {len(rig.store)} entries came back after a clear")


def _copy(member: MemoryMember, *, blank: bool = False) -> MemoryMember:
    fresh = MemoryMember(0, block=member.logical_block_bytes, index=member.index, name=member.name)
    fresh.size_bytes = member.size_bytes
    fresh.media = bytearray(member.size_bytes) if blank else bytearray(member.media)
    return fresh


def _short(value: bytes | None) -> str:
    return "absent" if value is None else f"{value[:12]!r}... ({len(value)} bytes)"


def enumerate_crashes(recording: Recording, *, seed: int, limit: int) -> int:
    """Check up to ``limit`` states of a recorded workload; return how many there were."""
    checker = Checker(recording)
    count = 0
    for state in states(recording, seed, limit):
        checker.check(state)
        count += 1
    return count
