"""Becoming the owner of a shard: locks, the watch, and writing soon after a look."""

import logging
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from fx100_lmcache.errors import ClaimError
from fx100_lmcache.ondisk.claim_block import ClaimBlock
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.volume.claim import WRITE_WITHIN_S, read_claims, valid_claims, write_claim
from support.claims import (
    CLAIM,
    GEOMETRY,
    TIMING,
    VOLUME,
    Time,
    machine,
    on_media,
    take,
    two,
)

FOREIGN = replace(CLAIM, holder=f"{CLAIM.holder} nonce=abc")


class BusyMember(MemoryMember):
    """Somebody else holds the lock."""

    def try_lock(self, offset: int, length: int) -> bool:
        return False


class HandedOverMember(MemoryMember):
    """The previous owner writes and lets go just before we get the lock."""

    last_words: ClaimBlock

    def try_lock(self, offset: int, length: int) -> bool:
        write_claim(self, GEOMETRY, VOLUME, self.last_words)
        return True


class SlowMember(MemoryMember):
    """Its writes take time while there is delay left."""

    time: Time
    delays: list[float]

    def write_from(self, offset: int, buffer: memoryview) -> int:
        if self.delays:
            self.time.now_s += self.delays.pop(0)
        return super().write_from(offset, buffer)


def blocks(members: list[MemoryMember], shard: int = 0) -> list[ClaimBlock]:
    return valid_claims(read_claims(members, GEOMETRY, shard), VOLUME, shard)


def claimed_by(members: list[MemoryMember], claim: ClaimBlock) -> None:
    for member in members:
        write_claim(member, GEOMETRY, VOLUME, claim)


def test_first_claim_of_a_new_volume() -> None:
    members = two()
    block = take(members).claims[0]
    assert (block.generation, block.epoch, block.counter) == (1, 2000, 2)
    assert on_media(members) == block
    assert on_media(members, shard=1) is None


def test_both_blocks_are_written_on_every_member() -> None:
    """Of two late writes of the last owner, one a block, neither may hide who is the owner now."""
    members = two()
    claimed_by(members, replace(FOREIGN, holder=""))
    epoch = take(members).claims[0].epoch
    assert [claim.epoch for claim in blocks(members)] == [epoch] * 4


@pytest.mark.parametrize(("unix_s", "epoch"), [(2000.0, 2000), (500.0, 1001)])
def test_epoch_rises_with_every_open_even_if_the_clock_went_back(unix_s: float, epoch: int) -> None:
    members = two()
    write_claim(members[0], GEOMETRY, VOLUME, replace(CLAIM, holder=""))
    block = take(members, unix_s).claims[0]
    assert (block.epoch, block.generation, block.counter) == (epoch, 3, 6)


def test_a_claim_of_an_older_version_needs_the_operators_word() -> None:
    members = two()
    write_claim(members[1], GEOMETRY, VOLUME, replace(CLAIM, version=1))
    before = [bytes(m.media) for m in members]
    time = Time()
    with pytest.raises(ClaimError, match=r"(?s)host=elsewhere.*take-over"):
        take(members, us=machine(time))
    assert [bytes(m.media) for m in members] == before
    assert time.now_s == 0.0
    taken = take(members, take_over=True)
    assert taken.claims[0].epoch == 2000
    assert taken.by_word == [CLAIM.holder]
    assert take(members).claims[0].epoch == 2001  # and then it is ours


@pytest.mark.parametrize("same", ["host", "machine"])
@pytest.mark.parametrize("version", [1, 2])
def test_neither_an_equal_host_name_nor_an_equal_machine_id_is_one_host(
    same: str, version: int
) -> None:
    """Cloned images, containers, and everything that is called localhost."""
    try:
        machine_id = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine_id = "m"
    names = {"host": socket.gethostname(), "machine": machine_id}
    words = {"host": "h", "machine": "n", "boot": "another", "pid": "7", same: names[same]}
    text = " ".join(f"{name}={value}" for name, value in words.items())
    members = two()
    claim = replace(FOREIGN, holder=text, version=version)
    claimed_by(members, claim)
    time = Time()
    alive = replace(claim, counter=claim.counter + 1)
    time.meanwhile.append((3.0, lambda: claimed_by(members, alive)))
    with pytest.raises(ClaimError, match="claimed by another host"):
        take(members, us=replace(machine(time), host=names["host"], machine_id=machine_id))
    assert {each.holder for each in blocks(members)} == {text}


def test_an_owner_under_our_kernel_is_dead_once_we_have_its_locks() -> None:
    members = two()
    claimed_by(members, replace(FOREIGN, holder="host=x boot=here pid=7 nonce=abc"))
    time = Time()
    taken = take(members, us=machine(time))
    assert time.now_s == 0.0
    assert taken.watched == taken.by_word == []


