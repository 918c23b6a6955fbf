"""A store on media that say wrong things with right checksums: served as if they were not there."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from fx100_lmcache.buffers import aligned_buffer
from fx100_lmcache.errors import ClaimError, FX100Error, TooLargeError, VolumeError
from fx100_lmcache.members.device import DeviceMember, open_member
from fx100_lmcache.ondisk.chunk_meta import DIGEST_BYTES, pack_fields
from fx100_lmcache.ondisk.geometry import LABEL_BYTES, Geometry, MemberShape, plan_geometry
from fx100_lmcache.store import LoadItem, LoadResult, Store
from fx100_lmcache.testing.forge import ClaimDraft, InodeDraft, LabelDraft
from fx100_lmcache.testing.guarded import GuardedBuffer
from fx100_lmcache.testing.harness import META, Rig, digest_of, value_of
from fx100_lmcache.testing.inline import inline_engine
from fx100_lmcache.testing.memory import MemoryMember, memory_members
from fx100_lmcache.volume.format import contents_of, format_volume
from fx100_lmcache.volume.volume import assemble
from support.store import counts, options

UNIT = 4096


def honest_rig(**how: float) -> Rig:
    rig = Rig.fresh(1, 256 * 1024, options=options(**how))
    assert rig.put("honest", value_of("honest", 0, 9000)).stored
    return rig


def forge(rig: Rig, name: str, pieces: list[tuple[int, int, int]], **how: object) -> None:
    """Write an inode in slot 5 whose pieces have the right checksums."""
    geometry, media = rig.store.volume.geometry, rig.members[0].media
    done = []
    for member, start, blocks in pieces:
        at = geometry.block_offset(member, start)
        data = bytes(media[at : at + blocks * UNIT])
        done.append((member, start, blocks, xxhash.xxh3_64_intdigest(data)))
    length = sum(blocks for _, _, blocks in pieces) * UNIT
    volume = rig.store.volume.uuid
    draft = InodeDraft(volume, 0, 0, 5, 1, rig.wall_s + 1, 9, digest_of(name), length, done, META)
    draft = replace(draft, **how)  # type: ignore[arg-type]
    at = geometry.slot_offset(0, 0, 5)
    media[at : at + geometry.inode_bytes] = draft.pack(geometry.inode_bytes, volume)


def reopened(rig: Rig) -> Rig:
    rig.reopen()
    rig.check_space()
    assert rig.get("honest") == value_of("honest", 0, 9000)
    return rig


def test_an_object_of_more_than_4_gib_is_not_read_into_less_memory(tmp_path: Path) -> None:
    """Its length, cut to 32 bits, would fit a small buffer, and its pieces go far beyond that."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(4608 << 20)
    member = open_member(path, direct="off")
    geometry = plan_geometry(
        [member.size_bytes], object_bytes=8 << 20, inode_bytes=16_384, bytes_per_inode=1 << 30
    )
    volume = format_volume([member], geometry, unix_s=1)
    long = geometry.frame_bytes * 4
    frames = 4 * geometry.frame_blocks
    sums = xxhash.xxh3_64_intdigest(bytes(long))
    pieces = [(0, n * frames, frames, sums) for n in range(513)]
    length = 2**32 + 5000
    draft = InodeDraft(*(volume.uuid, 0, 0, 0, 1, 1, 1), digest_of("huge"), length, pieces, META)
    write_record(member, geometry.slot_offset(0, 0, 0), draft.pack(16_384, volume.uuid))
    engine, _, _ = inline_engine([member])
    store = Store(volume, engine, options=options())
    buffer = GuardedBuffer(8192)
    results: list[LoadResult] = []
    item = LoadItem(digest_of("huge"), buffer.buffer, lambda _meta, _length: True)
    store.load([item], results.extend)
    assert results == [LoadResult(0, "absent")]
    assert len(store) == 0
    store.close()
    member.close()


def write_record(member: DeviceMember, offset: int, record: bytes) -> None:
    with aligned_buffer(len(record)) as view:
        view[:] = record
        assert member.write_from(offset, view) == len(record)


@pytest.mark.parametrize("meta", [b"", b"meta", META[:-1], META + b"\0", pack_fields([(1, b"")])])
def test_metadata_that_cannot_be_read_cost_their_entry_and_nothing_else(meta: bytes) -> None:
    rig = honest_rig()
    forge(rig, "unreadable", [(0, 16, 4)], meta=meta)
    reopened(rig)
    assert [rig.store.meta(number) for number in rig.store.bytes_by_meta()]
    assert rig.get("unreadable") is None
    assert counts(rig)["inodes_dropped_metadata"] == 1
    assert rig.put("unreadable", b"x" * 5000).stored


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 18, 4)],  # a whole frame, but over two
        [(0, 16, 6)],  # a frame and a half
        [(0, 19, 2)],  # a part of two frames
        [(0, 17, 8)],
    ],
)
def test_pieces_that_the_allocator_would_not_give_do_no_harm_when_they_are_removed(
    pieces: list[tuple[int, int, int]],
) -> None:
    rig = honest_rig()
    forge(rig, "odd", pieces)
    reopened(rig)
    rig.store.remove([digest_of("odd"), digest_of("honest")], force=True)
    rig.check_space()
    assert rig.store.space().used == 0
    for name in ("odd", "honest", "other"):
        assert rig.put(name, value_of(name, 1, 16_384)).stored
        assert rig.get(name) == value_of(name, 1, 16_384)
    assert counts(rig)["inodes_dropped_pieces"] == 1


