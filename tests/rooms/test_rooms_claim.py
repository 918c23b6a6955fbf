"""One writer for each shard: which claim is in force, who may take it."""

import uuid
from dataclasses import replace

import pytest

from fx100_lmcache.claim import (
    holder_text,
    newest_claim,
    read_claims,
    same_host,
    take_claim,
    write_claim,
)
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.geometry import Geometry, MemberShape
from fx100_lmcache.ondisk.claim_block import ClaimBlock
from fx100_lmcache.testing.memory import MemoryMember

VOLUME = uuid.UUID(int=5).bytes
GEOMETRY = Geometry(4096, 4, 512, 512, 2, (MemberShape(1 << 20, 6, 10),) * 2)
CLAIM = ClaimBlock(
    0, generation=3, epoch=1000, counter=4, holder="host=elsewhere machine=x boot=y pid=7"
)


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


def two() -> list[MemoryMember]:
    return [MemoryMember(1 << 20, index=n) for n in range(2)]


def take(members: list[MemoryMember], unix_s: float = 2000.0, **how: bool) -> ClaimBlock:
    return take_claim(members, GEOMETRY, VOLUME, 0, unix_s=unix_s, **how).block


def on_media(members: list[MemoryMember], shard: int = 0) -> ClaimBlock | None:
    return newest_claim(read_claims(members, GEOMETRY, shard), VOLUME, shard)


def test_first_claim_of_a_new_volume() -> None:
    members = two()
    block = take(members)
    assert (block.generation, block.epoch, block.counter) == (1, 2000, 1)
    assert on_media(members) == block
    assert on_media(members, shard=1) is None


@pytest.mark.parametrize(("unix_s", "epoch"), [(2000.0, 2000), (500.0, 1001)])
def test_epoch_rises_with_every_open_even_if_the_clock_went_back(unix_s: float, epoch: int) -> None:
    members = two()
    write_claim(members[0], GEOMETRY, VOLUME, replace(CLAIM, holder=""))
    block = take(members, unix_s)
    assert (block.epoch, block.generation, block.counter) == (epoch, 3, 5)


def test_a_torn_claim_leaves_the_one_before_in_force() -> None:
    members = two()
    first = take(members)
    second = replace(first, counter=first.counter + 1, generation=9)
    write_claim(members[0], GEOMETRY, VOLUME, second)
    at = GEOMETRY.claim_offset(0, second.counter % 2)
    members[0].media[at + 40] ^= 1
    assert on_media(members) == first


def test_generation_is_the_highest_of_all_members() -> None:
    """A clear that reached one member only counts."""
    members = two()
    write_claim(members[0], GEOMETRY, VOLUME, replace(CLAIM, generation=8, counter=5))
    write_claim(members[1], GEOMETRY, VOLUME, replace(CLAIM, epoch=1001, counter=6))
    found = on_media(members)
    assert found is not None
    assert (found.epoch, found.generation) == (1001, 8)


def test_claim_of_another_host_needs_the_operators_word() -> None:
    members = two()
    write_claim(members[1], GEOMETRY, VOLUME, CLAIM)
    before = [bytes(m.media) for m in members]
    with pytest.raises(ClaimError, match=r"host=elsewhere.*take-over"):
        take(members)
    assert [bytes(m.media) for m in members] == before
    assert take(members, take_over=True).epoch == 2000
    assert take(members).epoch == 2001  # and then it is ours


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("host=a machine=m boot=b", "host=a machine=n boot=c", True),
        ("host=a machine=m boot=b", "host=z machine=m boot=c", True),
        ("host=a machine=m boot=b", "host=z machine=n boot=b", True),
        ("host=a machine=m boot=b", "host=z machine=n boot=c", False),
        ("host=a", "boot=a", False),
        ("", "", False),
    ],
)
def test_same_host(one: str, other: str, same: bool) -> None:
    assert same_host(one, other) == same


def test_holder_text_names_us() -> None:
    text = holder_text(0.0)
    assert "pid=" in text
    assert "since=1970-01-01T00:00:00Z" in text
    assert same_host(text, holder_text(99.0))


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
    block = take([member])
    assert (block.generation, block.epoch, block.counter) == (4, 5001, 6)
    assert on_media([member]) == block
