"""Ownership: one writer for each shard, proven by kernel locks and recorded on the members.

Locks say whether the owner on *this* host is alive: they go with the process, however it dies.
Across hosts nobody's death can be inferred, so a claim of another host that was not given back is
only broken by an operator's word (``take_over``).
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fx100_lmcache.aligned import aligned_buffer
from fx100_lmcache.errors import ClaimError, RecordError
from fx100_lmcache.geometry import CLAIM_BYTES, Geometry
from fx100_lmcache.members.base import Member, read_whole
from fx100_lmcache.ondisk.claim_block import (
    ClaimBlock,
    next_counter,
    next_epoch,
    unpack_claim,
)

_HOST_FIELDS = ("host", "machine", "boot")


def holder_text(unix_s: float) -> str:
    """Say who we are, for the message that a second opener sees."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
    fields = {
        "host": socket.gethostname()[:64],
        "machine": _read("/etc/machine-id"),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "pid": str(os.getpid()),
        "since": started,
    }
    return " ".join(f"{name}={value}" for name, value in fields.items() if value)


def same_host(one: str, other: str) -> bool:
    """Whether two holder texts were written on one host.

    Any of host name, machine id and boot id is enough: containers change their names, and a
    reboot changes the boot id.
    """
    a, b = (dict(re.findall(r"(\w+)=(\S+)", text)) for text in (one, other))
    return any(a.get(field) and a.get(field) == b.get(field) for field in _HOST_FIELDS)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def newest_claim(blocks: Sequence[bytes], volume: bytes, shard: int) -> ClaimBlock | None:
    """Pick the claim in force from claim blocks of any members; None if all are empty or torn.

    The generation is the highest of all, so a clear that reached one member counts.
    """
    claims = []
    for block in blocks:
        try:
            claims.append(unpack_claim(block, volume, shard))
        except RecordError:
            continue
    if not claims:
        return None
    newest = max(claims, key=lambda c: (c.epoch, c.counter))
    return replace(newest, generation=max(c.generation for c in claims))


@dataclass(slots=True)
class ShardClaim:
    """Our claim on one shard; ``block`` is what the members hold."""

    block: ClaimBlock

    def next(self, *, generation: int | None = None, holder: str | None = None) -> ClaimBlock:
        """Return the block to write next."""
        changed = replace(self.block, counter=self.block.counter + 1)
        if generation is not None:
            changed = replace(changed, generation=generation)
        return changed if holder is None else replace(changed, holder=holder)


def take_claim(
    members: Sequence[Member],
    geometry: Geometry,
    volume: bytes,
    shard: int,
    *,
    unix_s: float,
    take_over: bool = False,
) -> ShardClaim:
    """Become the owner of a shard.

    Parameters
    ----------
    take_over : bool
        The operator's word that the owner on another host is dead.

    Raises
    ------
    ClaimError
        If a living process holds the shard, or another host never gave it back.
    OSError
        If a member cannot be read or written.
    """
    start = geometry.claim_offset(shard, 0)
    busy = next((m for m in members if not m.try_lock(start, 2 * CLAIM_BYTES)), None)
    # read under the lock: what was there before may have been the previous owner's last write
    seen = newest_claim(read_claims(members, geometry, shard), volume, shard)
    if busy is not None:
        holder = seen.holder if seen and seen.holder else "an unknown process"
        raise ClaimError(
            f"shard {shard} is in use ({busy.name}): {holder}. Stop that process first"
        )
    us = holder_text(unix_s)
    abandoned = seen is not None and bool(seen.holder) and not same_host(seen.holder, us)
    if seen is not None and abandoned and not take_over:
        raise ClaimError(
            f"shard {shard} is claimed by another host: {seen.holder}. If that host no longer "
            "uses it, run `fx100 take-over CONFIG`"
        )
    block = ClaimBlock(
        shard=shard,
        generation=seen.generation if seen else 1,
        epoch=next_epoch(seen.epoch if seen else -1, unix_s),
        counter=next_counter(seen.counter if seen else 0),
        holder=us,
    )
    for member in members:
        write_claim(member, geometry, volume, block)
    return ShardClaim(block)


def read_claims(members: Sequence[Member], geometry: Geometry, shard: int) -> list[bytes]:
    """Read both claim blocks of a shard from every member."""
    blocks = []
    with aligned_buffer(2 * CLAIM_BYTES) as view:
        for member in members:
            read_whole(member, geometry.claim_offset(shard, 0), view)
            blocks += [bytes(view[:CLAIM_BYTES]), bytes(view[CLAIM_BYTES:])]
    return blocks


def write_claim(member: Member, geometry: Geometry, volume: bytes, block: ClaimBlock) -> None:
    """Write a claim block to one member, over the older of the two."""
    with aligned_buffer(CLAIM_BYTES) as view:
        view[:] = block.pack(volume)
        offset = geometry.claim_offset(block.shard, block.counter % 2)
        if member.write_from(offset, view) != CLAIM_BYTES:
            raise OSError(f"{member.name}: short write of the claim area")
