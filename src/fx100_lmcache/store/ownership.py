"""Looks at the claims again before writing, and notices when they are lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fx100_lmcache.aligned import zero_buffer
from fx100_lmcache.claim import ShardClaim, newest_claim, read_claims, write_claim
from fx100_lmcache.engine.base import Job, Transfer
from fx100_lmcache.geometry import CLAIM_BYTES
from fx100_lmcache.members.base import Member
from fx100_lmcache.store.core import Core

log = logging.getLogger(__name__)


class Ownership:
    """Whether the shards are still ours.

    A process that was stopped for a while and replaced must not go on writing. So the claim
    blocks are read again (an ordinary job of the engine, 8 KiB) when the last look is older than
    ``claim_check_s``, on the clock that goes on while the machine sleeps. Writes already on
    their way can then only cause misses: every piece is verified when it is read.
    """

    def __init__(self, core: Core, claims: dict[int, ShardClaim]) -> None:
        self._core = core
        self._claims = claims
        self._looked_at = _boot_s()
        self._waiting: list[Callable[[bool], None]] = []
        self.lost = False
        self._buffer = zero_buffer(2 * CLAIM_BYTES * core.geometry.shards)

    def when_checked(self, go: Callable[[bool], None], *, look: bool = False) -> None:
        """Call ``go(ours)``: at once if the last look is recent, else after a new one.

        Parameters
        ----------
        look : bool
            Look in any case: for what would overwrite the claim of a new owner.
        """
        with self._core.lock:
            recent = _boot_s() - self._looked_at <= self._core.options.claim_check_s
            fresh = self.lost or (recent and not look)
            if not fresh:
                self._waiting.append(go)
                if len(self._waiting) > 1:
                    return  # a look is on its way
        if fresh:
            go(not self.lost)
        else:
            self._look()

    def _look(self) -> None:
        core = self._core
        down = core.engine.down_mask()
        members = range(len(core.geometry.members))
        member = next((m for m in members if not down >> m & 1), 0)
        offset = core.geometry.claim_offset(0, 0)
        transfer = Transfer(member, offset, self._buffer, 0, self._buffer.length)
        look_s = min(core.options.load_s, core.options.store_s)  # whole puts wait for it
        deadline = core.engine.now() + look_s
        core.engine.submit([Job(False, [transfer], deadline, self._looked)])

    def _looked(self, job: Job) -> None:
        core = self._core
        with core.lock:
            if job.ok:
                self._looked_at = _boot_s()
                self.lost = self.lost or not all(map(self._still_ours, self._claims))
                if self.lost:
                    log.error("our claim was taken over; nothing more is stored")
            # unreadable: these puts are dropped, but the claim is not known to be lost
            if any(t.in_kernel for t in job.transfers):
                self._buffer = zero_buffer(self._buffer.length)  # the kernel has the old one
            waiting, self._waiting = self._waiting, []
        for go in waiting:
            go(not self.lost and job.ok)

    def _still_ours(self, shard: int) -> bool:
        at = 2 * CLAIM_BYTES * shard
        view = self._buffer.view[at : at + 2 * CLAIM_BYTES]
        blocks = [bytes(view[:CLAIM_BYTES]), bytes(view[CLAIM_BYTES:])]
        seen = newest_claim(blocks, self._core.volume, shard)
        return seen is not None and seen.epoch == self._claims[shard].block.epoch

    def adopt(self, member: Member) -> bool:
        """Claim a member that has come back under another name; False if it is not ours any more.

        It may have missed a clear meanwhile, so our claim is written again. May block.

        Raises
        ------
        OSError
            If it cannot be read or written.
        """
        core = self._core
        for shard, claim in self._claims.items():
            if not member.try_lock(core.geometry.claim_offset(shard, 0), 2 * CLAIM_BYTES):
                log.error("%s: shard %d is in use by another process", member.name, shard)
                return False
            seen = newest_claim(read_claims([member], core.geometry, shard), core.volume, shard)
            if seen is not None and seen.epoch > claim.block.epoch:
                log.error("%s: shard %d was taken over by %s", member.name, shard, seen.holder)
                self.lost = True
                return False
            write_claim(member, core.geometry, core.volume, claim.block)
        return True

    def give_back(self) -> None:
        """Flush, and say on the members that nobody holds the shards any more. May block."""
        core = self._core
        try:
            core.engine.flush()
            if self.lost:
                return
            down = core.engine.down_mask()
            for claim in self._claims.values():
                claim.block = claim.next(holder="")
                for index in range(len(core.geometry.members)):
                    if not down >> index & 1:
                        write_claim(
                            core.engine.member(index), core.geometry, core.volume, claim.block
                        )
        except OSError as problem:
            log.warning("claims not given back: %s", problem)


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
