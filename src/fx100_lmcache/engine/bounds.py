"""What a transfer may touch: its caller's buffer and its member, nothing else. Pure.

Callers lay transfers out from what they read on the media. The last look at the numbers is here,
because what follows is a system call with an address.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fx100_lmcache.engine.jobs import ReadBatch, Transfer
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.geometry import round_up

I64 = npt.NDArray[np.int64]


def out_of_bounds(transfer: Transfer, member: Member | None) -> str:
    """Say how a transfer leaves its buffer or its member; empty if it does not.

    Parameters
    ----------
    member : Member or None
        Where the transfer goes; None if there is no such member.
    """
    start, length, offset = transfer.start, transfer.length, transfer.offset
    if member is None:
        return f"no member {transfer.member}"
    if length < 1 or start < 0 or start + length > len(transfer.buffer.view):
        room = len(transfer.buffer.view)
        return f"{length} bytes from {start} on leave a buffer of {room} bytes"
    if offset < 0 or offset + round_up(length, member.logical_block_bytes) > member.size_bytes:
        return f"{length} bytes at {offset} leave {member.name} of {member.size_bytes} bytes"
    return ""


def all_within(batch: ReadBatch, members: Sequence[Member]) -> bool:
    """Whether every read of a batch stays in its buffer and in its member."""
    if not len(batch.members):
        return True
    if batch.members.min() < 0 or batch.members.max() >= len(members):
        return False
    align = np.array([m.logical_block_bytes for m in members])[batch.members]
    sizes = np.array([m.size_bytes for m in members])[batch.members]
    lengths, offsets = batch.lengths, batch.offsets
    if (lengths < 1).any() or (lengths > batch.rooms).any() or (offsets < 0).any():
        return False
    return not (offsets > sizes - padded_to(lengths, align)).any()  # no sum: it could overflow


def padded_to(lengths: I64, align: I64) -> I64:
    """Round lengths up to whole blocks."""
    padded: I64 = -(-lengths // align) * align
    return padded
