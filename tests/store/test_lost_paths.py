"""What a lost path must not cost: entries, space, the truth of counters, time, descriptors."""

from typing import Any

import pytest

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.engine.stripe import RETIRED_S
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES
from fx100_lmcache.store import PutResult
from fx100_lmcache.testing.harness import Rig, digest_of
from fx100_lmcache.testing.inline import InlineLanes, inline_engine
from fx100_lmcache.testing.memory import Fault, MemoryMember
from support.store import (
    chunk,
    counts,
    data_from,
    expire,
    has,
    inode_writes,
    no_faults,
    options,
    put_all,
    rig,
)

Stalling = tuple[LaneEngine, InlineLanes]


def failing_reads(store: Rig, times: int) -> None:
    for number, member in enumerate(store.members):
        member.faults = [Fault("error", "read", times=times, first_byte=data_from(store, number))]


def test_errors_in_a_row_are_a_lost_path_and_cost_no_entry() -> None:
    """Asking for one object again and again while its path goes."""
    store = rig(members=1)
    put_all(store, ["a", "b"])
    failing_reads(store, 2)
    assert [store.get("a"), store.get("a")] == [None, None]
    assert has(store, "a") == [True]
    assert store.get("a") == chunk("a")


def test_an_object_that_fails_after_every_probe_is_bad_media() -> None:
    """With no other traffic, only the label shows that the member works."""
    store = rig(members=1)
    store.engine._probe = lambda _, member: member
    put_all(store, ["a"])
    for present in (True, False):
        failing_reads(store, 3)
        for _ in range(3):
            assert store.get("a") is None
        store.engine.probe(0)
        assert has(store, "a") == [present]


def test_a_failed_transfer_says_whether_it_is_the_first_in_a_row() -> None:
    store = rig(members=1)
    put_all(store, ["a"])
    seen = []
    settle = store.engine._settle

    def watch(slot: Any, transfer: Any, status: Any, *what: Any, **how: Any) -> None:
        if status is Status.ERROR:
            seen.append(transfer.first_failure)
        settle(slot, transfer, status, *what, **how)

    store.engine._settle = watch
    failing_reads(store, 2)
    for _ in range(3):
        store.get("a")
    failing_reads(store, 1)
    store.get("a")
    assert seen == [True, False, True]


def unreadable_claims(store: Rig, kind: str) -> None:
    start = store.store.volume.geometry.claim_offset(0, 0)
    for member in store.members:
        fault = Fault(kind, "read", first_byte=start, last_byte=start + 2 * CLAIM_BYTES - 1)
        member.faults.append(fault)


def test_a_claim_that_cannot_be_read_is_not_called_lost() -> None:
    store = Rig.fresh(options=options(claim_check_s=-1.0))
    unreadable_claims(store, "error")
    assert store.put("a", chunk("a")) == PutResult(False, reason="claim_unread")
    assert counts(store)["put_drop_claim_unread"] == 1
    assert counts(store)["put_drop_claim_lost"] == 0


def test_the_look_at_the_claim_is_part_of_a_put_s_deadline() -> None:
    store = Rig.fresh(options=options(claim_check_s=-1.0, load_s=10.0, store_s=4.0))
    unreadable_claims(store, "stall")
    waiting = store.start_put("a", chunk("a"))
    expire(store, 4.0)
    assert waiting == [PutResult(False, reason="claim_unread")]

    no_faults(store)
    store.lanes.release()
    unreadable_claims(store, "stall")
    slow = store.start_put("b", chunk("b"))
    store.clock.advance(3.0)
    for member in store.members:  # the look comes back after 3 s, and 1 s is left
        member.faults = [Fault("stall", "write", times=9)]
    store.lanes.release()
    assert slow == []
    expire(store, 1.0)
    assert [result.reason for result in slow] == ["deadline"]


