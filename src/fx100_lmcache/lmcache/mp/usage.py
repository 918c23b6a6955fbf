"""Usage as LMCache's evictor should see it."""

from __future__ import annotations

from dataclasses import dataclass

from fx100_lmcache.lmcache.compat.mp import AdapterUsage


@dataclass(frozen=True)
class ScarceUsage(AdapterUsage):  # type: ignore[misc]
    """Bytes as they are, and a fraction that counts what else runs out.

    LMCache compares ``usage_fraction`` with its watermark. Bytes of objects alone do not tell how
    full a volume is: objects take whole blocks, and an inode each.

    Attributes
    ----------
    used_share : float
        The larger of the shares of blocks and of inodes in use.
    """

    used_share: float = 0.0

    @property
    def usage_fraction(self) -> float:
        """Usage from 0 to 1, by what is scarce; -1 where there is no capacity."""
        by_bytes: float = super().usage_fraction
        return by_bytes if by_bytes < 0 else max(by_bytes, self.used_share)


def scarce_usage(usage: AdapterUsage, used_share: float) -> ScarceUsage:
    """Add the share in use of what is scarce to a usage in bytes."""
    return ScarceUsage(
        usage.total_bytes_used,
        usage.total_capacity_bytes,
        usage.bytes_by_cache_salt,
        used_share=used_share,
    )
