"""Names of LMCache's multiprocess mode, 0.5.4 to 0.5.7, and what the adapter relies on there."""

from __future__ import annotations

from typing import Any

from fx100_lmcache.lmcache.compat.contract import Contract
from fx100_lmcache.lmcache.compat.release import imports_of
from fx100_lmcache.lmcache.versions import LMCACHE

with imports_of(LMCACHE):
    from lmcache.lmcache_native import Bitmap  # 0.5.4 on; native_storage_ops before
    from lmcache.v1.distributed import api
    from lmcache.v1.distributed.api import (
        KeyEntry,
        KeyListPage,
        MemoryLayoutDesc,
        ObjectKey,
    )
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier

__all__ = [
    "ADAPTER_CONTRACT",
    "AdapterUsage",
    "Bitmap",
    "KeyEntry",
    "KeyListPage",
    "L1MemoryDesc",
    "L2AdapterInterface",
    "L2AdapterListener",
    "L2StoreResult",
    "MemoryLayoutDesc",
    "ObjectKey",
    "create_event_notifier",
    "memory_tags",
]


def memory_tags(*, remote: bool) -> Any:
    """Say where the bytes lie, as LMCache asks from 0.5.7 on; None before.

    Parameters
    ----------
    remote : bool
        Off this host, or shared with other hosts.

    Returns
    -------
    MemoryTags or None
    """
    if not hasattr(api, "MemoryTags"):  # 0.5.4 to 0.5.6
        return None
    residency = api.MemoryResidency.REMOTE if remote else api.MemoryResidency.LOCAL
    return api.MemoryTags(api.MemorySegment.STORAGE, residency)


ADAPTER_CONTRACT = Contract(
    LMCACHE,
    base=L2AdapterInterface,
    # submit_lookup_and_lock_task: (keys, group_layout_descs) from 0.5.3 on, one layout_desc before
    calls=(
        (L2AdapterInterface.__init__, ("max_capacity_bytes",)),
        (L2AdapterInterface._notify_keys_stored, ("keys", "sizes")),
        (L2AdapterInterface._notify_keys_accessed, ("keys",)),
        (L2AdapterInterface._notify_keys_deleted, ("keys", "sizes")),
        (L2AdapterListener.on_l2_keys_stored, ("keys", "sizes")),
        (L2AdapterListener.on_l2_keys_accessed, ("keys",)),
        (L2AdapterListener.on_l2_keys_deleted, ("keys",)),
        (AdapterUsage, ("total_bytes_used", "total_capacity_bytes", "bytes_by_cache_salt")),
        (KeyEntry, ("key", "size_bytes")),
        (KeyListPage, ("entries", "next_page_token")),
        (MemoryLayoutDesc, ("shapes", "dtypes")),
        (
            ObjectKey,
            ("chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"),
        ),
    ),
    members=(
        (AdapterUsage, ("usage_fraction",)),
        (Bitmap, ("set", "batched_set")),
        (ObjectKey, ("to_encoded_object_key",)),
    ),
    # of an instance: what the constructor leaves behind
    attributes=("_total_bytes_used", "_bytes_by_cache_salt"),
)
