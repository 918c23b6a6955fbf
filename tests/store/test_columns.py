"""Pieces of many objects at once, against the same worked out one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fx100_lmcache.ondisk.geometry import plan_geometry
from fx100_lmcache.ondisk.location import pack_location, unpack_location
from fx100_lmcache.store.columns import piece_columns

MIB = 1024 * 1024
GEOMETRY = plan_geometry([64 * MIB, 96 * MIB, 64 * MIB], object_bytes=MIB)

locations = st.builds(pack_location, st.integers(0, 2), st.integers(0, 1000), st.integers(1, 65535))


@st.composite
def objects(draw: st.DrawFn) -> tuple[list[int], int]:
    """Locations of one object's pieces, and its length: it ends in the last piece."""
    places = draw(st.lists(locations, min_size=1, max_size=9))
    blocks = [unpack_location(place)[2] for place in places]
    last = draw(st.integers(1, blocks[-1] * GEOMETRY.block_bytes))
    return places, sum(blocks[:-1]) * GEOMETRY.block_bytes + last


@given(st.lists(objects(), min_size=1, max_size=20))
def test_columns_are_what_each_object_alone_would_give(made: list[tuple[list[int], int]]) -> None:
    expected = []
    for number, (places, length) in enumerate(made):
        start = 0
        for place in places:
            member, block, blocks = unpack_location(place)
            size = min(blocks * GEOMETRY.block_bytes, length - start)
            expected.append((number, member, GEOMETRY.block_offset(member, block), start, size))
            start += size
        assert start == length
    columns = piece_columns(
        GEOMETRY,
        np.array([len(places) for places, _ in made]),
        np.array([place for places, _ in made for place in places], np.uint64),
        np.array([length for _, length in made]),
    )
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
