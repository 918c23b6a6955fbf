"""Where things lie: nothing overlaps, nothing sticks out."""

import itertools
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fx100_lmcache.errors import MemberSizeError, TooLargeError
from fx100_lmcache.ondisk.geometry import (
    CLAIM_BYTES,
    LABEL_BYTES,
    MAX_FRAME_BLOCKS,
    MAX_MEMBERS,
    MAX_SHARDS,
    Geometry,
    choose_frame_blocks,
    default_bytes_per_inode,
    plan_geometry,
    stripe,
)

MIB = 1024 * 1024

geometries: st.SearchStrategy[Any] = st.builds(
    dict,
    sizes_bytes=st.lists(st.integers(2 * MIB, 60 * MIB), min_size=1, max_size=6),
    object_bytes=st.integers(1, 5 * MIB),
    shards=st.integers(1, 5),
    inode_bytes=st.sampled_from([512, 1024, 4096]),
    bytes_per_inode=st.sampled_from([None, 16 * 1024, 256 * 1024, 8 * MIB]),
    io_align_bytes=st.sampled_from([512, 4096]),
    block_bytes=st.sampled_from([4096, 32 * 1024]),
)


def planned(how: dict[str, object]) -> Geometry:
    try:
        return plan_geometry(**how)  # type: ignore[arg-type]
    except MemberSizeError:
        assume(False)
        raise


def areas(g: Geometry, member: int) -> list[tuple[int, int, str]]:
    found = [(0, LABEL_BYTES, "label"), (g.label_copy_offset(member), LABEL_BYTES, "label copy")]
    for shard in range(g.shards):
        found += [(g.claim_offset(shard, n), CLAIM_BYTES, f"claim {shard}.{n}") for n in (0, 1)]
        table = g.slot_offset(member, shard, 0)
        found.append((table, g.table_bytes(member), f"table {shard}"))
        blocks = g.shard_blocks(member, shard)
        found.append(
            (g.block_offset(member, blocks.start), len(blocks) * g.block_bytes, f"data {shard}")
        )
    return sorted(found)


@given(geometries)
def test_areas_are_inside_and_do_not_overlap(how: dict[str, object]) -> None:
    g = planned(how)
    for member, shape in enumerate(g.members):
        found = areas(g, member)
        for (start, size, name), (following, _, other) in itertools.pairwise(found):
            assert start + size <= following, f"{name} runs into {other}"
        start, size, _ = found[-1]
        assert start + size <= shape.size_bytes


@given(geometries)
def test_every_transfer_is_aligned(how: dict[str, object]) -> None:
    g = planned(how)
    for member in range(len(g.members)):
        for start, size, name in areas(g, member):
            assert start % g.io_align_bytes == 0, name
            assert size % g.io_align_bytes == 0, name
        assert g.block_offset(member, 0) % g.block_bytes == 0
    assert g.inode_bytes % g.io_align_bytes == 0


@given(geometries)
def test_little_is_lost_to_rounding(how: dict[str, object]) -> None:
    g = planned(how)
    for member, shape in enumerate(g.members):
        used = sum(size for _, size, _ in areas(g, member))
        slack = g.shards * g.frame_bytes + 3 * g.block_bytes + 3 * LABEL_BYTES
        assert shape.size_bytes - used <= slack + g.shards * g.inode_bytes


@given(geometries, st.data())
def test_rows_number_all_slots(how: dict[str, object], data: st.DataObject) -> None:
    g = planned(how)
    row = data.draw(st.integers(0, g.rows - 1))
    member, shard, slot = g.place(row)
    assert g.row(member, shard, slot) == row
    assert slot < g.members[member].slots_per_shard
    last = len(g.members) - 1
    assert g.place(g.rows - 1) == (last, g.shards - 1, g.members[last].slots_per_shard - 1)


def test_rows_and_slots_of_unequal_members() -> None:
    g = plan_geometry([4 * MIB, 20 * MIB, 9 * MIB], object_bytes=MIB, shards=2)
    places = [g.place(row) for row in range(g.rows)]
    assert len(set(places)) == g.rows
    assert [g.row(*place) for place in places] == list(range(g.rows))


