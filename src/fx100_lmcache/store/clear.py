"""Clear: forget everything by raising the shards' generation."""

from __future__ import annotations

import logging

from fx100_lmcache.ondisk.claim_block import MAX_GENERATION
from fx100_lmcache.store.erase import Eraser
from fx100_lmcache.store.ownership import Ownership
from fx100_lmcache.store.state import Core

log = logging.getLogger(__name__)

_AT_ONCE = 256  # entries forgotten without letting go of the lock, so that lookups go between


class Clearer:
    """Empties the store with one small write for each shard and member.

    The old inodes stay on the media but no longer count. Their space is used again only after
    the new generation was written; where that failed, each inode is erased instead.
    """

    def __init__(self, core: Core, ownership: Ownership, eraser: Eraser) -> None:
        self._core = core
        self._ownership = ownership
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
            if not last:
                for shard in core.generations:
                    core.generations[shard] += 1
            core.counts["clears"] += 1
        if last:  # only media that somebody made up say so: erase one by one
            self._raised(rows, everywhere=False)
        else:
            self._ownership.renew(lambda everywhere: self._raised(rows, everywhere=everywhere))
        return len(dropped)

    def _raised(self, rows: list[int], *, everywhere: bool) -> None:
        core = self._core
        if not everywhere:
            core.counts["erase_failures"] += 1
            log.error("clear: the new generation was not written everywhere; erasing one by one")
        for at in range(0, len(rows), _AT_ONCE):
            with core.lock:
                for row in rows[at : at + _AT_ONCE]:
                    if everywhere:
                        self._eraser.forget(row)
                    else:
                        self._eraser.erase_hidden(row)
