"""Inodes with right checksums and wrong contents: each is dropped, for the reason it should be."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope, pack_fields, unpack_fields
from fx100_lmcache.ondisk.geometry import Geometry, MemberShape
from fx100_lmcache.ondisk.reason import IMPOSSIBLE, Reason
from fx100_lmcache.space.space import Space, extent_of
from fx100_lmcache.testing.forge import InodeDraft
from fx100_lmcache.testing.harness import META, digest_of
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.volume.recovery import Recovered, recover

VOLUME = bytes(range(16))
UNIT, FRAME, FRAMES, SLOTS = 4096, 4, 10, 6
GEOMETRY = Geometry(UNIT, FRAME, 512, 512, 2, (MemberShape(1 << 20, SLOTS, FRAMES),) * 3)
CLAIM_EPOCH, GENERATION = 1000, 5

Change = Callable[[InodeDraft], None]


def draft(slot: int = 0, name: str = "one", **how: object) -> InodeDraft:
    """An honest inode of a whole frame and a part of one."""
    pieces = [(0, 0, FRAME, 7), (1, 4 * FRAME, 2, 8)]
    made = InodeDraft(
        VOLUME, 0, 0, slot, GENERATION, CLAIM_EPOCH, 3, digest_of(name), 5 * UNIT, pieces, META
    )
    return replace(made, **how)  # type: ignore[arg-type]


HONEST = draft(1, "honest", pieces=[(2, 0, 1, 7)], length=100, member=2)


def recovered(*drafts: InodeDraft, epoch: int | None = CLAIM_EPOCH) -> Recovered:
    """Recover tables with these inodes, each in the place that the arguments of `draft` say."""
    members = [MemoryMember(1 << 20, index=n) for n in range(3)]
    for each in drafts:
        put(members, (each.member, each.shard, each.slot), each)
    return read(members, epoch)


def put(members: Sequence[MemoryMember], place: tuple[int, int, int], made: InodeDraft) -> None:
    at = GEOMETRY.slot_offset(*place)
    members[place[0]].media[at : at + 512] = made.pack(512, VOLUME)


def read(members: Sequence[MemoryMember], epoch: int | None = CLAIM_EPOCH) -> Recovered:
    generations = {0: GENERATION, 1: GENERATION}
    return recover(members, GEOMETRY, VOLUME, generations, claim_epoch=epoch)


def changed(**how: object) -> Change:
    def change(made: InodeDraft) -> None:
        for name, value in how.items():
            setattr(made, name, value)

    return change


def fields_but(tag: int) -> bytes:
    return pack_fields(field for field in unpack_fields(META) if field[0] != tag)


MANY = [(m, 0, 65_535, 1) for m in range(3)]

BAD: dict[str, tuple[Reason, Change]] = {
    "version 0": (Reason.FORMAT, changed(version=0)),
    "version 2": (Reason.FORMAT, changed(version=2)),
    "a flag": (Reason.FORMAT, changed(flags=1)),
    "reserved bytes": (Reason.FORMAT, changed(reserved=1 << 63)),
    "a piece more than there is": (Reason.RECORD, changed(count=3, used=300)),
    "metadata shorter than said": (Reason.RECORD, changed(meta_bytes=len(META) + 1, used=300)),
    "another slot": (Reason.MISPLACED, changed(slot=2)),
    "a slot beyond the table": (Reason.MISPLACED, changed(slot=2**32 - 1)),
    "another shard": (Reason.MISPLACED, changed(shard=1)),
    "another member": (Reason.MISPLACED, changed(member=1)),
    "an epoch far ahead": (Reason.ORDER, changed(epoch=CLAIM_EPOCH + 2**32 + 1)),
    "an epoch of 63 bits": (Reason.ORDER, changed(epoch=2**63)),
    "the last epoch": (Reason.ORDER, changed(epoch=2**64 - 1)),
    "the last counter": (Reason.ORDER, changed(counter=2**64 - 1)),
    "a generation far ahead": (Reason.GENERATION, changed(generation=GENERATION + 65_537)),
    "the last generation": (Reason.GENERATION, changed(generation=2**32 - 1)),
    "no pieces": (Reason.PIECES, changed(pieces=[])),
    "a piece of no blocks": (Reason.PIECES, changed(pieces=[(0, 0, FRAME, 7), (1, 16, 0, 8)])),
    "a place of zero": (Reason.PIECES, changed(pieces=[(0, 0, 0, 7), (1, 16, 2, 8)])),
    "a frame not aligned": (Reason.PIECES, changed(pieces=[(0, 2, FRAME, 7)], length=UNIT)),
    "over the end of a frame": (Reason.PIECES, changed(pieces=[(0, 3, 2, 7)], length=UNIT)),
    "a frame and a part": (Reason.PIECES, changed(pieces=[(0, 0, 5, 7)], length=UNIT)),
    "the other shard's": (Reason.PIECES, changed(pieces=[(0, 40, FRAME, 7)], length=UNIT)),
    "over the shard's end": (Reason.PIECES, changed(pieces=[(0, 36, 2 * FRAME, 7)], length=UNIT)),
    "past the volume's end": (Reason.PIECES, changed(pieces=[(0, 2**40 - 4, 4, 7)], length=1)),
    "no such member": (Reason.PIECES, changed(pieces=[(3, 0, FRAME, 7)], length=UNIT)),
    "the last member": (Reason.PIECES, changed(pieces=[(255, 0, FRAME, 7)], length=UNIT)),
    "huge pieces": (Reason.PIECES, changed(pieces=MANY, length=3 * 65_535 * UNIT)),
    "no bytes": (Reason.LENGTH, changed(length=0)),
    "longer than its pieces": (Reason.LENGTH, changed(length=6 * UNIT + 1)),
    "not into its last piece": (Reason.LENGTH, changed(length=4 * UNIT)),
    "a length of 64 bits": (Reason.LENGTH, changed(length=2**64 - 1)),
    "a length of 63 bits": (Reason.LENGTH, changed(length=2**63 + 5 * UNIT)),
    "no metadata": (Reason.METADATA, changed(meta=b"")),
    "metadata cut off": (Reason.METADATA, changed(meta=META[:-1])),
    "metadata without a model": (Reason.METADATA, changed(meta=fields_but(2))),
    "metadata that is no text": (
        Reason.METADATA,
        changed(meta=fields_but(2) + pack_fields([(2, b"\xff\xfe")])),
    ),
    "a rank of 9 bytes": (
        Reason.METADATA,
        changed(meta=fields_but(7) + pack_fields([(7, bytes(9))])),
    ),
    "a digest of another scope": (Reason.DIGEST, changed(digest=b"x" * 48)),
    "the digest that stands for no key": (Reason.DIGEST, changed(digest=bytes(48))),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_true_is_dropped_alone_and_by_reason(name: str) -> None:
    reason, change = BAD[name]
    members = [MemoryMember(1 << 20, index=n) for n in range(3)]
    made = draft()
    change(made)
    put(members, (0, 0, 0), made)
    put(members, (2, 0, 1), HONEST)
    found = read(members)
    assert found.rows.tolist() == [GEOMETRY.row(2, 0, 1)]
    assert found.dropped == {reason: 1}
    row = GEOMETRY.row(0, 0, 0)
    held = reason is Reason.FORMAT  # perhaps a newer package's: nobody writes over it
    assert (found.held_rows, found.stale_rows) == (([row], []) if held else ([], [row]))
    assert found.torn == 0
    assert found.newest_epoch == CLAIM_EPOCH, "what was dropped orders nothing"


def test_every_reason_has_a_case() -> None:
    assert {reason for reason, _ in BAD.values()} == IMPOSSIBLE


def test_the_honest_one_is_taken() -> None:
    found = recovered(draft(), HONEST)
    assert len(found) == 2
    assert found.dropped == {}


@pytest.mark.parametrize(
    "edge",
    [
        {"epoch": CLAIM_EPOCH + 2**32},
        {"counter": 2**62},
        {"generation": GENERATION + 65_536},
        {"length": 4 * UNIT + 1},
        {"length": 6 * UNIT},
        {"pieces": [(0, 0, 2 * FRAME, 7), (0, 39, 1, 7)], "length": 9 * UNIT},
        {"meta": META + pack_fields([(200, b"of a later version")])},
        {"meta": pack_fields(reversed(list(unpack_fields(META))))},
    ],
    ids=str,
)
def test_what_is_at_the_edge_is_taken(edge: dict[str, Any]) -> None:
    assert len(recovered(draft(**edge))) == 1


@pytest.mark.parametrize(
    ("length", "taken"), [(2**32 - 1, True), (2**32, False), (2**32 + 5000, False)]
)
def test_a_length_of_more_than_32_bits_is_dropped(length: int, taken: bool) -> None:
    """The catalog would cut it, and a load would take its pieces into less memory than they are."""
    frame = 62
    geometry = Geometry(32 * 1024, frame, 16_384, 512, 1, (MemberShape(1 << 34, 1, 3000),))
    member = MemoryMember(1 << 20)
    frames = -(-length // geometry.frame_bytes)
    starts = range(0, frames * frame, 4 * frame)
    pieces = [(0, start, min(4 * frame, frames * frame - start), 1) for start in starts]
    at = geometry.slot_offset(0, 0, 0)
    made = draft(pieces=pieces, length=length)
    member.media[at : at + 16_384] = made.pack(16_384, VOLUME)
    found = recover([member], geometry, VOLUME, {0: GENERATION})
    assert len(found) == taken
    assert found.dropped == ({} if taken else {Reason.LENGTH: 1})


def test_a_dead_generation_is_not_judged() -> None:
    """Each clear leaves a table of them."""
    found = recovered(draft(generation=GENERATION - 1, length=0))
    assert (found.dropped, found.stale_rows) == ({}, [])


def test_what_cannot_be_true_raises_no_generation() -> None:
    found = recovered(HONEST, draft(generation=GENERATION + 1, length=0))
    assert found.generations == {0: GENERATION, 1: GENERATION}
    assert found.dropped == {Reason.LENGTH: 1}
    assert len(found) == 1


def test_older_ones_and_losers_are_counted() -> None:
    older = draft(2, epoch=CLAIM_EPOCH - 1, pieces=[(0, 8, 2, 1)], length=UNIT + 1)
    loser = draft(3, "loser", epoch=CLAIM_EPOCH - 1, pieces=[(1, 17, 2, 1)], length=UNIT + 1)
    found = recovered(draft(), older, loser)
    assert found.dropped == {Reason.DUPLICATE: 1, Reason.OVERLAP: 1}
    assert found.rows.tolist() == [GEOMETRY.row(0, 0, 0)]


def test_without_a_claim_the_epoch_is_bounded_all_the_same() -> None:
    assert len(recovered(draft(epoch=2**62), epoch=None)) == 1
    assert recovered(draft(epoch=2**63), epoch=None).dropped == {Reason.ORDER: 1}


def test_many_pieces_of_what_was_dropped_make_no_room_for_themselves() -> None:
    """Else one forged inode would cost a place for as many pieces in every entry."""
    many = draft(pieces=[(0, 0, 1, 1)] * 16, length=16 * UNIT + 1)
    found = recovered(HONEST, many)
    assert found.dropped == {Reason.LENGTH: 1}
    assert found.locations.shape == (1, 1)


def test_metadata_of_what_was_dropped_does_not_stay() -> None:
    """It might not be readable, and later every entry's would be asked for."""
    other = ChunkMeta(Scope("mp", "other", 1), Layout("x"))
    bad = [draft(n, f"bad{n}", meta=b"\0" * n) for n in range(3, 6)]
    good = draft(2, meta=other.pack(), digest=other.scope.digest(b"1"), pieces=[(0, 8, 1, 1)])
    good.length = UNIT
    found = recovered(HONEST, *bad, good)
    assert sorted(found.metas) == sorted([META, other.pack()])
    by_row = dict(zip(found.rows.tolist(), found.meta_ids.tolist(), strict=True))
    assert found.metas[by_row[GEOMETRY.row(0, 0, 2)]] == other.pack()


