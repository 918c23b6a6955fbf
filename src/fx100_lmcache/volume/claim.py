"""Who owns a shard: the rules, and how claim blocks are read and written.

An owner *renews* its claim: every heartbeat it looks at the claim blocks, compares, and writes its
own again with the next counter. A claim that stands still for a watched time has no owner that
lives (:mod:`fx100_lmcache.volume.claiming`), because an owner that could not renew for a shorter
time, its *lease*, has stopped writing by itself (:mod:`fx100_lmcache.store.ownership`). Nobody
ever compares the clocks of two machines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from fx100_lmcache.buffers import aligned_buffer
from fx100_lmcache.errors import RecordError
from fx100_lmcache.members.base import Member, read_whole
from fx100_lmcache.ondisk.claim_block import ClaimBlock, unpack_claim, words_of
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES, Geometry
from fx100_lmcache.volume.machine import Machine

WRITE_WITHIN_S = 0.5
"""From an opener's last look to its last write; later, what it saw may be out of date."""

SETTLE_S = 1.0
"""From a claim's writing to the look that confirms it: longer than `WRITE_WITHIN_S` of anybody who
looked before, also on a clock that runs faster. The same on all hosts, so no setting."""


@dataclass(frozen=True, slots=True)
class ClaimTiming:
    """How an owner shows that it lives.

    Attributes
    ----------
    heartbeat_s : float
        From one renewal to the next.
    watch_s : float
        How long a claim must stand still before it is replaced. It is written into the claim: an
        opener watches for the longer of its own and the owner's.
    """

    heartbeat_s: float = 3.0
    watch_s: float = 15.0

    @property
    def lease_s(self) -> float:
        """How long after a renewal was begun the owner may still write: 0.6 of the watch."""
        return 0.6 * self.watch_s

    @property
    def renew_within_s(self) -> float:
        """How long a renewal may take to count: 0.2 of the watch.

        One that is begun at the very end of a lease is so on the media after 0.8 of the watch. The
        other 0.2 are for clocks that run at different rates.
        """
        return 0.2 * self.watch_s


def holder_text(
    machine: Machine, members: Sequence[Member], *, unix_s: float, watch_s: float
) -> str:
    """Say who we are, for the second opener; with a random number that tells two opens apart.

    The order matters: at most 256 bytes are kept. ``unconfirmed`` is left out once the claim has
    settled, see :func:`confirmed`.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
    fields = {
        **machine.words(),
        "since": started,
        "watch": f"{watch_s:g}",
        "nonce": machine.nonce(),
        "node": node_of(members[0]) if members else "",
        "unconfirmed": "1",
        "machine": machine.machine_id,
    }
    return " ".join(f"{name}={value}" for name, value in fields.items() if value)


def confirmed(holder: str) -> str:
    """Return a holder's text for a claim that has settled."""
    return holder.replace(" unconfirmed=1", "")


def node_of(member: Member) -> str:
    """Name the file or device node that a member's kernel locks are on; empty if there is none.

    Locks on a block device belong to its *node*: a container with nodes of its own sees no lock
    of another container.
    """
    fd = member.fileno()
    if fd is None:
        return ""
    found = os.fstat(fd)
    return f"{found.st_dev:x}.{found.st_ino:x}"


def same_kernel(holder: str, machine: Machine) -> bool:
    """Whether the process that a holder's text names runs, or ran, under our kernel."""
    return bool(machine.boot_id) and words_of(holder).get("boot") == machine.boot_id


def decided_by_locks(claim: ClaimBlock, machine: Machine, members: Iterable[Member]) -> bool:
    """Whether the kernel locks that we see tell if the owner of this claim lives.

    That is so if it was made under our kernel (equal boot id), and its locks are on a node that we
    have open too. Then whoever gets the locks knows that the owner is dead. A claim that never
    settled may hide that of an owner elsewhere: it is no proof.
    """
    words = claim.words
    here = "node" not in words or words["node"] in map(node_of, members)
    return same_kernel(claim.holder, machine) and here and "unconfirmed" not in words


def watch_of(claim: ClaimBlock, timing: ClaimTiming) -> float:
    """Return how long a claim must stand still before it may be replaced, in seconds."""
    try:
        said = float(claim.words.get("watch", 0))
    except ValueError:
        said = 0.0
    return max(timing.watch_s, said if said <= 3600 else 0.0)


def newest_claim(blocks: Iterable[bytes], volume: bytes, shard: int) -> ClaimBlock | None:
    """Pick the claim in force from claim blocks of any members; None if all are empty or torn.

    The generation is the highest of all, so a clear that reached one member counts.
    """
    claims = valid_claims(blocks, volume, shard)
    if not claims:
        return None
    newest = max(claims, key=lambda c: (c.epoch, c.counter))
    return replace(newest, generation=max(c.generation for c in claims))


def valid_claims(blocks: Iterable[bytes], volume: bytes, shard: int) -> list[ClaimBlock]:
    """Decode claim blocks; those that are empty or torn are left out."""
    claims = []
    for block in blocks:
        try:
            claims.append(unpack_claim(block, volume, shard))
        except RecordError:
            continue
    return claims


def rival_of(ours: ClaimBlock, seen: Collection[ClaimBlock]) -> ClaimBlock | None:
    """Return the claim that ours has lost against, if there is one.

    A higher epoch wins. Two openers that did not see each other may have the same one; then the
    random number decides, for both in the same way.
    """
    best = max(seen, key=lambda claim: claim.rank, default=None)
    return best if best is not None and best.rank > ours.rank else None


def is_there(ours: ClaimBlock, seen: Collection[ClaimBlock]) -> bool:
    """Whether a claim of this open of ours is on the media."""
    return any(claim.rank == ours.rank for claim in seen)


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
