"""From inode tables to a catalog: who wins, what is refused."""

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fx100_lmcache.members.base import read_whole
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout
from fx100_lmcache.ondisk.geometry import Geometry, MemberShape
from fx100_lmcache.ondisk.inode import InodePlace, pack_inode
from fx100_lmcache.ondisk.location import pack_location, unpack_location
from fx100_lmcache.ondisk.reason import Reason
from fx100_lmcache.testing.harness import META, SCOPE, digest_of
from fx100_lmcache.testing.memory import Fault, MemoryMember
from fx100_lmcache.volume.overlap import contested_entries, resolve
from fx100_lmcache.volume.recovery import Recovered, recover

VOLUME = uuid.UUID(int=5).bytes
OTHER_META = ChunkMeta(SCOPE, Layout("other")).pack()
FRAME = 4
SLOTS = 6
GEOMETRY = Geometry(4096, FRAME, 512, 512, 2, (MemberShape(1 << 20, SLOTS, 10),) * 3)


@dataclass(frozen=True)
class Inode:
    slot: int
    name: str
    pieces: tuple[tuple[int, int, int], ...]
    order: tuple[int, int] = (100, 1)
    member: int = 0
    shard: int = 0
    generation: int = 1
    length: int = 0
    meta: bytes = META

    @property
    def digest(self) -> bytes:
        return digest_of(self.name)

    @property
    def row(self) -> int:
        return GEOMETRY.row(self.member, self.shard, self.slot)

    def pack(self) -> bytes:
        return pack_inode(
            InodePlace(VOLUME, self.shard, self.member, self.slot),
            inode_bytes=512,
            generation=self.generation,
            order=self.order,
            digest=self.digest,
            length=self.length or sum(n for _, _, n in self.pieces) * 4096,
            pieces=[(pack_location(*piece), 9) for piece in self.pieces],
            meta=self.meta,
        )


def members_with(inodes: Sequence[Inode]) -> list[MemoryMember]:
    members = [MemoryMember(1 << 20, index=n) for n in range(3)]
    for inode in inodes:
        at = GEOMETRY.slot_offset(inode.member, inode.shard, inode.slot)
        members[inode.member].media[at : at + 512] = inode.pack()
    return members


def recovered(*inodes: Inode, generations: dict[int, int] | None = None) -> Recovered:
    return recover(members_with(inodes), GEOMETRY, VOLUME, generations or {0: 1, 1: 1})


def names(found: Recovered) -> list[str]:
    order = np.argsort(found.age)
    return [w.tobytes()[16:].rstrip(b"\0").decode() for w in found.words[order]]


ONE = Inode(0, "one", ((0, 0, 4), (1, 8, 4)))
TWO = Inode(1, "two", ((0, 4, 4),), order=(100, 2))


def test_empty_tables() -> None:
    found = recovered()
    assert (len(found), found.stale_rows, found.torn) == (0, [], 0)
    assert found.generations == {0: 1, 1: 1}


def test_entries_come_back_with_all_their_columns() -> None:
    other = Inode(3, "three", ((2, 43, 1),), order=(99, 7), member=1, shard=1, meta=OTHER_META)
    found = recovered(ONE, TWO, other)
    assert names(found) == ["three", "one", "two"]
    at = found.rows.tolist().index(other.row)
    assert found.metas[found.meta_ids[at]] == OTHER_META
    assert (found.length[at], found.blocks[at], found.piece_counts[at]) == (4096, 1, 1)
    assert found.members[at] == 0b110  # the inode's own member, too
    assert found.newest_epoch == 100
    at = found.rows.tolist().index(ONE.row)
    assert [unpack_location(p) for p in found.locations[at].tolist() if p] == list(ONE.pieces)
    assert found.checksums[at].tolist() == [9, 9]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("older", "newer"), [((100, 9), (101, 1)), ((100, 1), (100, 2))])
def test_newest_inode_of_a_digest_wins(
    older: tuple[int, int], newer: tuple[int, int], swap: bool
) -> None:
    old = replace(ONE, order=older, slot=3 if swap else 0)
    new = replace(ONE, order=newer, slot=0 if swap else 3, pieces=((2, 0, 4),))
    found = recovered(old, new)
    assert found.rows.tolist() == [new.row]
    assert found.stale_rows == [old.row]


