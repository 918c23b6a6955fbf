"""Several hosts on one volume: every schedule of their writes, clocks, pauses and deaths.

Each host runs the product's own store on in-line lanes, on a thread of its own, but only one of
them runs at a time: at each write, at each look at a claim and whenever a host sleeps, the schedule
may go on with another one, or stop this host for a while, or kill it. What a host had in the kernel
may reach the media long after. Kernel locks are seen under one boot only.

What must hold is checked as it happens; what does not raises
:class:`~fx100_lmcache.testing.promises.Violation`.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from fx100_lmcache.ondisk.geometry import CLAIM_BYTES
from fx100_lmcache.testing.harness import small_geometry
from fx100_lmcache.testing.host import Host, Odds, Over, Process
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.testing.promises import Promises, Violation
from fx100_lmcache.volume.format import format_volume

SECTOR_BYTES = 512
_REPORT_EVERY = 500

VARIETIES = (
    Odds(),
    Odds(rush=1.0, pause=0.03, crash=0.01, late_claim=0.2),
    Odds(rush=0.7, pause=0.02, crash=0.01, late_claim=0.1, slow=0.0, io_s=0.06),
    Odds(rush=0.5, crash=0.02, late_claim=0.7, arrive=0.1),
    Odds(rush=0.5, pause=0.03, operator=0.0),
    Odds(rush=0.5, pause=0.03, clock_stops=0.5),
)
"""Each is good at another thing: races of openers, slow media, late claims, dead owners, clocks."""


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
        self.halves = (self.claims_at.start, self.claims_at.start + CLAIM_BYTES)
        self.locks: defaultdict[str, dict[tuple[int, int], Process]] = defaultdict(dict)
        self.late_writes: list[tuple[int, int, bytes]] = []
        self.counts: Counter[str] = Counter()
        self.promises = Promises(self)
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
        while self.late_writes:
            self._let_arrive()
        self.promises.check_what_is_left()
        return self.counts

    # ----- turns

    def switch(self, host: Host) -> None:
        """Go on with any host that is awake; return when it is this one's turn again."""
        if self.problem is None:
            self._next(host)
        if self.problem is not None:
            if host.process is not None:
                host.process.abandon()
            raise Over

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
            self.promises.claimed(None, data)

    def wrote(self, process: Process, offset: int, data: bytes) -> None:
        """Note a write that has reached the media."""
        if self.is_claim(offset):
            self.promises.claimed(process, data)


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
