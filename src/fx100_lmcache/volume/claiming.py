"""Become the owner of shards: lock, look, watch what may live, write, and let it settle.

There is no way to compare and write in one step on a device that several hosts share. So an opener
writes soon after its last look or not at all, and what it wrote counts only when it is still there
after a time in which everybody who had looked before must have written, too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fx100_lmcache.errors import ClaimError
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.claim_block import ClaimBlock, next_counter, next_epoch
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES, Geometry
from fx100_lmcache.volume import claim as rules
from fx100_lmcache.volume.claim import (
    ClaimTiming,
    decided_by_locks,
    holder_text,
    newest_claim,
    read_claims,
    valid_claims,
    watch_of,
    write_claim,
)
from fx100_lmcache.volume.machine import Machine

log = logging.getLogger(__name__)

_ATTEMPTS = 4  # at a claim that somebody else changes, or on members that are slow
_LONGEST_STEP_S = 1.0  # between two looks of a watch

Blocks = dict[int, list[bytes]]
"""Both claim blocks of every member, by shard."""


@dataclass(slots=True)
class Taken:
    """Claims that were written, and are to be confirmed by a look after `claim.SETTLE_S`.

    Attributes
    ----------
    claims : dict of int to ClaimBlock
        By shard.
    written_at : float
        When the last of them was on the media, on the machine's clock.
    watched, by_word : list of str
        Holders that were replaced: since they stood still, or on the operator's word.
    """

    claims: dict[int, ClaimBlock]
    written_at: float
    watched: list[str] = field(default_factory=list)
    by_word: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Claimer:
    """Opens shards of a volume.

    Parameters
    ----------
    take_over : bool
        The operator's word that owners whom we cannot judge by kernel locks are dead.
    """

    members: Sequence[Member]
    geometry: Geometry
    volume: bytes
    machine: Machine
    timing: ClaimTiming
    take_over: bool = False
    _ours: set[str] = field(default_factory=set)

    def take(self, shards: Sequence[int], unix_s: float) -> Taken:
        """Become the owner of shards.

        Blocks for the watched time if one of them is claimed by somebody whom our kernel's locks
        say nothing about.

        Raises
        ------
        ClaimError
            If a living process holds a shard, or may do so; nothing was written then. Also if
            others write claims at the same time, or the members are too slow to tell.
        OSError
            If a member cannot be read or written.
        """
        for shard in shards:
            self._lock(shard)
        replaced: dict[int, str] = {}
        slow: set[int] = set()
        for _ in range(_ATTEMPTS):
            seen = self._read(shards)
            foreign = self._foreign(seen)
            watched = {} if self.take_over else dict(foreign)
            watched |= {shard: self._newest(shard, seen) for shard in slow}
            if not self._stand_still(seen, watched):
                continue
            replaced |= {s: c.holder for s, c in foreign.items() if c.holder not in self._ours}
            claims, late = self._claim_all(seen, unix_s)
            slow |= late
            if not late and len(claims) == len(seen):
                holders = list(dict.fromkeys(replaced.values()))
                taken = Taken(claims, self.machine.clock())
                (taken.by_word if self.take_over else taken.watched).extend(holders)
                return taken
        raise ClaimError(
            f"shards {', '.join(map(str, shards))} could not be claimed in {_ATTEMPTS} attempts: "
            "other hosts write claims too, or the members are slow",
            remedy="fx100 status CONFIG --watch 20, which shows who does",
        )

    def _lock(self, shard: int) -> None:
        start = self.geometry.claim_offset(shard, 0)
        busy = next((m for m in self.members if not m.try_lock(start, 2 * CLAIM_BYTES)), None)
        if busy is None:
            return
        seen = newest_claim(read_claims(self.members, self.geometry, shard), self.volume, shard)
        holder = seen.holder if seen and seen.holder else "an unknown process"
        raise ClaimError(
            f"shard {shard} is in use ({busy.name}): {holder}", remedy="stop that process first"
        )

    def _read(self, shards: Sequence[int]) -> Blocks:
        # always under the locks: what was there before may have been the last owner's last write
        return {shard: read_claims(self.members, self.geometry, shard) for shard in shards}

    def _newest(self, shard: int, seen: Blocks) -> ClaimBlock:
        found = newest_claim(seen[shard], self.volume, shard)
        return found or ClaimBlock(shard, 1, 0, 0, "")

    def _foreign(self, seen: Blocks) -> dict[int, ClaimBlock]:
        """Return the claims of owners who may live although we have the locks."""
        newest = {shard: self._newest(shard, seen) for shard in seen}
        return {
            shard: claim
            for shard, claim in newest.items()
            if claim.holder and not decided_by_locks(claim, self.machine, self.members)
        }

    def _stand_still(self, seen: Blocks, watched: dict[int, ClaimBlock]) -> bool:
        """Watch claims for as long as it takes; False if one was given back meanwhile.

        Raises
        ------
        ClaimError
            If one is renewed, or can only be judged by an operator.
        """
        if not watched:
            return True
        for shard, claim in watched.items():
            if claim.holder and not claim.renewed:
                raise ClaimError(
                    f"shard {shard} is claimed by another host: {claim.holder}. It was claimed by "
                    "an older version, which does not show whether it lives",
                    remedy="if that host no longer uses it: fx100 take-over CONFIG",
                )
        watch_s = max(watch_of(claim, self.timing) for claim in watched.values())
        holders = ", ".join(dict.fromkeys(c.holder or "nobody" for c in watched.values()))
        names = ", ".join(map(str, watched))
        log.warning(
            "shard %s is claimed by another host: %s. Waiting %g s to see whether that host "
            "renews it",
            names,
            holders,
            watch_s,
        )
        clock = self.machine.clock
        began, step_s = clock(), min(_LONGEST_STEP_S, self.timing.heartbeat_s / 2)
        while (left_s := began + watch_s - clock()) > 0:
            self.machine.sleep(min(step_s, left_s))
            if not self._unchanged(seen, watched):
                return False
        log.warning(
            "shard %s: the claim of %s stood still for %.1f s and is replaced",
            names,
            holders,
            clock() - began,
        )
        return True

    def _unchanged(self, seen: Blocks, watched: dict[int, ClaimBlock]) -> bool:
        """Whether claims are what they were; False if one was given back."""
        for shard, before in watched.items():
            blocks = read_claims(self.members, self.geometry, shard)
            if blocks == seen[shard]:
                continue
            now = newest_claim(blocks, self.volume, shard)
            if now is not None and not now.holder:
                return False
            fresh = [new for new, old in zip(blocks, seen[shard], strict=True) if new != old]
            alive = valid_claims(fresh, self.volume, shard) or [before]
            raise ClaimError(
                f"shard {shard} is claimed by another host, which renews its claim: "
                f"{max(alive, key=lambda c: c.rank).holder}. A shard has one owner",
                remedy="stop the server there, or give this one a volume of its own",
            )
        return True

    def _claim_all(self, seen: Blocks, unix_s: float) -> tuple[dict[int, ClaimBlock], set[int]]:
        """Claim shards one after the other, each at once after a look.

        Returns
        -------
        claims : dict of int to ClaimBlock
            Those written. It ends with the first shard that is not as it was seen.
        slow : set of int
            Shards of which others may have become owners between our look and our write. These
            are to be watched: such an owner writes its claim again, or notices ours and stops.
        """
        holder = holder_text(self.machine, self.members, unix_s=unix_s, watch_s=self.timing.watch_s)
        self._ours.add(holder)
        claims: dict[int, ClaimBlock] = {}
        slow = set()
        clock = self.machine.clock
        for shard, blocks in seen.items():
            began = clock()
            if read_claims(self.members, self.geometry, shard) != blocks:
                break  # somebody was faster: judge anew
            last = newest_claim(blocks, self.volume, shard)
            first = ClaimBlock(
                shard=shard,
                generation=last.generation if last else 1,
                epoch=next_epoch(last.epoch if last else -1, unix_s),
                counter=next_counter(last.counter if last else 0),
                holder=holder,
            )
            claims[shard] = self._write_both(first)
            took_s = clock() - began
            if took_s > rules.WRITE_WITHIN_S:
                log.warning("shard %d: the claim took %.1f s to write", shard, took_s)
                slow.add(shard)
        return claims, slow

    def _write_both(self, first: ClaimBlock) -> ClaimBlock:
        """Write both blocks of a shard: a late write of the last owner destroys one at most."""
        second = replace(first, counter=first.counter + 1)
        for block in (first, second):
            for member in self.members:
                write_claim(member, self.geometry, self.volume, block)
        return second