def test_newest_inode_of_a_digest_wins_across_members() -> None:
    old = replace(ONE, order=(100, 1))
    new = replace(ONE, order=(100, 2), member=2, pieces=((2, 0, 4),))
    found = recovered(old, new)
    assert (found.rows.tolist(), found.stale_rows) == ([new.row], [old.row])


def test_newest_claim_on_a_block_wins_and_the_loser_is_erased() -> None:
    thief = Inode(2, "thief", ((1, 11, 1),), order=(100, 5))
    found = recovered(ONE, TWO, thief)
    assert names(found) == ["two", "thief"]
    assert found.stale_rows == [ONE.row]


def test_a_loser_does_not_take_others_with_it() -> None:
    """Its claims are void, so that who overlaps only the loser stays."""
    bottom = Inode(0, "bottom", ((0, 0, 4),), order=(100, 1))
    middle = Inode(1, "middle", ((0, 0, 4), (0, 8, 4)), order=(100, 2))
    top = Inode(2, "top", ((0, 8, 4),), order=(100, 3))
    assert names(recovered(bottom, middle, top)) == ["bottom", "top"]


def test_an_inode_that_overlaps_itself_is_refused() -> None:
    twice = Inode(0, "twice", ((0, 0, 4), (0, 2, 2)))
    found = recovered(twice)
    assert (len(found), found.stale_rows) == (0, [twice.row])


def test_small_objects_share_a_frame() -> None:
    parts = [Inode(n, f"part{n}", ((0, n, 1),), order=(100, n)) for n in range(4)]
    assert len(recovered(*parts)) == 4


@pytest.mark.parametrize(
    "pieces",
    [
        ((0, 40, 4),),  # the other shard's
        ((0, 38, 4),),  # over the end of its own
        ((0, 80, 4),),  # past the end
        ((3, 0, 4),),  # no such member
        ((15, 0, 4),),
        ((0, 0, 65_535),),
        ((0, 0, 4), (0, (1 << 40) - 1, 4)),
    ],
)
def test_pieces_outside_the_shard_are_refused(pieces: tuple[tuple[int, int, int], ...]) -> None:
    bad = Inode(0, "bad", pieces)
    found = recovered(bad, TWO)
    assert names(found) == ["two"]
    assert found.dropped == {Reason.PIECES: 1}
    assert (found.torn, found.stale_rows) == (0, [bad.row])


@pytest.mark.parametrize(
    ("length", "fits"),
    [(8 * 4096, True), (4 * 4096 + 1, True), (8 * 4096 + 1, False), (4 * 4096, False), (1, False)],
)
def test_lengths_must_add_up(length: int, fits: bool) -> None:
    """An object fills all of its pieces but the last."""
    assert len(recovered(replace(ONE, length=length))) == fits


@pytest.mark.parametrize(("claimed", "inode", "lives"), [(2, 1, False), (2, 2, True), (1, 2, True)])
def test_generations(claimed: int, inode: int, lives: bool) -> None:
    found = recovered(replace(ONE, generation=inode), generations={0: claimed, 1: 1})
    assert len(found) == lives
    assert found.generations == {0: max(claimed, inode), 1: 1}
    assert found.stale_rows == []  # an older generation needs no erasing


def test_newer_generation_on_one_slot_ends_all_older_ones() -> None:
    found = recovered(ONE, replace(TWO, generation=3), generations={0: 1, 1: 1})
    assert names(found) == ["two"]
    assert found.newest_epoch == 100


def test_shards_that_are_not_ours_are_not_read() -> None:
    other = Inode(0, "other", ((0, 40, 4),), shard=1)
    assert names(recovered(ONE, other, generations={0: 1})) == ["one"]


def test_old_epochs_of_dead_inodes_still_count() -> None:
    """The next writer's inodes must be newer than anything on the media."""
    assert (
        recovered(replace(ONE, generation=1, order=(900, 1)), generations={0: 2}).newest_epoch
        == 900
    )


