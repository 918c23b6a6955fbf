"""The books of a store's data blocks: what each is used for. Pure.

Space itself says which blocks are free; this says why the others are not. Every extent is known by
its row (its inode's slot) and goes through these states:

.. code-block:: text

    free -> reserved -> live -> erasing -> free
               |                   |----> reading -> free     (its last reader ends)
               |-> quarantined <---|
               |-> erasing, free   |<---- quarantined         (the kernel lets go, or a retry)
"""

from __future__ import annotations

import enum


class Use(enum.IntEnum):
    """What an extent is used for."""

    FREE = 0
    """Nothing, as far as the ledger knows."""
    RESERVED = 1
    """By a put in flight."""
    LIVE = 2
    """By an entry that can be found. Extents in this state are only counted."""
    ERASING = 3
    """By an inode that is on its way out."""
    READING = 4
    """By readers of an entry whose inode is erased already."""
    QUARANTINED = 5
    """Nobody knows: the kernel may still write there, or the inode could not be erased."""


class BlockLedger:
    """Counts blocks by use. Not thread-safe: the store holds its lock.

    Parameters
    ----------
    total_blocks : int
        All data blocks of the store.

    Attributes
    ----------
    erases_begun, erases_ended : int
        Extents that have become, and are no more, :attr:`Use.ERASING`.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self.erases_begun = 0
        self.erases_ended = 0
        self._count = [0] * len(Use)
        self._count[Use.FREE] = total_blocks
        self._uses: dict[int, tuple[Use, int]] = {}  # of rows that are neither free nor live

    @property
    def free_blocks(self) -> int:
        """Blocks that are used for nothing."""
        return self._count[Use.FREE]

    @property
    def erasing_blocks(self) -> int:
        """Blocks that are free as soon as an erase in flight has ended well."""
        return self._count[Use.ERASING]

    @property
    def quarantined_blocks(self) -> int:
        """Blocks that must not be touched for now."""
        return self._count[Use.QUARANTINED]

    @property
    def reading_blocks(self) -> int:
        """Blocks of erased entries that still have readers."""
        return self._count[Use.READING]

    @property
    def used_blocks(self) -> int:
        """Blocks that are neither free nor quarantined."""
        return self.total_blocks - self.free_blocks - self.quarantined_blocks

    @property
    def erases_in_flight(self) -> int:
        """Extents that are being erased."""
        return self.erases_begun - self.erases_ended

    def use(self, row: int) -> Use:
        """Say what a row that is not live is used for."""
        return self._uses.get(row, (Use.FREE, 0))[0]

    def recover(self, blocks: int) -> None:
        """Count blocks of entries that were found on the media."""
        self._count[Use.FREE] -= blocks
        self._count[Use.LIVE] += blocks

    def reserve(self, row: int, blocks: int) -> None:
        """Count an extent as that of a put in flight."""
        assert row not in self._uses, "its slot is in use"
        self._set(row, blocks, Use.FREE, Use.RESERVED)

    def publish(self, row: int) -> None:
        """Count a put in flight as a live entry."""
        self._move(row, Use.LIVE, Use.RESERVED)

    def retire(self, row: int, blocks: int) -> None:
        """Count a live entry as being erased."""
        assert row not in self._uses, "it was not live"
        self._set(row, blocks, Use.LIVE, Use.ERASING)

    def erase_stale(self, row: int) -> None:
        """Count an inode that was never an entry, and has no blocks, as being erased."""
        self._set(row, 0, Use.FREE, Use.ERASING)

    def erase(self, row: int) -> None:
        """Count what a put gave up, or what could not be erased before, as being erased."""
        self._move(row, Use.ERASING, Use.RESERVED, Use.QUARANTINED)

    def keep_for_readers(self, row: int) -> None:
        """Count an erased entry as being read."""
        self._move(row, Use.READING, Use.ERASING, Use.QUARANTINED)

    def quarantine(self, row: int) -> None:
        """Count an extent as not to be touched."""
        self._move(row, Use.QUARANTINED, Use.RESERVED, Use.ERASING)

    def free(self, row: int) -> None:
        """Count an extent as free."""
        in_use = (Use.RESERVED, Use.ERASING, Use.READING, Use.QUARANTINED)
        self._move(row, Use.FREE, *in_use)

    def check(self, free_blocks: int, entry_blocks: int) -> None:
        """Assert that every block is accounted for, once.

        Parameters
        ----------
        free_blocks : int
            What the allocators count as free.
        entry_blocks : int
            Blocks of the catalog's entries, hidden ones included.
        """
        rows = [0] * len(Use)
        for use, blocks in self._uses.values():
            rows[use] += blocks
        rows[Use.FREE] = free_blocks
        rows[Use.LIVE] = self._count[Use.LIVE]
        balanced = rows == self._count and sum(self._count) == self.total_blocks
        least = self._count[Use.LIVE] + self._count[Use.READING]
        plausible = least <= entry_blocks <= self.total_blocks - free_blocks
        sound = balanced and plausible and min(rows) >= 0
        assert sound, (self._count, rows, entry_blocks)

    def _move(self, row: int, new: Use, *expected: Use) -> None:
        old, blocks = self._uses.get(row, (Use.FREE, 0))
        assert old in expected, f"row {row} is {old.name}, and cannot become {new.name}"
        self._set(row, blocks, old, new)

    def _set(self, row: int, blocks: int, old: Use, new: Use) -> None:
        self._count[old] -= blocks
        self._count[new] += blocks
        self.erases_ended += old is Use.ERASING
        self.erases_begun += new is Use.ERASING
        if new is Use.FREE or new is Use.LIVE:
            del self._uses[row]
        else:
            self._uses[row] = (new, blocks)
