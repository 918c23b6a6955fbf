"""Memory objects of LMCache: alike in 0.5.0 to 0.5.7."""

from __future__ import annotations

from fx100_lmcache.lmcache.compat.release import imports_of
from fx100_lmcache.lmcache.versions import LMCACHE_INPROCESS

with imports_of(LMCACHE_INPROCESS):
    from lmcache.v1.memory_management import MemoryFormat, MemoryObj

__all__ = ["MemoryFormat", "MemoryObj"]
