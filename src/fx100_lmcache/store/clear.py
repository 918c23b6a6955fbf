"""Clear: forget everything by raising the shards' generation."""

from __future__ import annotations

import logging

from fx100_lmcache.aligned import zero_buffer
from fx100_lmcache.claim import ShardClaim
from fx100_lmcache.engine.base import Job, Transfer
from fx100_lmcache.geometry import CLAIM_BYTES
from fx100_lmcache.ondisk.claim_block import MAX_GENERATION
from fx100_lmcache.store.core import Core
from fx100_lmcache.store.erase import Eraser

log = logging.getLogger(__name__)

_AT_ONCE = 256  # entries forgotten without letting go of the lock, so that lookups go between


class Clearer:
    """Empties the store with one small write for each shard and member.

    The old inodes stay on the media but no longer count. Their space is used again only after
    the new generation was written; where that failed, each inode is erased instead.
    """

    def __init__(self, core: Core, claims: dict[int, ShardClaim], eraser: Eraser) -> None:
        self._core = core
        self._claims = claims
        self._eraser = eraser

    def clear(self) -> int:
        """Hide all entries at once; free their space when the media say so."""
        core = self._core
        with core.lock:
            dropped = core.catalog.drop_all()
            for row, digest, blocks in dropped:
                self._eraser.hidden(row, digest, blocks)
            rows = [row for row, _, _ in dropped]
            last = max(core.generations.values()) >= MAX_GENERATION
            transfers = [
                transfer
                for shard, generation in core.generations.items()
                if not last  # only media that somebody made up say so: erase one by one
                for transfer in self._set_generation(shard, generation + 1)
            ]
            core.counts["clears"] += 1
        deadline = core.engine.now() + core.options.store_s
        core.engine.submit([Job(True, transfers, deadline, lambda job: self._raised(job, rows))])
        return len(dropped)

    def restore_generation(self, shard: int, generation: int) -> None:
        """Write a generation again whose claim block was lost in a power cut."""
        transfers = self._set_generation(shard, generation)
        deadline = self._core.engine.now() + self._core.options.store_s
        self._core.engine.submit([Job(True, transfers, deadline, _written_or_not)])

    def _set_generation(self, shard: int, generation: int) -> list[Transfer]:
        core = self._core
        claim = self._claims[shard]
        claim.block = claim.next(generation=generation)
        core.generations[shard] = generation
        buffer = zero_buffer(CLAIM_BYTES)
        buffer.view[:] = claim.block.pack(core.volume)
        offset = core.geometry.claim_offset(shard, claim.block.counter % 2)
        down = core.engine.down_mask()
        return [
            Transfer(member, offset, buffer, 0, CLAIM_BYTES)
            for member in range(len(core.geometry.members))
            if not down >> member & 1
        ]

    def _raised(self, job: Job, rows: list[int]) -> None:
        core = self._core
        raised = job.ok and len(job.transfers) > 0  # none, if every member is away
        if not raised:
            core.counts["erase_failures"] += 1
            log.error("clear: the new generation was not written everywhere; erasing one by one")
        for at in range(0, len(rows), _AT_ONCE):
            with core.lock:
                for row in rows[at : at + _AT_ONCE]:
                    if raised:
                        self._eraser.forget(row)
                    else:
                        self._eraser.erase_hidden(row)


def _written_or_not(_: Job) -> None:
    """Do nothing: the inodes of that generation say it too, so a failure loses nothing."""
