"""What is stored, in memory: digest -> entry, pins, readers in flight, eviction order."""

from fx100_lmcache.catalog.catalog import Catalog, Entry

__all__ = ["Catalog", "Entry"]
