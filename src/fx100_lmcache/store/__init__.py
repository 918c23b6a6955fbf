"""The store: put, load, look up and remove objects by digest. Knows nothing of LMCache."""

from fx100_lmcache.store.core import StoreOptions
from fx100_lmcache.store.items import LoadItem, LoadResult, PutItem, PutResult
from fx100_lmcache.store.store import Store

__all__ = [
    "LoadItem",
    "LoadResult",
    "PutItem",
    "PutResult",
    "Store",
    "StoreOptions",
]
