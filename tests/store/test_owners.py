"""An owner of a shard between its opening and its close: renewals, the lease, its last words."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES
from fx100_lmcache.store import Store
from fx100_lmcache.testing.harness import Rig, digest_of
from fx100_lmcache.testing.memory import Fault, MemoryMember
from fx100_lmcache.volume import claim as rules
from fx100_lmcache.volume.claim import newest_claim, read_claims, write_claim
from support.store import chunk, counts, options, put_all
from support.store_claims import FAR, all_blocks, on_media, taken_over, write_on_all

WATCH_S = 15.0
LEASE_S = 9.0  # and a little, in tests, where it is to be over


@pytest.fixture(autouse=True)
def _claims_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SETTLE_S", 1.0)


def fresh(**how: float) -> Rig:
    return Rig.fresh(options=options(**how))


def claim_calls(store: Rig, what: str) -> list[tuple[str, int, int]]:
    geometry = store.store.volume.geometry
    area = range(geometry.claim_offset(0, 0), geometry.claim_offset(0, 0) + 2 * CLAIM_BYTES)
    return [c for m in store.members for c in m.calls if c[0] == what and c[1] in area]


# ----- last words


@pytest.mark.parametrize("how", ["close", "clear", "beat", "put", "remove"])
def test_whoever_has_seen_that_it_was_replaced_writes_nothing(how: str) -> None:
    old = fresh(claim_check_s=-1.0)
    put_all(old, ["a", "b"])
    taken_over(old)
    old.store.beat()
    assert counts(old)["claim_lost"] == 1
    before = [bytes(member.media) for member in old.members]
    acts: dict[str, Callable[[], object]] = {
        "close": lambda: old.store.close(0.1),
        "clear": old.store.clear,
        "beat": old.store.beat,
        "put": lambda: old.put("c", chunk("c")),
        "remove": lambda: old.store.remove([digest_of("a")]),
    }
    acts[how]()
    old.store.close(0.1)
    assert [bytes(member.media) for member in old.members] == before
    assert any(FAR in problem for problem in old.store.problems())


def test_an_equal_epoch_is_decided_by_the_random_number() -> None:
    for nonce, lost in (("zz", True), ("", False), ("00", False)):
        store = fresh()
        epoch = on_media(store).epoch
        taken_over(store, epoch, f"host=far boot=b pid=1 nonce={nonce}" if nonce else "host=far")
        store.store.beat()
        assert bool(counts(store)["claim_lost"]) == lost, nonce
        assert ("far" in on_media(store).holder) == lost


def test_a_late_write_of_an_older_owner_is_written_over() -> None:
    store = fresh()
    ours = on_media(store)
    late = replace(ours, epoch=ours.epoch - 5, holder=FAR)
    write_on_all(store, replace(late, counter=ours.counter + 1))
    assert on_media(store) == ours
    store.store.beat()
    assert {block.epoch for block in all_blocks(store)} == {ours.epoch}  # both blocks, at once
    write_on_all(store, replace(late, counter=1))
    write_on_all(store, replace(late, counter=2))
    assert FAR in on_media(store).holder  # two at once hide ours, until the next renewal
    store.store.beat()
    assert {block.epoch for block in all_blocks(store)} == {ours.epoch}
    assert counts(store)["claim_lost"] == 0


def test_blocks_that_stay_bad_are_not_written_over_without_end() -> None:
    store = fresh()
    for member in store.members:
        member.media[5000] ^= 1
        member.faults = [Fault("lost", "write", times=1000)]
    store.store.beat()
    assert counts(store)["claim_renewals"] <= 4


# ----- the lease


def test_a_store_that_could_not_renew_stores_nothing_before_it_may_be_replaced() -> None:
    store = fresh()
    assert store.put("a", chunk("a")).stored
    store.claim_clock.advance(LEASE_S - 0.1)
    assert store.put("b", chunk("b")).stored
    store.claim_clock.advance(0.2)
    before = [bytes(member.media) for member in store.members]
    assert store.put("c", chunk("c")).reason == "claim_stale"
    store.store.remove([digest_of("a")])
    assert [bytes(member.media) for member in store.members] == before
    assert counts(store)["put_drop_claim_stale"] == 1
    assert counts(store)["writes_without_claim"] == 1
    assert any("not confirmed" in problem for problem in store.store.problems())
    assert store.get("b") == chunk("b")  # reading goes on
    store.check_space()


def test_the_lease_comes_back_when_a_second_look_after_a_pause_finds_our_claim() -> None:
    """One look is not enough: somebody who looked before it may be about to write."""
    store = fresh()
    store.put("a", chunk("a"))
    store.claim_clock.advance(LEASE_S + 0.1)
    store.store.remove([digest_of("a")])
    store.store.beat()
    assert not store.store.may_write
    store.claim_clock.advance(0.5)
    store.store.beat()
    assert not store.store.may_write
    store.claim_clock.advance(0.6)
    store.store.beat()
    assert store.store.may_write
    assert store.put("b", chunk("b")).stored
    assert store.store.problems() == []  # what could not be erased has been
    store.check_space()


def test_a_second_look_that_comes_late_does_not_bring_the_lease_back() -> None:
    store = fresh()
    store.claim_clock.advance(LEASE_S + 0.1)
    store.store.beat()
    store.claim_clock.advance(LEASE_S + 1)
    store.store.beat()
    assert not store.store.may_write
    store.claim_clock.advance(1.1)
    store.store.beat()
    assert store.store.may_write


def test_without_a_lease_a_claim_that_is_gone_is_lost() -> None:
    """Somebody has written over it and been the owner since; with a lease nobody could have."""
    store = fresh()
    ours = on_media(store)
    older = replace(ours, epoch=ours.epoch - 1, holder=FAR)
    store.claim_clock.advance(LEASE_S + 0.1)
    for counter in (5, 6):
        write_on_all(store, replace(older, counter=counter))
    store.store.beat()
    assert counts(store)["claim_lost"] == 1
    assert on_media(store).holder == FAR


def slow_write(store: Rig, seconds: float) -> None:
    """Let the next claim write take so long."""
    for member in store.members:
        original = member.write_from

        def write(offset: int, buffer: memoryview, original: object = original) -> int:
            store.claim_clock.advance(seconds)
            return original(offset, buffer)  # type: ignore[operator]

        member.write_from = write


def test_a_renewal_that_took_long_does_not_count() -> None:
    """Begun in time, it may have reached the media after a watch that ended."""
    store = fresh()
    slow_write(store, 1.6)  # on each of two members
    store.store.beat()
    assert counts(store)["claim_renewal_failures"] == 0  # the first was in time
    store.store.beat()
    slow_write(store, 2.0)
    renewals = counts(store)["claim_renewals"]
    store.store.beat()
    assert counts(store)["claim_renewals"] == renewals
    assert counts(store)["claim_renewal_failures"] == 1
    assert store.store.problems() != []


def test_a_put_whose_inode_came_after_the_lease_is_not_acknowledged() -> None:
    store = fresh()
    stop = [LEASE_S + 0.1]
    for member in store.members:
        original = member.write_from

        def write(offset: int, buffer: memoryview, original: object = original) -> int:
            moved = original(offset, buffer)  # type: ignore[operator]
            if offset < store.store.volume.geometry.block_offset(0, 0):
                store.claim_clock.advance(sum(stop))  # the process is stopped here
                stop.clear()
            return moved

        member.write_from = write
    result = store.put("a", chunk("a"))
    assert (result.stored, result.reason) == (False, "claim_stale")
    store.check_space()


# ----- renewals


def test_a_renewal_is_one_read_and_one_write_of_4_kib_for_each_member() -> None:
    store = fresh()
    before = on_media(store)
    for member in store.members:
        member.calls.clear()
    assert store.store.beat() == 3.0
    start = store.store.volume.geometry.claim_offset(0, 0)
    for member in store.members:
        reads, writes = ([c for c in member.calls if c[0] == k] for k in ("read", "write"))
        assert reads == [("read", start, 2 * CLAIM_BYTES)]
        assert [length for _, _, length in writes] == [CLAIM_BYTES]
    assert on_media(store) == replace(before, counter=before.counter + 1)


def test_a_renewal_goes_on_without_a_member_that_does_not_answer() -> None:
    store = fresh(load_s=100.0, store_s=100.0)
    store.members[0].faults = [Fault("stall", "read", times=9)]
    store.store.beat()
    store.claim_clock.advance(3.1)
    writes = len(claim_calls(store, "write"))
    store.store.beat()  # gives up the one before, and begins another without that member
    assert store.store.may_write
    assert len(claim_calls(store, "write")) == writes + 1
    assert counts(store)["claim_renewals"] == 2


def test_no_member_has_two_claim_writes_of_ours_at_once() -> None:
    """One late write leaves the other block to a new owner; two would not."""
    store = Rig.fresh(1, options=options(load_s=100.0, store_s=100.0))
    store.members[0].faults = [Fault("stall", "write", times=9)]
    for _ in range(5):
        store.store.beat()
        store.claim_clock.advance(3.1)
    assert store.lanes.stalled == 1
    store.members[0].faults = []
    store.lanes.release()
    store.store.beat()
    assert counts(store)["claim_renewal_failures"] == 5


def test_one_that_waits_for_a_look_and_raises_costs_nobody_else_the_answer() -> None:
    store = Rig.fresh(options=options())
    store.store._core.defects = Defects()  # as in the product: counts, and goes on
    owner = store.store._owner
    answers: list[bool] = []
    start = store.store.volume.geometry.claim_offset(0, 0)
    store.members[0].faults = [Fault("stall", "read", first_byte=start, last_byte=start + 1)]

    def broken(_: bool) -> None:
        raise ZeroDivisionError

    owner.check(broken, look=True)
    owner.check(answers.append, look=True)
    owner.renew(broken)
    owner.renew(answers.append)
    assert answers == []
    store.members[0].faults = []
    store.lanes.release()
    assert answers == [True, True]
    assert store.store._core.defects.count == 2


def test_an_owner_elsewhere_that_was_faster_is_seen_when_the_claim_has_settled() -> None:
    store = Rig.fresh(options=options())
    store.store.close(0.1)
    opened = store.machine.sleep

    def meanwhile(seconds: float) -> None:
        opened(seconds)
        taken_over(store, on_media(store).epoch + 7)

    store.machine = replace(store.machine, sleep=meanwhile)
    with pytest.raises(ClaimError, match=r"claimed by another host at the same time: host=far"):
        store.reopen()
    assert on_media(store).holder == FAR


def test_a_claim_that_never_settled_is_watched_even_under_our_kernel() -> None:
    """It may hide the claim of an owner elsewhere, which has not noticed yet."""
    store = Rig.fresh(options=options())
    store.store.close(0.1)
    words = on_media(store)
    unsettled = replace(words, holder=f"boot={store.machine.boot_id} nonce=a unconfirmed=1")
    write_on_all(store, replace(unsettled, counter=words.counter + 1))
    began = store.claim_clock()
    store.reopen()
    assert store.claim_clock() - began >= WATCH_S
    assert "unconfirmed" not in on_media(store).holder
    began = store.claim_clock()
    store.reopen()
    assert store.claim_clock() - began < 1.1


def test_status_describes_the_claims() -> None:
    store = fresh()
    store.claim_clock.advance(2.0)
    [claim] = store.store.status()["claims"]
    assert claim["shard"] == 0
    assert f"pid={os.getpid()} " in claim["holder"]
    assert 6.9 <= claim["lease_left_s"] <= 7.1
    assert claim["lost_to"] == ""


# ----- members that come back


def back(store: Rig) -> MemoryMember:
    """Member 0 as it looks after having been away: all that was written to it is there."""
    copy = MemoryMember(store.members[0].size_bytes)
    copy.media[:] = store.members[0].media
    return copy


def test_a_member_that_comes_back_gets_our_claim_unless_it_has_a_newer_one() -> None:
    store = fresh()
    volume = store.store.volume
    member = back(store)
    store.store.clear()
    assert store.store.adopt_member(member)
    found = newest_claim(read_claims([member], volume.geometry, 0), volume.uuid, 0)
    assert found is not None
    assert found.generation == 2
    taken = back(store)
    theirs = replace(on_media(store), epoch=2_000_000_000, holder=FAR, counter=90)
    write_claim(taken, volume.geometry, volume.uuid, theirs)
    before = bytes(taken.media)
    assert not store.store.adopt_member(taken)
    assert bytes(taken.media) == before
    assert counts(store)["claim_lost"] == 1


def test_the_only_member_of_a_volume_comes_back_after_the_lease_has_ended() -> None:
    store = Rig.fresh(1, options=options())
    member = back(store)
    store.claim_clock.advance(LEASE_S + 100)
    assert store.store.adopt_member(member)
    volume = store.store.volume
    older = replace(on_media(store), epoch=5, holder=FAR)
    foreign = back(store)
    for counter in (7, 8):
        write_claim(foreign, volume.geometry, volume.uuid, replace(older, counter=counter))
    assert not store.store.adopt_member(foreign)  # whose is it? not used, and not written
    assert counts(store)["claim_lost"] == 0


# ----- closing


class Hanging(MemoryMember):
    """Its flush, or what is asked of its claims, does not come back."""

    hangs_in = ""
    let_go: threading.Event

    def flush(self) -> None:
        if self.hangs_in == "flush":
            self.let_go.wait(30)
        super().flush()

    def read_into(self, offset: int, buffer: memoryview) -> int:
        if self.hangs_in == "look" and offset < 3 * CLAIM_BYTES:
            self.let_go.wait(30)
        return super().read_into(offset, buffer)

    def write_from(self, offset: int, buffer: memoryview) -> int:
        if self.hangs_in == "claim" and offset < 3 * CLAIM_BYTES:
            self.let_go.wait(30)
        return super().write_from(offset, buffer)


@pytest.mark.parametrize("where", ["flush", "look", "claim"])
def test_a_close_ends_in_time_and_no_descriptor_is_closed_under_what_still_runs(where: str) -> None:
    members = [Hanging(256 * 1024, index=index) for index in range(2)]
    rig = Rig(list(members), options(load_s=30.0, store_s=30.0))
    rig.format()
    engine = LaneEngine(rig.members, EngineOptions(reader_threads=1, native=False))
    rig.open()
    rig.store.close(0.1)
    store = Store(rig.store.volume, engine, options=rig.options, heartbeat=False)
    for member in members:
        member.let_go = threading.Event()
        member.hangs_in = where
    began = time.monotonic()
    left = store.close(1.0)
    assert time.monotonic() - began < 5
    assert left > 0, "whoever closes the members must know that they are in use"
    for member in members:
        member.let_go.set()


def test_a_close_with_all_members_away_ends_and_writes_nothing() -> None:
    store = fresh()
    for member in store.members:
        member.gone = True
    before = [bytes(member.media) for member in store.members]
    assert store.store.close(0.1) == 0
    assert [bytes(member.media) for member in store.members] == before


def test_claims_are_given_back_on_the_members_that_are_left() -> None:
    store = fresh()
    store.members[0].gone = True
    for _ in range(3):
        store.get("nothing")
        store.store.beat()
    store.store.close(0.1)
    volume = store.store.volume
    left = newest_claim(read_claims(store.members[1:], volume.geometry, 0), volume.uuid, 0)
    assert left is not None
    assert left.holder == ""


def test_nothing_is_renewed_after_the_claim_was_given_back() -> None:
    store = fresh()
    store.store.close(0.1)
    before = [bytes(member.media) for member in store.members]
    assert store.store.beat() is None
    assert store.store.clear() == 0
    assert [bytes(member.media) for member in store.members] == before


def test_what_waits_while_the_claims_are_given_back_is_answered_and_writes_nothing() -> None:
    store = fresh()
    owner = store.store._owner
    start = store.store.volume.geometry.claim_offset(0, 0)
    store.members[0].faults = [
        Fault("stall", "write", first_byte=start, last_byte=start + 2 * CLAIM_BYTES - 1)
    ]
    answers: list[object] = []
    owner.renew(lambda ok: answers.append(("renewed", ok)))
    owner.renew(lambda ok: answers.append(("given back", ok)), release=True)
    claims = {"first_byte": start, "last_byte": start + 2 * CLAIM_BYTES - 1}
    store.members[0].faults = [Fault("stall", "write", after=1, **claims)]
    store.lanes.release()  # now the claims are being given back
    owner.renew(lambda ok: answers.append(("too late", ok)))
    owner.check(lambda ours: answers.append(("looked", ours)), look=True)
    store.members[0].faults = []
    store.lanes.release()
    assert answers[0] == ("renewed", True)
    assert set(answers[1:]) == {("given back", True), ("too late", False), ("looked", False)}
    assert on_media(store).holder == ""
    assert counts(store)["claim_lost"] == 0
