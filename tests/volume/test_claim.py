"""Who owns a shard: the rules. Becoming the owner is in test_rooms_claiming.py."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fx100_lmcache.members.device import DeviceMember, open_member
from fx100_lmcache.ondisk.claim_block import HOLDER_BYTES, ClaimBlock
from fx100_lmcache.volume.claim import (
    ClaimTiming,
    confirmed,
    decided_by_locks,
    holder_text,
    is_there,
    node_of,
    rival_of,
    same_kernel,
    watch_of,
    write_claim,
)
from fx100_lmcache.volume.machine import Machine, this_machine
from support.claims import CLAIM, GEOMETRY, VOLUME, on_media, two


@pytest.fixture
def file_member(tmp_path: Path) -> DeviceMember:
    path = tmp_path / "member"
    path.write_bytes(bytes(1 << 16))
    return open_member(path, direct="off")


def test_a_torn_claim_leaves_the_one_before_in_force() -> None:
    members = two()
    for member in members:
        write_claim(member, GEOMETRY, VOLUME, CLAIM)
    second = replace(CLAIM, counter=CLAIM.counter + 1, generation=9)
    write_claim(members[0], GEOMETRY, VOLUME, second)
    at = GEOMETRY.claim_offset(0, second.counter % 2)
    members[0].media[at + 40] ^= 1
    assert on_media(members) == CLAIM


def test_generation_is_the_highest_of_all_members() -> None:
    """A clear that reached one member only counts."""
    members = two()
    write_claim(members[0], GEOMETRY, VOLUME, replace(CLAIM, generation=8, counter=5))
    write_claim(members[1], GEOMETRY, VOLUME, replace(CLAIM, epoch=1001, counter=6))
    found = on_media(members)
    assert found is not None
    assert (found.epoch, found.generation) == (1001, 8)


@pytest.mark.parametrize(
    ("holder", "same"),
    [
        ("host=a machine=m boot=b", True),
        ("host=z machine=n boot=b", True),
        ("host=a machine=m boot=c", False),
        ("host=localhost machine=m", False),
        ("host=boot=b machine=m", False),
        ("boot=", False),
        ("", False),
    ],
)
def test_one_kernel_is_proven_by_an_equal_boot_id_alone(holder: str, same: bool) -> None:
    ours = Machine("b", "a", "m")
    claim = replace(CLAIM, holder=holder)
    assert same_kernel(holder, ours) == same
    assert decided_by_locks(claim, ours, []) == same


def test_an_unknown_boot_id_proves_nothing() -> None:
    ours = Machine("", "a", "m")
    assert not same_kernel("host=a boot= pid=7", ours)
    assert not same_kernel("host=a pid=7", ours)


def test_locks_decide_only_about_the_node_that_they_are_on(
    file_member: DeviceMember, tmp_path: Path
) -> None:
    """A container with device nodes of its own sees no lock of another one under its kernel."""
    ours = this_machine()
    text = holder_text(ours, [file_member], unix_s=0.0, watch_s=15.0)
    assert not decided_by_locks(replace(CLAIM, holder=text), ours, [file_member])
    claim = replace(CLAIM, holder=confirmed(text))
    assert decided_by_locks(claim, ours, [file_member])
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 16))
    elsewhere = open_member(other, direct="off")
    assert same_kernel(text, ours)
    assert not decided_by_locks(claim, ours, [elsewhere])
    assert decided_by_locks(claim, ours, [elsewhere, file_member])
    elsewhere.close()
    file_member.close()
    assert node_of(file_member) == ""


def test_holder_text_names_us() -> None:
    text = holder_text(this_machine(), two(), unix_s=0.0, watch_s=7.5)
    assert f"pid={os.getpid()} " in text
    assert "since=1970-01-01T00:00:00Z" in text
    assert same_kernel(text, this_machine())
    assert replace(CLAIM, holder=text).words["watch"] == "7.5"


def test_two_opens_of_one_process_are_told_apart() -> None:
    first, second = (
        replace(CLAIM, holder=holder_text(this_machine(), [], unix_s=0.0, watch_s=1.0))
        for _ in range(2)
    )
    assert first.nonce != second.nonce


def test_what_matters_of_a_long_holder_is_kept(file_member: DeviceMember) -> None:
    long = Machine("b" * 36, "h" * 64, "m" * 64)
    text = holder_text(long, [file_member], unix_s=0.0, watch_s=1234.5)
    file_member.close()
    kept = text.encode()[:HOLDER_BYTES].decode()
    assert {"boot", "pid", "watch", "nonce", "node"} <= set(replace(CLAIM, holder=kept).words)


@pytest.mark.parametrize(
    ("said", "watched_s"),
    [("watch=40", 40.0), ("watch=5", 15.0), ("watch=soon", 15.0), ("", 15.0), ("watch=1e9", 15.0)],
)
def test_the_longer_watch_counts(said: str, watched_s: float) -> None:
    assert watch_of(replace(CLAIM, holder=said), ClaimTiming()) == watched_s


def test_the_lease_ends_well_before_the_watch() -> None:
    timing = ClaimTiming()
    assert timing.lease_s + timing.renew_within_s < timing.watch_s / 1.2
    assert timing.lease_s >= 3 * timing.heartbeat_s


def rank(epoch: int, nonce: str, counter: int = 1) -> ClaimBlock:
    return ClaimBlock(0, 1, epoch, counter, f"host=a nonce={nonce}" if nonce else "")


def test_a_higher_epoch_wins_whatever_the_counters_are() -> None:
    ours = rank(5, "ff", counter=900)
    assert rival_of(ours, [ours, rank(6, "00", counter=1)]) is not None
    assert rival_of(ours, [ours, rank(6, "")]) is not None
    assert rival_of(ours, [ours, rank(4, "ff", counter=10_000)]) is None
    assert rival_of(ours, []) is None


def test_of_two_claims_with_one_epoch_exactly_one_wins() -> None:
    one, other = rank(5, "aa"), rank(5, "bb", counter=0)
    assert (rival_of(one, [one, other]), rival_of(other, [one, other])) == (other, None)
    assert is_there(one, [one])
    assert not is_there(one, [other])
