"""Where a piece lies, in 64 bits: start block 40, blocks 16, member 8. One, or a column of them.

A padded place in a column is zero; a real one has a count of blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fx100_lmcache.ondisk.geometry import MAX_MEMBERS

MAX_BLOCK = (1 << 40) - 1
MAX_PIECE_BLOCKS = (1 << 16) - 1

_MEMBER_SHIFT = 56
_BLOCKS_SHIFT = 40

U64 = npt.NDArray[np.uint64]


def pack_location(member: int, block: int, blocks: int) -> int:
    """Put a piece's place into 64 bits."""
    assert 0 <= member < MAX_MEMBERS
    assert 0 <= block <= MAX_BLOCK
    assert 0 < blocks <= MAX_PIECE_BLOCKS
    return member << _MEMBER_SHIFT | blocks << _BLOCKS_SHIFT | block


def unpack_location(location: int) -> tuple[int, int, int]:
    """Inverse of :func:`pack_location`: ``(member, block, blocks)``."""
    blocks = location >> _BLOCKS_SHIFT & MAX_PIECE_BLOCKS
    return location >> _MEMBER_SHIFT, location & MAX_BLOCK, blocks


def members_of(locations: U64) -> U64:
    """Member of each place; not checked, so up to 255."""
    return locations >> np.uint64(_MEMBER_SHIFT)


def starts_of(locations: U64) -> U64:
    """Start block of each place."""
    return locations & np.uint64(MAX_BLOCK)


def blocks_of(locations: U64) -> U64:
    """Blocks of each place."""
    blocks = locations >> np.uint64(_BLOCKS_SHIFT)
    blocks &= np.uint64(MAX_PIECE_BLOCKS)
    return blocks
