"""The model of hosts can fail: with each rule of docs/ownership.md left out it finds why."""

import inspect
import logging
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from fx100_lmcache.engine.jobs import Job
from fx100_lmcache.ondisk.claim_block import ClaimBlock
from fx100_lmcache.store import ownership, put
from fx100_lmcache.store.gate import GatedEngine
from fx100_lmcache.store.ownership import Ownership
from fx100_lmcache.store.put import Putter
from fx100_lmcache.testing.hosts import VARIETIES, World
from fx100_lmcache.testing.promises import Violation
from fx100_lmcache.volume import claim, claiming
from fx100_lmcache.volume.claim import write_claim
from fx100_lmcache.volume.claiming import Claimer
from fx100_lmcache.volume.machine import Machine

Patch = pytest.MonkeyPatch
PLAIN, RACES, SLOW_MEDIA, LATE_CLAIMS, NO_OPERATOR = range(5)
SCHEDULES = 150  # at most; most need a few


@pytest.fixture(autouse=True)
def _as_in_the_product(monkeypatch: Patch) -> Iterator[None]:
    logger = logging.getLogger("fx100_lmcache")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    monkeypatch.setattr(claim, "SETTLE_S", 1.0)
    yield
    logger.setLevel(before)


def without_look_before_write(patch: Patch) -> None:
    patch.setattr(Ownership, "_holds", lambda _, current: bool(current.seen))


def without_order_by_epoch(patch: Patch) -> None:
    def by_counter(ours: ClaimBlock, seen: Collection[ClaimBlock]) -> ClaimBlock | None:
        best = max(seen, key=lambda each: each.counter)
        return best if best.rank != ours.rank and best.counter > ours.counter else None

    patch.setattr(ownership, "rival_of", by_counter)


def without_both_blocks(patch: Patch) -> None:
    def write_one(self: Claimer, first: ClaimBlock) -> ClaimBlock:
        for member in self.members:
            write_claim(member, self.geometry, self.volume, first)
        return first

    patch.setattr(Claimer, "_write_both", write_one)


def without_lease(patch: Patch) -> None:
    def may_write(self: Ownership) -> bool:
        return not self.lost_to and not self._released and self._lease_until > float("-inf")

    patch.setattr(Ownership, "may_write", may_write)


def without_watch(patch: Patch) -> None:
    patch.setattr(Claimer, "_stand_still", lambda *_: True)


def without_boot_id(patch: Patch) -> None:
    def same_name(holder: str, machine: Machine) -> bool:
        return f"host={machine.host}" in holder

    patch.setattr(claim, "same_kernel", same_name)


def without_random_number(patch: Patch) -> None:
    patch.setattr(World, "new_nonce", lambda _: "same")


def without_settling(patch: Patch) -> None:
    patch.setattr(claim, "SETTLE_S", 0.0)


def without_bound_on_writing(patch: Patch) -> None:
    patch.setattr(claim, "WRITE_WITHIN_S", 1e9)


def without_mark_of_what_is_unconfirmed(patch: Patch) -> None:
    def decided(block: ClaimBlock, machine: Machine, _: object) -> bool:
        return claim.same_kernel(block.holder, machine)

    patch.setattr(claiming, "decided_by_locks", decided)


def without_second_look_after_a_pause(patch: Patch) -> None:
    patch.setattr(Ownership, "_settled_at", lambda *_: True)


def without_loss_of_what_is_gone(patch: Patch) -> None:
    patch.setattr(ownership, "is_there", lambda *_: True)


def without_one_claim_write_at_a_time(patch: Patch) -> None:
    patch.setattr(Ownership, "_note_begun", lambda *_: None)
    patch.setattr(Ownership, "_note_over", lambda *_: None)
    patch.setattr(Ownership, "_came_back", lambda *_: None)


def without_gate(patch: Patch) -> None:
    def submit(self: GatedEngine, jobs: list[Job]) -> None:
        self._engine.submit(jobs)

    patch.setattr(GatedEngine, "submit", submit)


def without_look_at_the_lease_before_an_answer(patch: Patch) -> None:
    source = textwrap.dedent(inspect.getsource(Putter._inode_done))
    asks = "if not core.engine.open_to_writes():"
    assert asks in source
    made: dict[str, Any] = {}
    exec(source.replace(asks, "if False:"), put.__dict__, made)
    patch.setattr(Putter, "_inode_done", made["_inode_done"])


@pytest.mark.parametrize(
    ("leave_out", "variety", "hosts"),
    [
        (without_look_before_write, RACES, 2),
        (without_order_by_epoch, SLOW_MEDIA, 3),
        (without_both_blocks, LATE_CLAIMS, 2),
        (without_lease, NO_OPERATOR, 2),
        (without_watch, RACES, 2),
        (without_boot_id, RACES, 2),
        (without_random_number, RACES, 2),
        (without_settling, RACES, 2),
        (without_bound_on_writing, RACES, 2),
        (without_mark_of_what_is_unconfirmed, SLOW_MEDIA, 2),
        (without_second_look_after_a_pause, SLOW_MEDIA, 2),
        (without_loss_of_what_is_gone, SLOW_MEDIA, 2),
        (without_one_claim_write_at_a_time, LATE_CLAIMS, 3),
        (without_gate, RACES, 2),
        (without_look_at_the_lease_before_an_answer, PLAIN, 2),
    ],
)
def test_a_violation_is_found(
    leave_out: Callable[[Patch], None], variety: int, hosts: int, monkeypatch: Patch
) -> None:
    leave_out(monkeypatch)
    with pytest.raises(Violation):
        _run(variety, hosts)


def _run(variety: int, hosts: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        counts += World(seed, hosts=hosts, odds=VARIETIES[variety]).run()
    return counts
