"""What is scarce: blocks or inodes. Pure.

A volume is full when either has run out, so whoever looks at how full it is has to look at both.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stock:
    """One kind of what objects take.

    Attributes
    ----------
    total : int
        All that can be given out.
    free : int
        What nobody has.
    """

    total: int
    free: int

    @property
    def used(self) -> int:
        """What is taken."""
        return self.total - self.free

    def after(self, coming: int) -> Stock:
        """Return the stock when so much more of it is free."""
        return Stock(self.total, min(self.total, self.free + coming))

    def reserve(self, fraction: float) -> int:
        """Return how much of it is kept free."""
        return int(self.total * fraction)

    def used_share(self, reserve_fraction: float) -> float:
        """Return the share in use of what is not kept free: 0 to 1."""
        usable = self.total - self.reserve(reserve_fraction)
        return min(1.0, self.used / usable) if usable > 0 else 1.0

    def to_evict(self, reserve_fraction: float, coming: int, batch_fraction: float) -> int:
        """Return how much to evict, so that the reserve is free again; 0 if it is.

        Parameters
        ----------
        coming : int
            What is on its way out, and will be free.
        batch_fraction : float
            Least share in one go, so that rounds are few.
        """
        missing = self.reserve(reserve_fraction) - self.free - coming
        return max(missing, int(self.total * batch_fraction)) if missing > 0 else 0


@dataclass(frozen=True, slots=True)
class Stocks:
    """Both kinds."""

    blocks: Stock
    inodes: Stock

    def used_share(self, reserve_fraction: float) -> float:
        """Return the larger of the shares in use: at 1 something has to go."""
        return max(
            self.blocks.used_share(reserve_fraction), self.inodes.used_share(reserve_fraction)
        )

    @property
    def limit(self) -> str:
        """What runs out first: ``blocks`` or ``inodes``."""
        blocks, inodes = self.blocks.used_share(0.0), self.inodes.used_share(0.0)
        return "inodes" if inodes > blocks else "blocks"
