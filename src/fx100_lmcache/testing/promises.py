"""What must hold while several hosts use one volume, checked as it happens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.ondisk.claim_block import ClaimBlock
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES, round_up
from fx100_lmcache.store import LoadItem, LoadResult, StoreOptions
from fx100_lmcache.testing.harness import Rig, digest_of
from fx100_lmcache.testing.host import LENGTHS, NAMES, RATES, Process
from fx100_lmcache.volume import claim as rules
from fx100_lmcache.volume.claim import ClaimTiming, valid_claims

if TYPE_CHECKING:  # which imports this module
    from fx100_lmcache.testing.hosts import World

TIMING = ClaimTiming()
_OPENING_S = 3.0  # beyond watch and settling, for what an opener's own I/O may take


class Violation(AssertionError):  # noqa: N818 - a finding, not a fault of ours
    """A promise was broken; the message says by whom and how."""


class Promises:
    """Watches what processes do to one volume.

    Attributes
    ----------
    values : dict of str to set of bytes
        All that was ever put under a name.
    claim_writers : list of Process or None
        Who wrote claims, in order; None for a late write of a dead process.
    opening : set of Process
        Those that are about to become owners.
    owner : Process or None
        The last that became the owner.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.values: defaultdict[str, set[bytes]] = defaultdict(set)
        self.claim_writers: list[Process | None] = []
        self.opening: set[Process] = set()
        self.owner: Process | None = None
        self._renewed_at: dict[tuple[int, str], float] = {}
        self._stale_writers: set[object] = set()
        self._hidden = False  # the owner's claim, by two stale writes
        self._hidden_until = float("-inf")

    def broken(self, what: str) -> NoReturn:
        """End the schedule.

        Raises
        ------
        Violation
            Always; it is noted, too, in case somebody on the way keeps it.
        """
        problem = Violation(what)
        self._world.fail(problem)
        raise problem

    def claimed(self, process: Process | None, data: bytes) -> None:
        """Note a claim that has reached the media."""
        claims = valid_claims([data], self._world.volume, 0)
        if not claims:
            return
        claim = claims[0]
        self.claim_writers.append(process)
        if process is not None:
            self._check_replacing(process, claim)
            if claim.holder:
                if process.rank is None:
                    process.first_write = len(self.claim_writers)
                process.rank = claim.rank
        owner = self.owner
        if owner is not None and not claim.holder and claim.epoch == (owner.rank or (0, ""))[0]:
            owner.released = True
        if process is not None and (not process.opened or process.store.may_write):
            self._renewed_at[claim.rank] = self._world.now
        self._check_order(process, claim)

    def _check_replacing(self, process: Process, claim: ClaimBlock) -> None:
        """Refuse to see an owner replaced that renews its claim, unless an operator says so.

        An opener that is stopped between its look and its write may do so. It is not the owner then
        before it has watched for the whole time, and so not before the other has stopped. Nor is
        one that could not see the owner's claim: it has to settle, and the owner writes again.
        """
        owner = self.owner
        new = bool(claim.holder) and claim.rank != process.rank
        if new and process.by_word:
            self._overrule(process)
        if not new or owner is None or owner is process or owner.released:
            return
        if owner.boot_id == process.boot_id:
            if not owner.dead:
                self.broken(f"{process} claims the shard of {owner}, which lives")
            return
        assert owner.rank is not None
        still_s = self._world.now - self._renewed_at[owner.rank]
        slow = self._world.now - process.looked_at > rules.WRITE_WITHIN_S / RATES[1]
        unseen = self._hidden or process.looked_at <= self._hidden_until
        if (
            still_s < TIMING.watch_s / RATES[1] - 0.01
            and not owner.overruled
            and not unseen
            and not slow
            and not self._world.odds.clock_stops
        ):
            self.broken(f"{process} replaces {owner}, which renewed {still_s:.1f} s before")

    def _overrule(self, process: Process) -> None:
        for other in (self.owner, *(host.process for host in self._world.hosts)):
            if other is not None and other is not process:
                other.overruled = True

    def _check_order(self, process: Process | None, claim: ClaimBlock) -> None:
        """See that the owner's claim stays in force, whatever one stale host still writes.

        An opener that was stopped between its look and its write may hide it until the owner's next
        renewal: it writes both blocks, and watches them then. So may two stale writes.
        """
        owner = self.owner
        if owner is None or owner.rank is None or owner.released:
            return
        if claim.rank < owner.rank:
            self._stale_writers.add(process or object())
        there = [c.rank >= owner.rank for c in self._on_media()]
        if all(there) and len(there) == len(self._world.members) * len(self._world.halves):
            self._stale_writers.clear()
        visible = any(there)
        if visible and self._hidden:
            self._hidden_until = self._world.now
        self._hidden = not visible
        if (
            visible
            or len(self._stale_writers) > 1
            or not self._stale_writers.isdisjoint(self.opening)
        ):
            return
        self.broken(f"the claim of {owner} was destroyed by {process or 'a late write'}")

    def _on_media(self) -> list[ClaimBlock]:
        blocks = [
            bytes(m.media[at : at + CLAIM_BYTES])
            for m in self._world.members
            for at in self._world.halves
        ]
        return valid_claims(blocks, self._world.volume, 0)

    def _check_alone(self, process: Process) -> None:
        """Nobody else may write, unless an operator said so or a clock stood still."""
        if self._world.odds.clock_stops:
            return
        for host in self._world.hosts:
            other = host.process
            if other is None or other is process or not other.opened or other.dead:
                continue
            if other.store.may_write and not (process.overruled or other.overruled):
                self.broken(f"{process} and {other} may both write")

    def confirmed(self, process: Process) -> None:
        """Note a new owner."""
        if process.store.may_write:
            self._check_alone(process)
        self.owner = process
        assert process.rank is not None
        alive = {each.process.rank: each.process for each in self._world.hosts if each.process}
        older = {claim.rank for claim in self._on_media() if claim.rank < process.rank}
        self._stale_writers = {alive.get(rank, rank) for rank in older}  # they hid one half
        self._hidden = False

    def acknowledged(self, process: Process) -> None:
        """Note that a put was said to be stored."""
        self._world.counts["acknowledged"] += 1
        if process.knows:
            self.broken(f"{process} acknowledged a put after it had seen that it was replaced")
        self._check_alone(process)

    def check_opening(self, process: Process, took_s: float) -> None:
        """See that a claim that stands still is replaced within the stated time."""
        watch_s = TIMING.watch_s if process.opened == "watch" else 0.0
        if took_s > watch_s + _OPENING_S:
            self.broken(f"{process} took {took_s:.1f} s to open")

    def check_refused(self, process: Process) -> None:
        """Nobody is refused without a reason: nobody wrote, and no lock was held."""
        locked = any(p is not process for p in self._world.locks[process.boot_id].values())
        if not locked:
            self.broken(f"{process} was refused, although no claim changed")

    def check_turned_away(self, process: Process) -> None:
        """See that one late write of the dead does not cost an opener its claim."""
        since = self.claim_writers[process.first_write :]
        if process.rank is not None and since.count(None) == 1 and {*since} <= {None, process}:
            self.broken(f"{process} was turned away by a late write")

    def check_loads(self, process: Process, names: Sequence[str]) -> None:
        """See that a load gives what was once put under that name, or misses."""
        for name in names:
            buffer = zero_buffer(round_up(max(LENGTHS), 4096))
            item = LoadItem(digest_of(name), buffer, lambda _meta, _length: True)
            results: list[LoadResult] = []
            process.store.load([item], results.extend)
            if results and results[0].length:
                self._world.counts["loaded"] += 1
                if bytes(buffer.view[: results[0].length]) not in self.values[name]:
                    self.broken(f"{process} loaded wrong bytes for {name}")

    def check_what_is_left(self) -> None:
        """Whoever opens the volume afterwards finds it in order."""
        rig = Rig(self._world.members, StoreOptions(reserve_fraction=0.0), wall_s=2_000_000)
        rig.open(take_over=True)
        for _ in range(2):
            rig.check_space()
            for name in NAMES:
                found = rig.get(name)
                if found is not None and found not in self.values[name]:
                    self.broken(f"wrong bytes for {name} after all has ended")
            rig.check_space()
            if not rig.put("afterwards", b"x" * 5000).stored:
                self.broken("nothing can be stored after all has ended")
            rig.reopen()