def test_all_that_is_taken_can_be_marked_and_freed() -> None:
    """Every run of blocks there is, against the allocator: it takes back what recovery took."""
    shape = MemberShape(1 << 20, SLOTS, 3)
    geometry = Geometry(UNIT, FRAME, 512, 512, 1, (shape,))
    member = MemoryMember(1 << 20)
    taken = 0
    for start, blocks in itertools.product(range(3 * FRAME), range(1, 3 * FRAME + 2)):
        made = draft(pieces=[(0, start, blocks, 1)], length=blocks * UNIT)
        at = geometry.slot_offset(0, 0, 0)
        member.media[at : at + 512] = made.pack(512, VOLUME)
        found = recover([member], geometry, VOLUME, {0: GENERATION})
        legal = start % FRAME + blocks <= FRAME or (start % FRAME == 0 == blocks % FRAME)
        assert len(found) == (legal and start + blocks <= 3 * FRAME), (start, blocks)
        if len(found):
            space = Space(geometry, [0])
            free = space.free_blocks
            space.mark_recovered(found.rows, found.locations)
            assert space.free_blocks == free - blocks
            space.free(extent_of(int(found.rows[0]), found.locations[0].tolist()))
            assert space.free_blocks == free
            taken += 1
    assert taken == 3 * 10 + 3  # parts of three frames, and runs of two and three
