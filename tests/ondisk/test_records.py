"""Label, claim and inode: round trips, and what damage does."""

import mmap
import random
import struct
import uuid
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fx100_lmcache.errors import RecordError, TooLargeError, UnsupportedVersionError
from fx100_lmcache.ondisk.claim_block import (
    HOLDER_BYTES,
    MAX_COUNTER,
    MAX_EPOCH,
    MAX_GENERATION,
    ClaimBlock,
    unpack_claim,
)
from fx100_lmcache.ondisk.geometry import (
    CLAIM_BYTES,
    LABEL_BYTES,
    MAX_MEMBERS,
    MAX_SHARDS,
    plan_geometry,
)
from fx100_lmcache.ondisk.inode import (
    HEAD_BYTES,
    InodePlace,
    TableRows,
    max_pieces,
    pack_inode,
    parse_table,
)
from fx100_lmcache.ondisk.label import Label, unpack_label
from fx100_lmcache.ondisk.location import (
    MAX_BLOCK,
    MAX_PIECE_BLOCKS,
    pack_location,
    unpack_location,
)
from fx100_lmcache.ondisk.reason import Reason

VOLUME = uuid.UUID(int=0x1234567890ABCDEF1122334455667788)
GEOMETRY = plan_geometry([100 << 20, 200 << 20], object_bytes=8_126_464, shards=3)
LABEL = Label(VOLUME, 1, 1_700_000_000, GEOMETRY)
CLAIM = ClaimBlock(2, 7, 1_700_000_000, 9, "host=a pid=1")
PLACE = InodePlace(VOLUME.bytes, shard=1, member=2, slot=3)
DIGEST = bytes(range(48))


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def inode(
    place: InodePlace = PLACE, pieces: int = 3, meta: bytes = b"meta", size: int = 512
) -> bytes:
    return pack_inode(
        place,
        inode_bytes=size,
        generation=4,
        order=(1_700_000_000, 5),
        digest=DIGEST,
        length=pieces * 32_768 - 1,
        pieces=[(pack_location(2, n, 1), n + 100) for n in range(pieces)],
        meta=meta,
    )


def parse(data: bytes, first: InodePlace = PLACE, size: int = 512) -> TableRows:
    with memoryview(data) as view:
        return parse_table(view, first, inode_bytes=size)


# Label


def test_label_round_trips() -> None:
    assert unpack_label(LABEL.pack()) == LABEL
    assert len(LABEL.pack()) == LABEL_BYTES
    sizes = [(n + 10) << 20 for n in range(MAX_MEMBERS)]
    many = plan_geometry(sizes, object_bytes=1, shards=MAX_SHARDS, io_align_bytes=512)
    full = Label(VOLUME, MAX_MEMBERS - 1, 0, many)
    assert unpack_label(full.pack()) == full


def test_every_bit_flip_of_a_label_is_noticed() -> None:
    packed = LABEL.pack()
    used = struct.unpack_from("<H", packed, 18)[0]
    for bit in range(used * 8):
        with pytest.raises(RecordError):
            unpack_label(flipped(packed, bit))
    for bit in range(used * 8, LABEL_BYTES * 8, 97):
        assert unpack_label(flipped(packed, bit)) == LABEL  # padding


@pytest.mark.parametrize("cut", [0, 1, 7, 100, LABEL_BYTES - 1])
def test_short_label_is_refused(cut: int) -> None:
    with pytest.raises(RecordError):
        unpack_label(LABEL.pack()[:cut])


def test_newer_label_is_told_apart_from_a_damaged_one() -> None:
    packed = bytearray(LABEL.pack())
    used = struct.unpack_from("<H", packed, 18)[0]
    struct.pack_into("<H", packed, 16, 2)
    struct.pack_into("<Q", packed, 0, xxhash.xxh3_64_intdigest(bytes(packed[8:used])))
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        unpack_label(bytes(packed))