def test_a_claim_that_is_renewed_is_refused_as_soon_as_that_is_seen() -> None:
    members, time = two(), Time()
    claimed_by(members, FOREIGN)
    renewed = replace(FOREIGN, counter=FOREIGN.counter + 1)
    time.meanwhile.append((3.0, lambda: write_claim(members[1], GEOMETRY, VOLUME, renewed)))
    with pytest.raises(ClaimError, match=r"(?s)renews its claim: host=elsewhere.*stop the server"):
        take(members, us=machine(time))
    assert time.now_s < 4.5
    assert {claim.holder for claim in blocks(members)} == {FOREIGN.holder}


@pytest.mark.parametrize(("said", "watched_s"), [("", 15.0), (" watch=40", 40.0)])
def test_a_claim_that_stands_still_for_the_watched_time_is_replaced(
    said: str, watched_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    members, time = two(), Time()
    claimed_by(members, replace(FOREIGN, holder=FOREIGN.holder + said))
    with caplog.at_level(logging.WARNING):
        taken = take(members, us=machine(time))
    assert watched_s <= time.now_s < watched_s + 1
    assert taken.watched == [FOREIGN.holder + said]
    first, second = (record.getMessage() for record in caplog.records)
    assert f"Waiting {watched_s:g} s" in first
    assert "stood still" in second
    assert FOREIGN.holder in first
    assert FOREIGN.holder in second


def test_all_shards_are_watched_at_once() -> None:
    members, time = two(), Time()
    for shard in range(2):
        claimed_by(members, replace(FOREIGN, shard=shard))
    taken = take(members, us=machine(time), shards=(0, 1))
    assert time.now_s < 16
    assert sorted(taken.claims) == [0, 1]


def test_a_claim_given_back_during_the_watch_is_taken_at_once() -> None:
    members, time = two(), Time()
    claimed_by(members, FOREIGN)
    released = replace(FOREIGN, counter=FOREIGN.counter + 1, holder="")
    time.meanwhile.append((4.0, lambda: claimed_by(members, released)))
    taken = take(members, us=machine(time))
    assert time.now_s < 5.5
    assert taken.claims[0].epoch == 2000
    assert taken.watched == []


def test_the_operators_word_skips_the_watch() -> None:
    members, time = two(), Time()
    claimed_by(members, FOREIGN)
    taken = take(members, us=machine(time), take_over=True)
    assert time.now_s == 0.0
    assert taken.by_word == [FOREIGN.holder]


def test_living_owner_is_named_and_nothing_is_written() -> None:
    members = [MemoryMember(1 << 20), BusyMember(1 << 20, index=1, name="/dev/nvme1n1")]
    write_claim(members[0], GEOMETRY, VOLUME, CLAIM)
    before = [bytes(m.media) for m in members]
    with pytest.raises(ClaimError, match=r"in use \(/dev/nvme1n1\): host=elsewhere.*pid=7"):
        take(members, take_over=True)
    assert [bytes(m.media) for m in members] == before


def test_what_the_last_owner_wrote_before_we_got_the_lock_counts() -> None:
    """It may have cleared the shard: an older generation must not come back."""
    member = HandedOverMember(1 << 20)
    write_claim(member, GEOMETRY, VOLUME, replace(CLAIM, holder=""))
    member.last_words = replace(CLAIM, generation=4, epoch=5000, counter=5, holder="")
    block = take([member]).claims[0]
    assert (block.generation, block.epoch, block.counter) == (4, 5001, 7)
    assert on_media([member]) == block


def slow_members(*delays: float) -> tuple[list[SlowMember], Time]:
    time = Time()
    members = [SlowMember(1 << 20, index=n) for n in range(2)]
    for member in members:
        member.time, member.delays = time, []
    members[0].delays = list(delays)
    return members, time


def test_a_claim_that_took_long_to_write_is_watched_before_it_counts() -> None:
    """Somebody may have become the owner between our look and our write, and would show it."""
    members, time = slow_members(WRITE_WITHIN_S + 0.1)
    taken = take(list(members), us=machine(time))
    assert TIMING.watch_s <= time.now_s < TIMING.watch_s + 2
    assert taken.claims[0].epoch == 2001
    assert taken.watched == []


def test_an_owner_that_was_faster_than_a_slow_opener_stays() -> None:
    members, time = slow_members(WRITE_WITHIN_S + 0.1)
    owner = replace(FOREIGN, epoch=9000, counter=9)
    time.meanwhile.append((2.0, lambda: claimed_by(list(members), owner)))
    with pytest.raises(ClaimError, match=r"renews its claim: host=elsewhere"):
        take(list(members), us=machine(time))
    assert on_media(list(members)) == owner


def test_members_that_stay_slow_are_not_claimed() -> None:
    members, time = slow_members(*[WRITE_WITHIN_S + 0.1] * 50)
    with pytest.raises(ClaimError, match="could not be claimed"):
        take(list(members), us=machine(time))
