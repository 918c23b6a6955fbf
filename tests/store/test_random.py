"""Random use of a small, full store, with faults: every put is answered once, by its deadline.

Transfers are made in-line, so that whatever an erase leads to happens at the worst moment: from
within whoever began it.
"""

import random
from collections.abc import Iterator

import pytest

from fx100_lmcache.store import LoadItem, LoadResult, PutResult
from fx100_lmcache.testing.harness import META, Rig, digest_of
from fx100_lmcache.testing.memory import Fault
from support.store import (
    CHUNK,
    OTHER_META,
    chunk,
    inode_writes,
    no_faults,
    options,
    start_load,
)

NAMES = [f"object{n}" for n in range(14)]
DEADLINE_S = 60.0
STEPS = 60
SEEDS = 250


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("CRITICAL", "fx100_lmcache"):
        yield


class Storm:
    """A store under random use, and what was promised about it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        members = self.rng.choice((1, 2, 3))
        self.rig = Rig.fresh(
            members,
            [self.rng.choice((96, 160, 224)) * 1024 for _ in range(members)],
            options=options(
                store_s=DEADLINE_S,
                width=self.rng.choice((0, 1)),
                reserve_fraction=self.rng.choice((0.0, 0.03)),
            ),
        )
        self.rig.engine._probe = lambda _, member: member
        self.answers: list[tuple[float, list[PutResult]]] = []
        self.versions: dict[str, dict[bytes, None]] = {name: {} for name in NAMES}
        self.loads: list[tuple[str, list[LoadResult], LoadItem]] = []

    def step(self) -> None:
        kinds = {
            self.put: 12,
            self.replace: 4,
            self.remove: 3,
            self.fail: 2,
            self.fail_to_erase: 3,
            self.stall_erases: 2,
            self.rewrite_what_is_read: 2,
            self.release: 3,
            self.load: 3,
            self.pin: 2,
            self.wait: 1,
            self.probe: 3,
            self.clear: 0.5,
        }
        self.rng.choices(list(kinds), list(kinds.values()))[0]()
        self.check()

    def put(self) -> None:
        self._put(self.rng.choice(NAMES), self.rng.choice((META, META, META, OTHER_META)))

    def _put(self, name: str, meta: bytes) -> None:
        blocks = self.rng.choice((1, 1, 3, 4, 4, 6, 9))
        data = chunk(name, meta == OTHER_META, blocks * 4096 - self.rng.randrange(2))
        self.versions[name][data] = None
        results = self.rig.start_put(name, data, meta=meta)
        self.answers.append((self.rig.clock.now_s + DEADLINE_S, results))

    def replace(self) -> None:
        name = self.rng.choice(NAMES)
        self.rig.store.remove([digest_of(name)], force=self.rng.random() < 0.5)
        self._put(name, META)

    def remove(self) -> None:
        self.rig.store.remove([digest_of(n) for n in self.rng.sample(NAMES, 2)])

    def fail(self) -> None:
        no_faults(self.rig)
        member = self.rng.choice(self.rig.members)
        kind = self.rng.choice(("stall", "stall", "error"))
        fault = Fault(kind, self.rng.choice(("write", "write", "read")), self.rng.randrange(3))
        fault.times = self.rng.choice((1, 1, 3, 10))
        if self.rng.random() < 0.6:  # of inodes alone
            fault.last_byte = self.rig.store.volume.geometry.block_offset(0, 0) - 1
        member.faults.append(fault)

    def fail_to_erase(self) -> None:
        """Leave inodes on the media whose erase is tried again by whoever comes next."""
        no_faults(self.rig)
        inode_writes(self.rig, "error", times=self.rng.choice((1, 2)))
        self.remove()
        no_faults(self.rig)
        self.probe()

    def stall_erases(self) -> None:
        """Have puts wait in line, since what was evicted for them is not erased yet."""
        no_faults(self.rig)
        inode_writes(self.rig, "stall", times=self.rng.choice((1, 3, 50)))
        for _ in range(self.rng.randrange(1, 4)):
            self.put()
        no_faults(self.rig)

    def rewrite_what_is_read(self) -> None:
        no_faults(self.rig)
        for member in self.rig.members:
            member.faults.append(Fault("stall", "read"))
        self.load()
        no_faults(self.rig)
        if self.loads:
            self.rig.store.remove([digest_of(self.loads[-1][0])], force=True)
            self._put(self.loads[-1][0], META)

    def release(self) -> None:
        if self.rng.random() < 0.7:
            no_faults(self.rig)
        self.rig.lanes.release()

    def load(self) -> None:
        name = self.rng.choice(NAMES)
        if self.rig.store.lookup([digest_of(name)]).all():
            [told] = self.rig.store.describe([digest_of(name)])
            if told is not None and told[0] <= CHUNK:
                self.loads.append((name, *start_load(self.rig, name)))

    def pin(self) -> None:
        names = [digest_of(n) for n in self.rng.sample(NAMES, 3)]
        self.rig.store.lookup(names, pin=True)
        if self.rng.random() < 0.7:
            self.rig.store.unpin(names)

    def wait(self) -> None:
        self.rig.clock.advance(self.rng.choice((1.0, 20.0, 61.0, 400.0)))
        self.rig.engine.expire_due()

    def probe(self) -> None:
        for index in range(len(self.rig.members)):
            self.rig.engine.probe(index)

    def clear(self) -> None:
        self.rig.store.clear()

    def check(self) -> None:
        self.rig.check_space()
        now = self.rig.clock.now_s
        for deadline, results in self.answers:
            assert len(results) <= 1, "answered twice"
            assert results or now <= deadline, "not answered at its deadline"
            if not self.rig.lanes.stalled:
                assert results, "it waits, and nothing is in flight"
        for name, loaded, item in self.loads:
            if loaded and loaded[0].length:
                assert bytes(item.buffer.view[: loaded[0].length]) in self.versions[name]
        assert self.rig.store.counts().get("internal_errors", 0) == 0
        self.answers = [(d, r) for d, r in self.answers if not r or not self.rig.lanes.stalled]

    def end(self) -> None:
        """Let everything end, and see that all space can be had again."""
        no_faults(self.rig)
        self.rig.lanes.release()
        self.probe()
        self.wait()
        self.check()
        for name in NAMES:
            found = self.rig.get(name)
            assert found is None or found in self.versions[name]
        self.rig.store.remove([digest_of(name) for name in NAMES], force=True)
        for number in range(20):  # each gives what could not be erased another chance
            self.rig.clock.advance(1.5)
            self.rig.put(f"last{number % 2}", chunk("last", number, 700), meta=META)
        self.rig.store.remove([digest_of("last0"), digest_of("last1")], force=True)
        space = self.rig.store.space()
        assert space.free == space.total, space


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_every_put_is_answered_once_and_all_space_comes_back(first: int) -> None:
    for seed in range(first, first + 25):
        storm = Storm(seed)
        for _ in range(STEPS):
            storm.step()
        storm.end()