@given(st.binary(min_size=100, max_size=300))
def test_random_bytes_are_no_label(data: bytes) -> None:
    for candidate in (data, data[:8] + b"FX100LBL" + data[16:]):
        with pytest.raises(RecordError):
            unpack_label(candidate.ljust(LABEL_BYTES, b"\xff"))


# Claim


@given(
    st.integers(0, MAX_GENERATION),
    st.integers(0, MAX_EPOCH),
    st.integers(0, MAX_COUNTER),
    st.text(max_size=60).filter(str.isprintable),
)
def test_claim_round_trips(generation: int, epoch: int, counter: int, holder: str) -> None:
    claim = ClaimBlock(5, generation, epoch, counter, holder)
    assert unpack_claim(claim.pack(VOLUME.bytes), VOLUME.bytes, 5) == claim


def test_long_holder_is_cut() -> None:
    packed = replace(CLAIM, holder="é" * HOLDER_BYTES).pack(VOLUME.bytes)
    assert len(packed) == CLAIM_BYTES
    assert unpack_claim(packed, VOLUME.bytes, 2).holder == "é" * (HOLDER_BYTES // 2)


def test_every_bit_flip_of_a_claim_is_noticed() -> None:
    packed = CLAIM.pack(VOLUME.bytes)
    used = 56 + len(CLAIM.holder)
    for bit in range(used * 8):
        with pytest.raises(RecordError):
            unpack_claim(flipped(packed, bit), VOLUME.bytes, 2)
    assert unpack_claim(flipped(packed, used * 8), VOLUME.bytes, 2) == CLAIM


def test_claim_of_another_place_is_refused() -> None:
    packed = CLAIM.pack(VOLUME.bytes)
    for volume, shard in ((uuid.UUID(int=1).bytes, 2), (VOLUME.bytes, 1)):
        with pytest.raises(RecordError):
            unpack_claim(packed, volume, shard)
    with pytest.raises(RecordError):
        unpack_claim(bytes(CLAIM_BYTES), VOLUME.bytes, 2)


@given(st.binary(min_size=100, max_size=300))
def test_random_bytes_are_no_claim(data: bytes) -> None:
    for candidate in (data, data[:8] + b"FXCL" + data[12:]):
        with pytest.raises(RecordError):
            unpack_claim(candidate.ljust(CLAIM_BYTES, b"\xff"), VOLUME.bytes, 2)


# Inode


@given(st.integers(0, 15), st.integers(0, MAX_BLOCK), st.integers(1, MAX_PIECE_BLOCKS))
def test_location_round_trips(member: int, block: int, blocks: int) -> None:
    packed = pack_location(member, block, blocks)
    assert 0 < packed < 2**64
    assert unpack_location(packed) == (member, block, blocks)


@given(st.integers(1, 20), st.binary(max_size=64), st.sampled_from([512, 1024, 4096]))
def test_inode_round_trips(pieces: int, meta: bytes, size: int) -> None:
    found = parse(inode(pieces=pieces, meta=meta, size=size), size=size)
    assert found.slots.tolist() == [3]
    head = found.heads[0]
    assert (head["generation"], head["epoch"], head["counter"]) == (4, 1_700_000_000, 5)
    assert bytes(head["digest"]) == DIGEST
    assert head["length"] == pieces * 32_768 - 1
    assert found.locations.tolist() == [[pack_location(2, n, 1) for n in range(pieces)]]
    assert found.checksums.tolist() == [[n + 100 for n in range(pieces)]]
    assert [found.metas[i] for i in found.meta_ids] == [meta]
    assert (found.torn, found.foreign) == (0, 0)


def test_inode_of_512_bytes_holds_20_pieces_and_64_bytes_of_meta() -> None:
    assert max_pieces(512, 64) == 20
    inode(pieces=20, meta=bytes(64))
    with pytest.raises(TooLargeError, match="21 pieces"):
        inode(pieces=21, meta=bytes(64))


def test_every_bit_flip_of_an_inode_is_noticed() -> None:
    packed = inode()
    used = HEAD_BYTES + 3 * 16 + 4
    for bit in range(used * 8):
        found = parse(flipped(packed, bit))
        assert len(found.slots) == 0, f"bit {bit}"
        assert found.torn + found.foreign == 1, f"bit {bit}"
    for bit in range(used * 8, 512 * 8, 61):
        assert len(parse(flipped(packed, bit)).slots) == 1  # padding


@pytest.mark.parametrize(
    "change", [{"slot": 4}, {"member": 0}, {"shard": 0}], ids=lambda change: next(iter(change))
)
def test_misdirected_inode_is_refused(change: dict[str, int]) -> None:
    """An inode that was written to another place than it was made for does not count."""
    found = parse(inode(), replace(PLACE, **change))  # type: ignore[arg-type]
    assert (len(found.slots), found.torn) == (0, 0)
    assert {reason: slots.tolist() for reason, slots in found.odd.items()} == {
        Reason.MISPLACED: [change.get("slot", PLACE.slot)]
    }


def test_inode_of_another_volume_is_foreign() -> None:
    found = parse(inode(), replace(PLACE, volume=uuid.UUID(int=9).bytes))
    assert (len(found.slots), found.torn, found.foreign) == (0, 0, 1)


@pytest.mark.parametrize("cut", range(64, 512, 64))
def test_torn_inode_is_refused(cut: int) -> None:
    """Old and new bytes mixed at any point: neither the old nor the new inode."""
    new = inode(pieces=20, meta=bytes(range(64)))
    old = pack_inode(
        PLACE,
        inode_bytes=512,
        generation=4,
        order=(1_600_000_000, 1),
        digest=DIGEST[::-1],
        length=20 * 32_768,
        pieces=[(pack_location(2, n + 500, 1), n + 900) for n in range(20)],
        meta=bytes(range(64, 128)),
    )
    for before in (bytes(512), b"\xff" * 512, old):
        found = parse(new[:cut] + before[cut:])
        assert len(found.slots) == 0


def test_table_of_many_slots() -> None:
    slots: list[bytes] = []
    for n in range(40):
        place = replace(PLACE, slot=10 + n)
        slots.append(
            [
                inode(place, 1 + n % 5, f"meta{n % 3}".encode() * (1 + n % 2)),
                bytes(512),
                b"\xff" * 512,
            ][n % 4 // 2 + (n % 4 == 3)]
        )
    found = parse(b"".join(slots), replace(PLACE, slot=10))
    wanted = [n for n in range(40) if n % 4 < 2]
    assert found.slots.tolist() == [10 + n for n in wanted]
    assert found.torn == 10
    assert found.heads["pieces"].tolist() == [1 + n % 5 for n in wanted]
    for at, n in enumerate(wanted):
        assert found.locations[at].astype(bool).sum() == 1 + n % 5
        assert found.metas[found.meta_ids[at]] == f"meta{n % 3}".encode() * (1 + n % 2)
    assert len(set(found.metas)) == len(found.metas) == 6


def test_random_garbage_is_never_taken_for_an_inode() -> None:
    rng = random.Random(3)
    with memoryview(mmap.mmap(-1, 64 * 1024)) as view:
        for round_ in range(200):
            view[:] = rng.randbytes(len(view))
            for slot in range(0, len(view), 512):  # as much like an inode as chance allows
                if rng.random() < 0.7:
                    view[slot + 8 : slot + 16] = inode()[8:16]
                if rng.random() < 0.5:
                    view[slot + 16 : slot + 32] = VOLUME.bytes
                if rng.random() < 0.5:
                    pieces, meta = rng.randrange(0, 40), rng.randrange(0, 200)
                    used = HEAD_BYTES + 16 * pieces + meta
                    struct.pack_into("<H", view, slot + 14, used)
                    struct.pack_into("<HH", view, slot + 44, pieces, meta)
            found = parse_table(view, replace(PLACE, slot=0), inode_bytes=512)
            assert len(found.slots) == 0, f"round {round_}"
            assert found.torn + found.foreign == 128


def test_empty_table() -> None:
    found = parse(bytes(4096))
    assert (len(found.slots), found.torn, found.foreign) == (0, 0, 0)