def test_what_was_dropped_is_erased_and_its_slot_is_free_again() -> None:
    rig = honest_rig()
    free = rig.store._core.space.free_slots_up(0)
    forge(rig, "odd", [(0, 18, 4)])
    reopened(rig)
    assert rig.store.status()["dropped_inodes"]["pieces"] == 1
    assert rig.store._core.space.free_slots_up(0) == free
    reopened(rig)
    assert rig.store.status()["dropped_inodes"] == dict.fromkeys(rig.store.dropped_inodes, 0)


def test_an_inode_of_an_unknown_format_is_neither_loaded_nor_destroyed() -> None:
    rig = honest_rig()
    forge(rig, "newer", [(0, 16, 4)], version=2)
    at = rig.store.volume.geometry.slot_offset(0, 0, 5)
    before = bytes(rig.members[0].media[at : at + 512])
    reopened(rig)
    slots = rig.store.volume.geometry.rows
    for number in range(2 * slots):  # far more objects than there are slots
        rig.put(f"k{number}", b"x" * 100)
    assert rig.get("newer") is None
    reopened(rig) if rig.get("honest") else rig.reopen()
    assert bytes(rig.members[0].media[at : at + 512]) == before
    assert counts(rig)["inodes_dropped_format"] == 1
    assert rig.store._core.space.free_slots_up(0) + len(rig.store) == slots - 1


def test_nothing_is_found_under_the_digest_that_stands_for_no_key() -> None:
    """The faces ask for it where a key cannot be stored: an object there would be everybody's."""
    rig = honest_rig()
    forge(rig, "", [(0, 16, 4)], digest=bytes(DIGEST_BYTES))
    reopened(rig)
    assert not rig.store.lookup([bytes(DIGEST_BYTES)])[0]
    assert counts(rig)["inodes_dropped_digest"] == 1