def test_tables_larger_than_one_call_and_short_reads() -> None:
    """Recovery, too, keeps its calls small; and a short read is resumed."""
    shape = MemberShape(40 << 20, 5000, 100)
    geometry = Geometry(4096, FRAME, 512, 512, 1, (shape,))
    member = MemoryMember(40 << 20, max_io_bytes=512 * 1024)
    for slot in (0, 2047, 2048, 4999):
        place = InodePlace(VOLUME, 0, 0, slot)
        at = geometry.slot_offset(0, 0, slot)
        member.media[at : at + 512] = pack_inode(
            place,
            inode_bytes=512,
            generation=1,
            order=(1, slot + 1),
            digest=ONE.digest[:44] + slot.to_bytes(4, "little"),
            length=4096,
            pieces=[(pack_location(0, slot % 400, 1), 0)],
            meta=META,
        )
    member.faults = [Fault("short", "read", after=2, times=3, value=1000)]
    found = recover([member], geometry, VOLUME, {0: 1})
    assert sorted(found.rows.tolist()) == [0, 2047, 2048, 4999]


def test_unreadable_table_is_an_error() -> None:
    members = members_with([ONE])
    members[1].faults = [Fault("error", "read", times=99)]
    with pytest.raises(OSError, match="injected"):
        recover(members, GEOMETRY, VOLUME, {0: 1})
    members[1].faults = []
    members[1].gone = True
    with pytest.raises(OSError, match="moved nothing"):
        recover(members, GEOMETRY, VOLUME, {0: 1})


def bad_slot(inode: Inode, slots: int = 1) -> Fault:
    at = GEOMETRY.slot_offset(inode.member, inode.shard, inode.slot)
    return Fault("unreadable", "read", first_byte=at, last_byte=at + 512 * slots - 1)


@pytest.mark.parametrize("broken", [ONE, TWO])
def test_an_unreadable_slot_costs_its_entry_alone(broken: Inode) -> None:
    members = members_with([ONE, TWO])
    members[0].faults = [bad_slot(broken)]
    found = recover(members, GEOMETRY, VOLUME, {0: 1, 1: 1})
    assert names(found) == [one.name for one in (ONE, TWO) if one is not broken]
    assert found.unreadable_rows == [broken.row]


def test_too_many_unreadable_slots_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    members = members_with([ONE, TWO])
    members[0].faults = [bad_slot(ONE, slots=3)]
    monkeypatch.setattr("fx100_lmcache.volume.recovery.MAX_UNREADABLE_SLOTS", 3)
    assert len(recover(members, GEOMETRY, VOLUME, {0: 1}).unreadable_rows) == 3
    monkeypatch.setattr("fx100_lmcache.volume.recovery.MAX_UNREADABLE_SLOTS", 2)
    with pytest.raises(OSError, match="injected"):
        recover(members, GEOMETRY, VOLUME, {0: 1})


def test_read_whole_does_not_halve_for_ever() -> None:
    member = MemoryMember(1 << 20)
    member.faults = [Fault("error", "read", times=99)]
    with pytest.raises(OSError, match="injected"), memoryview(bytearray(1 << 20)) as view:
        read_whole(member, 0, view)
    assert len(member.calls) == 4  # 1 MiB to 128 KiB


@pytest.mark.parametrize("seed", range(30))
def test_overlaps_against_a_naive_model(seed: int) -> None:
    """Newest first, each takes its blocks or loses whole."""
    rng = random.Random(seed)
    count, widest = 60, 3
    locations = np.zeros((count, widest), np.uint64)
    spread = rng.choice((8, 20, 80))
    for entry in range(count):
        for column in range(rng.randrange(1, widest + 1)):
            start = rng.randrange(spread)
            length = rng.randrange(1, min(80 - start, rng.choice((2, 9))) + 1)
            locations[entry, column] = pack_location(rng.randrange(3), start, length)
    candidates = np.array([rng.random() < 0.9 for _ in range(count)])
    age = np.array(rng.sample(range(count), count))
    losers = set()
    taken: set[tuple[int, int]] = set()
    for entry in np.argsort(-age).tolist():
        runs = [unpack_location(p) for p in locations[entry].tolist() if p]
        blocks = [(m, b) for m, start, n in runs for b in range(start, start + n)]
        if candidates[entry]:
            if taken & set(blocks) or len(set(blocks)) < len(blocks):
                losers.add(entry)
            else:
                taken |= set(blocks)
    contested = contested_entries(locations, candidates, age, GEOMETRY)
    assert [age[e] for e in contested] == sorted(age[e] for e in contested)
    assert set(resolve(locations, contested)) == losers
