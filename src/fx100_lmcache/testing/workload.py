"""Random workloads on a small store, recorded with everything an oracle needs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fx100_lmcache.store import StoreOptions
from fx100_lmcache.testing.harness import SCOPE, Rig, value_of
from fx100_lmcache.testing.memory import Fault, Journal, MemoryMember
from fx100_lmcache.testing.oracle import Oracle

BIG_BYTES, SMALL_BYTES = 3 * 16384 + 1000, 700
NAMES = [f"object{n}" for n in range(8)]


@dataclass
class Recording:
    """A workload that was run: its writes, and what they meant.

    Attributes
    ----------
    start : int
        Journal position after the first format and open; crashes before it are not looked at.
    formats : list of (begin, end)
        Positions of formats during the workload.
    log : list of str
        The operations, for a person who looks for the cause of a violation.
    """

    members: list[MemoryMember]
    options: StoreOptions
    journal: Journal
    oracle: Oracle = field(default_factory=Oracle)
    start: int = 0
    wall_s: int = 0
    formats: list[tuple[int, int]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def formatting(self, at: int) -> bool:
        """Whether a crash at this position interrupts a format."""
        return any(begin < at < end for begin, end in self.formats)


class Workload:
    """Runs random operations.

    Parameters
    ----------
    seed : int
        The same seed gives the same operations and the same bytes.
    """

    def __init__(self, seed: int, *, members: int = 2, size_bytes: int = 192 * 1024) -> None:
        self._rng = random.Random(seed)
        self._rig = Rig.fresh(members, size_bytes, options=StoreOptions(reserve_fraction=0.0))
        self._versions = dict.fromkeys(NAMES, 0)
        self._recording = Recording(
            self._rig.members, self._rig.options, self._rig.journal, start=len(self._rig.journal)
        )

    def run(self, operations: int) -> Recording:
        """Make operations and return their recording."""
        kinds = {
            self._put: 10,
            self._replace: 4,
            self._remove: 4,
            self._stalled_put: 2,
            self._release: 3,
            self._clear: 1,
            self._kill: 2,
            self._close: 1,
            self._format: 0.3,
        }
        for _ in range(operations):
            operation = self._rng.choices(list(kinds), list(kinds.values()))[0]
            self._recording.log.append(operation.__name__.strip("_"))
            operation()
            self._rig.check_space()
        self._release()
        self._recording.wall_s = self._rig.wall_s + 1000
        return self._recording

    @property
    def _at(self) -> int:
        return len(self._rig.journal)

    def _new_value(self, name: str) -> bytes:
        self._versions[name] += 1
        length = self._rng.choice((BIG_BYTES, SMALL_BYTES, 16384, 16384 + 5000))
        return value_of(name, self._versions[name], length)

    def _put(self, name: str = "") -> None:
        name = name or self._rng.choice(NAMES)
        self._start_put(name, self._new_value(name))

    def _start_put(self, name: str, value: bytes) -> bool:
        """Begin a put and tell the oracle; False if it has not finished."""
        oracle, begin = self._recording.oracle, self._at
        evicted: list[str] = []
        by_digest = {SCOPE.digest(each.encode()): each for each in NAMES}
        self._rig.store.on_evicted(lambda gone: evicted.extend(by_digest[d] for d, _, _ in gone))
        results = self._rig.start_put(name, value)
        for each in evicted:  # a replaced object counts too: it goes before the new one comes
            oracle.begin(each, None, begin).end = None if self._rig.lanes.stalled else self._at
        if not results:
            oracle.begin(name, value, begin)
        elif results[0].written:  # otherwise present with its older value, or no room
            oracle.begin(name, value, begin).end = self._at
        return bool(results)

    def _replace(self) -> None:
        name = self._rng.choice(NAMES)
        self._remove(name)
        self._put(name)

    def _remove(self, name: str = "") -> None:
        name = name or self._rng.choice(NAMES)
        change = self._recording.oracle.begin(name, None, self._at)
        self._rig.store.remove([SCOPE.digest(name.encode())], force=True)
        if not self._rig.lanes.stalled:
            change.end = self._at

    def _stalled_put(self) -> None:
        """Begin a put whose first or second write the kernel keeps past its deadline."""
        if self._rig.lanes.stalled:
            return
        index = self._rng.randrange(len(self._rig.members))
        member = self._rig.members[index]
        member.faults = [Fault("stall", "write", after=self._rng.randrange(3))]
        name = self._rng.choice(NAMES)
        finished = self._start_put(name, self._new_value(name))
        member.faults = []
        if finished:  # it did not meet the fault
            return
        self._rig.clock.advance(self._rig.options.store_s + 1)
        self._rig.engine.expire_due()
        for slot in range(len(self._rig.members)):  # a probe finds that the member works
            self._rig.engine.probe(slot)

    def _release(self) -> None:
        """Let the kernel finish what it kept."""
        self._rig.lanes.release()

    def _clear(self) -> None:
        oracle = self._recording.oracle
        begun = [oracle.begin(name, None, self._at) for name in NAMES]
        self._rig.store.clear()
        for change in begun:
            change.end = self._at

    def _kill(self) -> None:
        self._rig.reopen()

    def _close(self) -> None:
        self._release()
        self._rig.store.close(0.1)
        self._rig.reopen()

    def _format(self) -> None:
        self._release()
        oracle, begin = self._recording.oracle, self._at
        begun = [oracle.begin(name, None, begin) for name in NAMES]
        self._rig.format()
        self._recording.formats.append((begin, self._at))
        for change in begun:
            change.end = self._at
        self._rig.reopen()
