"""10,000 single bits flipped anywhere on the members."""

import logging
import random

import pytest

from fx100_lmcache.errors import VolumeError
from fx100_lmcache.testing.harness import META, Rig
from fx100_lmcache.testing.memory import MemoryMember
from support.store import OTHER_META, chunk, counts, rig

FLIPS = 10_000
AT_REST = 4000  # of these the store is opened again after the flip; in the others it is open

OBJECTS = {
    "full": chunk("full"),
    "long": chunk("long", length=50_000),
    "odd": chunk("odd", length=4097),
    "small": chunk("small", length=300),
    "tiny": chunk("tiny", length=1),
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "fx100_lmcache")


def filled() -> Rig:
    store = rig(members=2, size_bytes=96 * 1024)
    for number, (name, data) in enumerate(OBJECTS.items()):
        assert store.put(name, data, meta=OTHER_META if number % 2 else META).stored
    return store


def check(store: Rig, total: int) -> int:
    """Read everything: right or missing, and what is missing is counted; return how many are."""
    missing = []
    present = {digest for _, digest, _, _ in store.store.entries()}
    failures = counts(store).get("checksum_failures", 0)
    for name, data in OBJECTS.items():
        found = store.get(name)
        assert found is None or found == data, f"wrong bytes of {name}"
        missing += [name] * (found is None)
    store.check_space()
    lost_in_tables = len(OBJECTS) - len(present)
    assert counts(store).get("checksum_failures", 0) - failures == len(missing) - lost_in_tables
    for name in missing:  # the space is usable again
        assert store.put(name, OBJECTS[name]).stored
        assert store.get(name) == OBJECTS[name]
    assert store.store.space().total == total
    assert store.store.space().quarantined == 0
    store.check_space()
    return len(missing)


def flip(member: MemoryMember, bit: int) -> None:
    member.media[bit // 8] ^= 1 << bit % 8


def test_flips_while_the_store_is_open() -> None:
    store = filled()
    total = store.store.space().total
    rng = random.Random(1)
    detected = 0
    for _ in range(FLIPS - AT_REST):
        member = rng.choice(store.members)
        flip(member, rng.randrange(len(member.media) * 8))
        detected += check(store, total)
    assert detected > (FLIPS - AT_REST) // 20  # the flips do hit data


def test_flips_at_rest() -> None:
    store = filled()
    total = store.store.space().total
    image = [bytes(m.media) for m in store.members]
    rng = random.Random(2)
    detected = refused = torn = 0
    for _ in range(AT_REST):
        for member, before in zip(store.members, image, strict=True):
            member.media[:] = before
            member.calls.clear()
        store.journal.events.clear()
        member = rng.choice(store.members)
        flip(member, rng.randrange(len(member.media) * 8))
        try:
            store.reopen()
        except VolumeError:
            refused += 1
            continue
        torn += store.store.torn_inodes
        detected += check(store, total)
    assert detected > AT_REST // 20
    assert torn > 0
    assert refused == 0  # one flip leaves the other copy of a label
