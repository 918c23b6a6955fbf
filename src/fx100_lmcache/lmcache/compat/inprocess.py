"""Names of LMCache inside vLLM, 0.5.0 to 0.5.7, and what the plugin relies on there."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from fx100_lmcache.lmcache.compat.contract import Contract
from fx100_lmcache.lmcache.compat.release import imports_of
from fx100_lmcache.lmcache.versions import LMCACHE_INPROCESS

with imports_of(LMCACHE_INPROCESS):
    from lmcache.logging import init_logger
    from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
    from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

    MOVED = find_spec("lmcache.inprocess") is not None
    """Whether this mode lives in a package of its own: 0.5.7 on."""

    HOME = "lmcache.inprocess.v1" if MOVED else "lmcache.v1"
    """Where the engine and what only it uses lie."""

    _token_database = importlib.import_module(f"{HOME}.token_database")

__all__ = [
    "HOME",
    "MOVED",
    "PLUGIN_CONTRACT",
    "CacheEngineKey",
    "LayerCacheEngineKey",
    "StoragePluginInterface",
    "init_logger",
    "root_hash",
]


def root_hash() -> int:
    """Return what LMCache's chains of chunk hashes start from, in this process."""
    return int(_token_database.NONE_HASH)


PLUGIN_CONTRACT = Contract(
    LMCACHE_INPROCESS,
    base=StoragePluginInterface,
    calls=(
        (
            StoragePluginInterface.__init__,
            ("dst_device", "config", "metadata", "local_cpu_backend", "loop"),
        ),
        (
            CacheEngineKey,
            ("model_name", "world_size", "worker_id", "chunk_hash", "dtype", "request_configs"),
        ),
    ),
    members=((_token_database, ("NONE_HASH",)),),
    attributes=(),
)