@given(
    st.integers(1, 3000),
    st.integers(1, MAX_FRAME_BLOCKS),
    st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True),
    st.integers(1, 20),
)
def test_stripe_covers_an_object_exactly(
    blocks: int, frame: int, members: list[int], longest: int
) -> None:
    pieces = list(stripe(blocks, frame, members, longest))
    assert sum(count for _, count in pieces) == blocks
    assert all(count > 0 for _, count in pieces)
    assert all(count % frame == 0 for _, count in pieces[:-1])  # only the last is no whole frame
    assert max(count for _, count in pieces) <= longest * frame
    share: defaultdict[int, int] = defaultdict(int)
    for member, count in pieces:
        share[member] += -(-count // frame)
    assert max(share.values()) - min(share.get(m, 0) for m in members) <= 1
    assert pieces[0][0] == members[0]


@pytest.mark.parametrize(
    ("object_bytes", "members", "frame_blocks", "waste_blocks"),
    [
        (8_126_464, 4, 62, 0),  # Qwen3-Coder-480B at TP8: one frame of 2,031,616 bytes on each
        (65_011_712, 4, 62, 0),  # the same at TP1: 8 frames on each
        (1024 * 1024, 4, 32, 0),
        (32 * 1024, 4, 1, 0),
        (1, 1, 1, 0),
        (8_126_465, 4, 50, 1),
        (33 * 32 * 1024, 4, 33, 0),
    ],
)
def test_frames_make_full_chunks_waste_nothing(
    object_bytes: int, members: int, frame_blocks: int, waste_blocks: int
) -> None:
    frame = choose_frame_blocks(object_bytes, members)
    blocks = -(-object_bytes // (32 * 1024))
    assert -blocks % frame == waste_blocks
    if waste_blocks == 0:
        assert frame == frame_blocks


@given(st.integers(1, 100 * MIB), st.integers(1, MAX_MEMBERS))
def test_frames_are_of_a_sensible_size(object_bytes: int, members: int) -> None:
    frame = choose_frame_blocks(object_bytes, members)
    blocks = -(-object_bytes // (32 * 1024))
    assert min(blocks, 32) <= frame <= min(blocks, MAX_FRAME_BLOCKS)


def test_too_small_members_are_refused_with_the_size_that_would_do() -> None:
    with pytest.raises(MemberSizeError, match="member 1 has 1048576 bytes") as refused:
        plan_geometry([64 * MIB, MIB], object_bytes=8 * MIB, shards=2)
    needed = int(refused.value.what.rsplit(" ", 1)[1])
    plan_geometry([64 * MIB, needed], object_bytes=8 * MIB, shards=2)


@pytest.mark.parametrize(
    ("object_bytes", "inode_bytes", "expected"),
    [
        (8_126_464, 1024, 126_976),  # 62 layers of 131,072 bytes fit in the place of a chunk
        (64 * MIB, 1024, 256 * 1024),
        (MIB, 1024, 64 * 1024),
        (1, 1024, 64 * 1024),
        (1, 512, 32 * 1024),  # a block, which every object takes
        (8_126_464, 4096, 256 * 1024),
        (1, 8192, 512 * 1024),
    ],
)
def test_the_default_number_of_inodes_follows_from_the_object(
    object_bytes: int, inode_bytes: int, expected: int
) -> None:
    assert default_bytes_per_inode(object_bytes, inode_bytes) == expected
    size = 1 << 30
    g = plan_geometry(
        [size], object_bytes=object_bytes, inode_bytes=inode_bytes, io_align_bytes=512
    )
    assert g.rows == pytest.approx(size / expected, rel=1e-3)
    assert g.table_bytes(0) <= size / 64


def test_a_number_of_inodes_that_was_given_is_respected() -> None:
    g = plan_geometry([1 << 30], object_bytes=8_126_464, bytes_per_inode=32 * 1024)
    assert g.rows == pytest.approx((1 << 30) / (32 * 1024), rel=1e-3)


def test_limits() -> None:
    with pytest.raises(TooLargeError, match="members"):
        plan_geometry([MIB] * (MAX_MEMBERS + 1), object_bytes=MIB)
    with pytest.raises(TooLargeError, match="members"):
        plan_geometry([], object_bytes=MIB)
    with pytest.raises(TooLargeError, match="shards"):
        plan_geometry([MIB], object_bytes=MIB, shards=MAX_SHARDS + 1)
