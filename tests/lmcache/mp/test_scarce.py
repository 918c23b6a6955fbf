"""LMCache's evictor starts when anything runs out: blocks, or inodes."""

import random

import pytest
from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage
from lmcache.v1.distributed.storage_controllers.eviction_controller import (
    L2AdapterEvictionState,
    L2EvictionController,
)

from fx100_lmcache.lmcache.mp.usage import scarce_usage
from fx100_lmcache.testing.harness import Rig
from support.l2 import Client, adapter_on, key, keys, memory_obj, payload

WATERMARK = 0.9


def evictor(client: Client) -> L2EvictionController:
    """LMCache's own, whose passes are made by hand."""
    config = EvictionConfig("LRU", trigger_watermark=WATERMARK, eviction_ratio=0.05)
    return L2EvictionController([L2AdapterEvictionState(0, client.adapter, config)])


def stored_in_order(rig: Rig, client: Client, sizes: list[int], evict: bool) -> list[int]:
    """Store objects, with a look by the evictor after every few; return those that are there."""
    passes = evictor(client)
    for number, size in enumerate(sizes):
        stored = client.store([key(number)], [memory_obj(payload(number, size))])
        assert stored.is_successful(), number
        if evict and number % 5 == 0:
            client.settle()
            passes._check_and_evict(passes._adapter_states[0])
            usage = client.adapter.get_usage().usage_fraction
            inodes = rig.store.status()["inodes"]
            assert usage >= inodes["used"] / inodes["total"]
    client.settle()
    there = [n for n in range(len(sizes)) if client.has(key(n))]
    for number in there:
        assert client.get(key(number), memory_obj(sizes[number])) == payload(number, sizes[number])
    return there


@pytest.mark.parametrize("evict", [True, False], ids=["by LMCache", "by ourselves"])
def test_with_more_objects_than_inodes_the_oldest_go(evict: bool) -> None:
    """Everything acknowledged can be read or was evicted, in order, and that was counted."""
    rig = Rig.fresh(2, 1 << 20)  # one inode for 8 KiB, and a block has 4
    rng = random.Random(1)
    sizes = [2 * rng.randrange(50, 2048) for _ in range(700)]
    client = adapter_on(rig)
    there = stored_in_order(rig, client, sizes, evict)
    assert there == list(range(there[0], 700))
    counts = rig.store.counts()
    assert counts["removes"] + counts["evictions"] == there[0] > 400
    assert (counts["evictions"] == 0) == evict
    status = rig.store.status()
    assert status["limit"] == "inodes"
    assert status["used_share"] > 0.8
    assert status["blocks"]["free"] > 0.4 * status["blocks"]["total"]
    assert client.adapter.get_usage().usage_fraction == pytest.approx(
        status["used_share"], abs=0.01
    )
    rig.check_space()


def test_blocks_that_objects_fill_badly_count_as_used() -> None:
    """100 bytes take a block: the bytes of the objects alone would say 1 %."""
    rig = Rig.fresh(2, 1 << 20)
    client = adapter_on(rig)
    for one in keys(100):
        client.store([one], [memory_obj(payload(one, 100))])
    usage = client.adapter.get_usage()
    assert usage.total_bytes_used == 100 * 100
    assert usage.total_bytes_used / usage.total_capacity_bytes < 0.01
    assert usage.usage_fraction > 0.4


def test_bytes_stay_what_they_are() -> None:
    plain = AdapterUsage(50, 100, {"salt": 50})
    usage = scarce_usage(plain, 0.75)
    assert (usage.total_bytes_used, usage.total_capacity_bytes) == (50, 100)
    assert dict(usage.bytes_by_cache_salt) == {"salt": 50}
    assert usage.usage_fraction == 0.75
    assert scarce_usage(plain, 0.25).usage_fraction == 0.5
    assert scarce_usage(AdapterUsage(50, 0), 0.75).usage_fraction == -1.0