def test_an_inode_that_was_erased_at_last_is_no_problem_any_more() -> None:
    store = rig(members=1)
    put_all(store, ["a", "b"])
    inode_writes(store, "error")
    store.store.remove([digest_of("a")])
    assert any("could not be erased" in problem for problem in store.store.problems())
    assert store.store.space().quarantined > 0

    no_faults(store)
    assert store.put("c", chunk("c")).stored  # whoever stores or erases next tries again
    assert store.store.problems() == []
    assert store.store.space().quarantined == 0
    assert counts(store)["erase_failures"] == 1


class Closing(MemoryMember):
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_replaced_member_stays_open_a_while() -> None:
    """Whoever had just taken its descriptor must not write to what reuses the number."""
    old, new = Closing(1 << 20), Closing(1 << 20)
    found: list[Member] = [new]
    engine, _, clock = inline_engine([old], probe=lambda _, member: found[0])
    engine._slots[0].health.note_probe(works=False)
    engine.probe(0)
    assert engine.member(0) is new
    engine.probe(0)
    assert not old.closed
    clock.advance(RETIRED_S)
    engine.probe(0)
    assert old.closed
    assert not new.closed


def test_closing_closes_what_was_replaced_and_what_is_found_too_late() -> None:
    old, new, late = (Closing(1 << 20) for _ in range(3))
    found: list[Member] = [new]
    engine, _, _ = inline_engine([old], probe=lambda _, member: found[0])
    engine._slots[0].health.note_probe(works=False)
    engine.probe(0)
    engine._slots[0].health.note_probe(works=False)
    engine.close(0.0)
    assert old.closed
    found[0] = late
    engine.probe(0)
    assert late.closed
    assert engine.member(0) is new


def stalled_read(length: int, *, hold: bool) -> tuple[MemoryMember, list[Status], Stalling]:
    """Start a read that stalls past its deadline."""
    member = MemoryMember(1 << 20)
    engine, lanes, clock = inline_engine([member], probe=lambda _, member: member)
    member.faults = [Fault("stall", "read")]
    outcome: list[Status] = []
    job = Job(
        False,
        [Transfer(0, 0, zero_buffer(length), 0, length)],
        engine.now() + 5.0,
        lambda done: outcome.extend(t.status for t in done.transfers),
        hold=hold,
    )
    engine.submit([job])
    clock.advance(5.0)
    engine.expire_due()
    member.faults = []
    member.calls.clear()
    return member, outcome, (engine, lanes)


@pytest.mark.parametrize(("fault", "after"), [("error", "down"), (None, "up")])
def test_a_stuck_transfer_that_fails_needs_a_probe_one_that_works_does_not(
    fault: str | None, after: str
) -> None:
    """EIO after a stall means a lost path: what comes next would stall or fail, too."""
    member, outcome, (engine, lanes) = stalled_read(4096, hold=False)
    assert engine.states()[0].state == "suspect"
    assert outcome == [Status.TIMED_OUT]
    if fault:
        member.faults = [Fault(fault, "read")]
    lanes.release()
    assert (engine.states()[0].state, engine.states()[0].stuck) == (after, 0)
    engine.probe(0)
    assert engine.states()[0].state == "up"


def test_a_held_read_is_not_tried_again_after_its_deadline() -> None:
    """Its owner waits for the kernel to let go of the buffer, and for nothing else."""
    member, outcome, (_, lanes) = stalled_read(1 << 19, hold=True)
    assert outcome == []
    member.faults = [Fault("error", "read")]
    lanes.release()
    assert outcome == [Status.ERROR]
    assert len(member.calls) == 1


def test_a_device_that_is_gone_is_no_bad_media() -> None:
    """It moves nothing, and does so each time; its entries are there when it is back."""
    store = rig()
    store.put("a", chunk("a"))
    for time in range(2):
        for member in store.members:
            member.gone = True
        assert store.get("a") is None
        for member in store.members:
            member.gone = False
        # successes in between: the next failure is a first one again
        put_all(store, [f"b{time}{number}" for number in range(4)])
    assert store.get("a") == chunk("a")