@pytest.mark.parametrize("epoch", [2**32 + 1_000_000, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_an_epoch_that_nobody_reaches_orders_nothing(epoch: int) -> None:
    """What is put after it is newer, also for the one who opens the volume next."""
    rig = honest_rig()
    forge(rig, "honest", [(0, 16, 4)], epoch=epoch)
    rig.reopen()
    rig.store.remove([digest_of("honest")], force=True)
    for version in range(3):
        assert rig.put("honest", value_of("honest", version, 9000)).stored
        for _ in range(2):
            rig.reopen()
            rig.check_space()
            assert rig.get("honest") == value_of("honest", version, 9000)
        rig.store.remove([digest_of("honest")], force=True)


def test_a_generation_far_ahead_does_not_end_all_others() -> None:
    rig = honest_rig()
    forge(rig, "far", [(0, 16, 4)], generation=2**32 - 1)
    reopened(rig)
    assert counts(rig)["inodes_dropped_generation"] == 1
    rig.store.clear()
    rig.reopen()
    assert len(rig.store) == 0


def write_claim_blocks(rig: Rig, **how: object) -> None:
    geometry, volume = rig.store.volume.geometry, rig.store.volume.uuid
    for which in range(2):
        at = geometry.claim_offset(0, which)
        block = ClaimDraft(volume, 0, 1, rig.wall_s, 8 + which)
        rig.members[0].media[at : at + 4096] = replace(block, **how).pack()  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["epoch", "counter", "generation"])
@pytest.mark.parametrize("value", [0, 2**32 - 1, 2**62 - 1, 2**62, 2**63, 2**64 - 2, 2**64 - 1])
def test_a_claim_at_the_edge_of_its_types_can_be_followed(field: str, value: int) -> None:
    rig = honest_rig()
    if field == "generation":
        value = min(value, 2**32 - 1)
    write_claim_blocks(rig, **{field: value})
    for version in range(2):
        rig.reopen()
        rig.check_space()
        assert rig.put("new", value_of("new", version, 9000)).stored
        rig.reopen()
        assert rig.get("new") == value_of("new", version, 9000)
        rig.store.clear()
        rig.check_space()
        assert len(rig.store) == 0
    rig.reopen()
    assert len(rig.store) == 0, "what was cleared came back"


def test_a_holder_that_is_no_text_is_shown_on_one_line() -> None:
    rig = honest_rig()
    write_claim_blocks(rig, holder=b"host=x\n\x1b[2J\xff pid=1")
    with pytest.raises(ClaimError) as refused:
        rig.reopen()
    assert refused.value.what.isprintable()
    assert "host=x??[2J" in str(refused.value)


# Labels

GOOD = Geometry(UNIT, 4, 512, 512, 1, (MemberShape(256 * 1024, 20, 10),) * 2)
LABELS = {
    **{f"{n} slots": {"slots": n} for n in (0, 2**31, 2**32 - 1)},
    **{f"{n} frames": {"frames": n} for n in (0, 2**31, 2**32 - 1)},
    **{f"{n} shards": {"shards": n} for n in (0, 65, 2**16 - 1)},
    **{f"{n} members": {"count": n} for n in (0, 1, 17, 255)},
    **{f"index {n}": {"index": n} for n in (2, 255)},
    **{f"inodes of {n}": {"inode_bytes": n} for n in (0, 1, 256, 513, 1536, 2**16, 2**31)},
    **{f"blocks of {n}": {"block_bytes": n} for n in (0, 1, 511, 4097, 2**31, 2**32 - 512)},
    **{f"frames of {n} blocks": {"frame_blocks": n} for n in (0, 65, 2**16 - 1)},
    **{f"a unit of {n} times 512": {"align": n} for n in (0, 3, 16, 2**16 - 1)},
    **{f"made at {n}": {"created": n} for n in (253_402_300_800, 2**63, 2**64 - 1)},
    **{f"a size of {n}": {"size": n} for n in (0, 4096, 2**63, 2**64 - 1)},
    **{f"version {n}": {"version": n} for n in (0, 2, 2**16 - 1)},
    **{f"{n} bytes used": {"used": n} for n in (0, 60, 76, 4096)},
}


def labelled(member: int, change: dict[str, int]) -> bytes:
    """Make the label of a member, with one number changed."""
    shape = {"size": 256 * 1024, "slots": 20, "frames": 10}
    shape |= {name: value for name, value in change.items() if name in shape}
    draft = LabelDraft(
        *(uuid.UUID(int=7).bytes, 1, member, 2, 1, UNIT, 4, 512, 1),
        [(shape["size"], shape["slots"], shape["frames"])] * 2,
    )
    rest = {name: value for name, value in change.items() if name not in shape}
    return replace(draft, **rest).pack()  # type: ignore[arg-type]


def members_with(
    change: dict[str, int], copies: Sequence[int] = (0, -LABEL_BYTES)
) -> list[MemoryMember]:
    members = memory_members(2, 256 * 1024)
    format_volume(members, GOOD, unix_s=1, volume=uuid.UUID(int=7))
    for number, member in enumerate(members):
        for at in copies:
            start = at % member.size_bytes
            member.media[start : start + LABEL_BYTES] = labelled(number, change)
    return members


def test_the_label_that_is_not_changed_is_good() -> None:
    assert assemble(members_with({})).geometry == GOOD


@pytest.mark.parametrize("name", LABELS)
def test_a_label_that_no_volume_can_have_is_refused_by_name(name: str) -> None:
    members = members_with(LABELS[name])
    with pytest.raises(VolumeError, match="memory0") as refused:
        assemble(members)
    assert any(word in str(refused.value) for word in ("fx100 format", "install", "size back"))
    assert contents_of(members[0]).kind in ("volume", "foreign")


def test_a_back_copy_of_a_larger_member_is_refused_too() -> None:
    members = members_with({"size": 300 * 1024}, copies=[-LABEL_BYTES])
    for member in members:
        member.media[:LABEL_BYTES] = b"\xff" * LABEL_BYTES
    with pytest.raises(FX100Error, match="memory0 shrank"):
        assemble(members)


def test_what_a_label_can_say_can_also_be_opened() -> None:
    """The smallest volume: one slot, one frame of one block."""
    [member] = members = memory_members(1, 64 * 1024)
    geometry = Geometry(UNIT, 1, 512, 512, 1, (MemberShape(member.size_bytes, 1, 1),))
    format_volume(members, geometry, unix_s=1)
    rig = Rig(members, options=options())
    rig.open()
    for version in range(3):
        assert rig.put("only", value_of("only", version, 4000)).stored
        assert rig.get("only") == value_of("only", version, 4000)
        rig.store.remove([digest_of("only")])
        assert rig.get("only") is None


@pytest.mark.parametrize(
    "how",
    [
        {"bytes_per_inode": 65_536, "sizes_bytes": [1 << 50] * 16},
        {"object_bytes": 1, "bytes_per_inode": 1 << 40, "sizes_bytes": [1 << 54]},
    ],
)
def test_more_inodes_or_frames_than_can_be_numbered_are_refused_at_format(
    how: dict[str, int],
) -> None:
    with pytest.raises(TooLargeError, match="at most"):
        plan_geometry(**{"object_bytes": 1 << 20} | how)  # type: ignore[arg-type]


# Widths of the catalog's columns


def test_an_entry_with_more_readers_than_16_bits_count_stays_until_the_last() -> None:
    rig = honest_rig()
    catalog = rig.store._core.catalog
    row = catalog.find_one(digest_of("honest"))
    for _ in range(2**16):
        catalog.start_reading([row])
    assert catalog.being_read(row)
    assert not catalog.evictable(row, 0.0, 0)
    catalog.drop(row)
    for _ in range(2**16 - 1):
        assert catalog.stop_reading([row]) == []
    assert catalog.stop_reading([row]) == [row]
    catalog.release(row)
