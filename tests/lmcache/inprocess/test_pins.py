"""Lookups, pins, and what may be removed or evicted."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from support.inprocess import (
    CHUNK_TOKENS,
    counts,
    free,
    holds,
    key,
    keys,
    pins,
    plugin_on,
    pool_bytes,
    put,
    wait_until,
    write_config,
)

# ----- lookups and pins


def test_lookups_find_the_prefix_and_pin_only_that(plugin: FX100StoragePlugin) -> None:
    put(plugin, [key(0), key(1), key(3)])
    assert plugin.batched_contains(keys(4), pin=True) == 2
    assert pins(plugin) == 2
    assert plugin.batched_contains(keys(4)) == 2
    assert plugin.contains(key(3))
    assert [plugin.unpin(k) for k in keys(2)] == [True, True]
    assert pins(plugin) == 0


def test_pins_are_counted_and_unknown_ones_are_refused(plugin: FX100StoragePlugin) -> None:
    put(plugin, [key(0)])
    assert plugin.pin(key(0))
    assert plugin.contains(key(0), pin=True)
    assert not plugin.pin(key(9))
    assert [plugin.unpin(key(0)) for _ in range(3)] == [True, True, False]
    assert plugin.unpin(key(9)) is False


def test_pins_of_an_asynchronous_lookup_end_with_its_load_and_only_once(
    plugin: FX100StoragePlugin,
) -> None:
    put(plugin, keys(3))

    async def load() -> Any:
        assert await plugin.batched_async_contains("request", keys(4), pin=True) == 3
        assert pins(plugin) == 3
        return await plugin.batched_get_non_blocking("request", keys(3))

    free(asyncio.run(load()))
    assert pins(plugin) == 0
    plugin.pin(key(0))  # somebody else's
    free(asyncio.run(plugin.batched_get_non_blocking("request", keys(3))))
    assert pins(plugin) == 1
    plugin.unpin(key(0))


def test_a_load_that_is_cancelled_frees_its_memory_and_pins(plugin: FX100StoragePlugin) -> None:
    put(plugin, keys(3))

    async def cancelled() -> None:
        await plugin.batched_async_contains("request", keys(3), pin=True)
        task = asyncio.create_task(plugin.batched_get_non_blocking("request", keys(3)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)
    assert pins(plugin) == 0


def test_what_a_lookup_promised_survives_eviction_until_it_is_unpinned(tmp_path: Path) -> None:
    with plugin_on(write_config(tmp_path, members=1, size="2MiB")) as plugin:
        promised = keys(10)
        put(plugin, promised)
        assert plugin.batched_contains(promised, pin=True) == 10
        for start in range(100, 500, 20):
            put(plugin, keys(20, start))
        assert counts(plugin)["evictions"] > 100
        found = plugin.batched_get_blocking(promised)
        assert all(holds(obj, n) for n, obj in enumerate(found))
        free(found)
        for k in promised:
            assert plugin.unpin(k)
        for start in range(500, 800, 20):
            put(plugin, keys(20, start))
        assert plugin.batched_contains(promised) == 0


def test_pins_that_nobody_gives_back_end_by_themselves(tmp_path: Path) -> None:
    config = write_config(tmp_path, members=1, size="2MiB", deadlines={"pin_ttl": "1s"})
    with plugin_on(config) as plugin:
        put(plugin, keys(4))
        assert plugin.batched_contains(keys(4), pin=True) == 4
        time.sleep(2.1)
        for start in range(100, 500, 20):
            put(plugin, keys(20, start))
        assert plugin.batched_contains(keys(4)) == 0


def test_the_tail_of_a_session_is_evicted_before_its_prefix(tmp_path: Path) -> None:
    with plugin_on(write_config(tmp_path, members=1, size="2MiB")) as plugin:
        session = keys(20)
        put(plugin, session)
        assert plugin.batched_contains(session) == 20
        start = 100
        while (left := plugin.batched_get_blocking(session))[-1] is not None:
            free(left)
            put(plugin, [key(start)])
            start += 1
        there = [obj is not None for obj in left]
        free(left)
        assert there == sorted(there, reverse=True)
        assert there[0]


# ----- removing


def test_remove_and_clear_return_what_lmcache_adds_up(plugin: FX100StoragePlugin) -> None:
    put(plugin, keys(6))
    assert plugin.remove(key(0)) is True
    assert plugin.remove(key(0)) is False
    assert plugin.batched_remove(keys(3)) == 2
    cleared = plugin.clear()
    assert cleared == 3 * CHUNK_TOKENS
    assert isinstance(cleared, int)
    assert plugin.clear() == 0
    assert plugin.batched_contains(keys(6, 3)) == 0


def test_a_forced_remove_drops_pins_and_another_respects_them(plugin: FX100StoragePlugin) -> None:
    put(plugin, [key(0)])
    plugin.pin(key(0))
    assert plugin.remove(key(0), force=False) is False
    assert plugin.remove(key(0), True) is True
    assert pins(plugin) == 0
