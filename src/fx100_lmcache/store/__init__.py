"""The store: put, load, look up and remove objects by digest. Knows nothing of LMCache."""

from fx100_lmcache.store.state import StoreOptions
from fx100_lmcache.store.store import Store
from fx100_lmcache.store.types import LoadItem, LoadResult, PutItem, PutResult

__all__ = [
    "LoadItem",
    "LoadResult",
    "PutItem",
    "PutResult",
    "Store",
    "StoreOptions",
]
