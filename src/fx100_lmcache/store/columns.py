"""Where the pieces of many objects lie and what part of each object they hold. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fx100_lmcache.ondisk.geometry import Geometry
from fx100_lmcache.ondisk.location import blocks_of, members_of, starts_of

I64 = npt.NDArray[np.int64]


class PieceColumns(NamedTuple):
    """One value for each piece; bytes.

    Attributes
    ----------
    owners
        Number of the object.
    members, offsets
        Where on the media.
    starts, lengths
        Which bytes of the object: the last piece may be shorter than its blocks.
    """

    owners: I64
    members: I64
    offsets: I64
    starts: I64
    lengths: I64


def piece_columns(
    geometry: Geometry, piece_counts: I64, locations: npt.NDArray[np.uint64], object_bytes: I64
) -> PieceColumns:
    """Work out the pieces of objects, given their counts, locations and logical lengths."""
    owners = np.repeat(np.arange(len(piece_counts)), piece_counts)
    members = members_of(locations).view(np.int64)
    blocks = starts_of(locations).view(np.int64)
    block_counts = blocks_of(locations).view(np.int64)
    bases = np.array([geometry.block_offset(m, 0) for m in range(len(geometry.members))])
    room = block_counts * geometry.block_bytes
    before = np.cumsum(room) - room
    starts = before - np.repeat(before[np.cumsum(piece_counts) - piece_counts], piece_counts)
    return PieceColumns(
        owners,
        members,
        bases[members] + blocks * geometry.block_bytes,
        starts,
        np.minimum(room, object_bytes[owners] - starts),
    )
