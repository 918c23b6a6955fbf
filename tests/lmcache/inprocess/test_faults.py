"""Full pools, full queues, errors, devices that hang, and close in the middle of it."""

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lmcache.v1.memory_management import MemoryFormat

from fx100_lmcache.lmcache.inprocess.forward_pass import LayerLoadError
from fx100_lmcache.testing.memory import Fault
from support.inprocess import (
    CHUNK_BYTES,
    LAYER_SHAPE,
    LAYERS,
    counts,
    free,
    holds,
    key,
    keys,
    metadata,
    mount_on,
    new_obj,
    pins,
    plugin_on,
    pool_bytes,
    put,
    settle,
    stand_in_for_mount,
    wait_until,
    wild_members,
    write_config,
)

SHORT = {"load": "300ms", "store": "300ms", "close": "500ms"}


@pytest.fixture
def members() -> Any:
    return wild_members(2, 8 << 20)


@pytest.fixture
def config(tmp_path: Path, members: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration whose volume is in memory, with short deadlines."""
    path = write_config(tmp_path, deadlines=SHORT)
    stand_in_for_mount(monkeypatch, mount_on(members))
    return path


def hold_io(members: Any) -> None:
    for member in members:
        member.gate.clear()


def calm(members: Any) -> None:
    for member in members:
        member.faults.clear()
        member.calm()


# ----- host memory


def test_a_batch_larger_than_the_pool_is_served_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write_config(tmp_path, size="16MiB")
    with plugin_on(path) as plugin:
        for start in range(0, 118, 59):
            put(plugin, keys(59, start))
    with plugin_on(path, max_local_cpu_size=2 * CHUNK_BYTES / 2**30) as plugin:
        found = plugin.batched_get_blocking(keys(118))
        assert len(found) == 118
        assert [obj is not None for obj in found] == [True] * 2 + [False] * 116
        assert holds(found[1], 1)
        free(found)
        found = asyncio.run(plugin.batched_get_non_blocking("a", keys(118)))
        assert len(found) == 2
        free(found)
        assert counts(plugin)["load_no_memory"] == 2 * 116
        assert pool_bytes(plugin.local_cpu_backend) == 0


def test_one_layer_is_not_served_in_part(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    kind = {"shape": LAYER_SHAPE, "fmt": MemoryFormat.KV_T2D}
    layer = [one.split_layers(LAYERS)[0] for one in keys(8)]
    with plugin_on(path, use_layerwise=True) as plugin:
        put(plugin, layer, **kind)
    two = 2 * CHUNK_BYTES / LAYERS / 2**30
    with plugin_on(path, use_layerwise=True, max_local_cpu_size=two) as plugin:
        with pytest.raises(LayerLoadError):
            asyncio.run(plugin.batched_get_non_blocking("fake_lookup_id", layer))
        assert pool_bytes(plugin.local_cpu_backend) == 0


@pytest.mark.parametrize("nth", range(1, 21))
def test_memory_that_ends_anywhere_leaves_nothing_behind(
    config: Path, monkeypatch: pytest.MonkeyPatch, nth: Any
) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(20))
        calls = iter(range(1, 1000))
        real = plugin.local_cpu_backend.allocate

        def short(*args: Any, **kwargs: Any) -> Any:
            assert kwargs["busy_loop"] is False
            return None if next(calls) == nth else real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(plugin.local_cpu_backend, "allocate", short)
            found = plugin.batched_get_blocking(keys(20))
        assert [obj is not None for obj in found] == [True] * (nth - 1) + [False] * (21 - nth)
        free(found)
        assert pool_bytes(plugin.local_cpu_backend) == 0
        other = threading.Thread(target=put, args=(plugin, keys(1, 50)))
        other.start()
        other.join(10)
        assert not other.is_alive()
        assert plugin.contains(key(50))


def test_an_allocator_that_raises_is_a_miss(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(2))

        def broken(*_args: Any, **_kwargs: Any) -> None:
            raise ValueError("a bug of LMCache")

        monkeypatch.setattr(plugin.local_cpu_backend, "allocate", broken)
        assert plugin.batched_get_blocking(keys(2)) == [None, None]
        assert asyncio.run(plugin.batched_get_non_blocking("a", keys(2))) == []
    assert "a bug of LMCache" in caplog.text


def test_a_load_waits_for_memory_that_puts_are_about_to_give_back(
    config: Path, members: Any
) -> None:
    four = 4 * CHUNK_BYTES / 2**30
    with plugin_on(config, max_local_cpu_size=four) as plugin:
        put(plugin, keys(2))
        put(plugin, keys(2, 2))
        objs = [new_obj(plugin.local_cpu_backend, n) for n in (10, 11)]
        hold_io(members)
        plugin.batched_submit_put_task(keys(2, 10), objs)
        free(objs)
        wait_until(lambda: sum(m.held for m in members) > 0)
        threading.Timer(0.05, calm, [members]).start()
        found = plugin.batched_get_blocking(keys(4))
        assert [obj is not None for obj in found] == [True] * 4
        free(found)


# ----- the queue of puts


def test_a_full_queue_drops_and_counts_and_never_waits(config: Path, members: Any) -> None:
    pool = 16 * CHUNK_BYTES / 2**30  # puts may hold half of it
    with plugin_on(config, max_local_cpu_size=pool) as plugin:
        hold_io(members)
        objs = [new_obj(plugin.local_cpu_backend, n) for n in range(12)]
        plugin.batched_submit_put_task(keys(12), objs)
        assert [obj.get_ref_count() for obj in objs] == [2] * 8 + [1] * 4
        assert plugin.exists_in_put_tasks(key(7))
        assert not plugin.exists_in_put_tasks(key(8))
        plugin.batched_submit_put_task([key(3)], [objs[8]])
        assert objs[8].get_ref_count() == 1
        assert counts(plugin)["put_queue_full"] == 4
        assert counts(plugin)["put_duplicate"] == 1
        calm(members)
        settle(plugin)
        assert [obj.get_ref_count() for obj in objs] == [1] * 12
        free(objs)


def test_one_object_larger_than_the_bound_is_still_taken(config: Path) -> None:
    with plugin_on(config, max_local_cpu_size=CHUNK_BYTES / 2**30) as plugin:
        put(plugin, [key(1)])
        assert plugin.contains(key(1))


def test_a_put_that_hangs_is_no_hit_and_ends_at_its_deadline(config: Path, members: Any) -> None:
    with plugin_on(config) as plugin:
        put(plugin, [key(0)])
        hold_io(members)
        obj = new_obj(plugin.local_cpu_backend, 1)
        plugin.batched_submit_put_task([key(1)], [obj])
        assert not plugin.contains(key(1))
        assert plugin.contains(key(0))
        wait_until(lambda: not plugin.exists_in_put_tasks(key(1)))
        assert obj.get_ref_count() == 1
        assert counts(plugin)["deadline_misses"] >= 1
        wait_until(lambda: plugin.report_status()["healthy"] is False)
        calm(members)
        free([obj])
        wait_until(lambda: plugin.report_status()["healthy"])
        put(plugin, [key(1)])
        assert plugin.contains(key(1))


def test_puts_that_all_fail_make_the_store_unhealthy(config: Path, members: Any) -> None:
    with plugin_on(config) as plugin:
        for member in members:
            member.error_rate = 1.0
        put(plugin, keys(40))
        assert plugin.report_status()["healthy"] is False
        assert counts(plugin)["put_failed"] == 40
        assert pool_bytes(plugin.local_cpu_backend) == 0


# ----- loads that fail


def test_every_failed_load_is_answered_and_marked_at_its_place(config: Path, members: Any) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(20))
        members[0].faults.append(Fault("flip", "read", times=1, after=3, value=5))
        found = plugin.batched_get_blocking(keys(20))
        assert [obj is None for obj in found].count(True) == 1
        assert all(obj is None or holds(obj, n) for n, obj in enumerate(found))
        free(found)
        for member in members:
            member.faults.append(Fault("error", "read", times=10**6))
        assert plugin.batched_get_blocking(keys(20)) == [None] * 20
        assert asyncio.run(plugin.batched_get_non_blocking("a", keys(20))) == []
        assert pool_bytes(plugin.local_cpu_backend) == 0


@pytest.mark.parametrize("form", ["blocking", "coroutine"])
def test_a_read_stuck_in_the_kernel_is_a_miss_and_keeps_its_memory(
    config: Path, members: Any, form: str
) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(4))
        plugin.batched_contains(keys(4), pin=True)
        hold_io(members)
        if form == "blocking":
            assert plugin.batched_get_blocking(keys(4)) == [None] * 4
        else:
            assert asyncio.run(plugin.batched_get_non_blocking("a", keys(4))) == []
        stuck = pool_bytes(plugin.local_cpu_backend)
        assert stuck > 0
        assert sum(m.held for m in members) > 0
        calm(members)
        wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)
        assert [plugin.unpin(one) for one in keys(4)] == [True] * 4
        wait_until(lambda: plugin.report_status()["healthy"])
        found = plugin.batched_get_blocking(keys(4))
        assert all(holds(obj, n) for n, obj in enumerate(found))
        free(found)


def test_the_event_loop_goes_on_while_a_load_hangs(config: Path, members: Any) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(4))
        hold_io(members)
        turns = 0

        async def both() -> Any:
            nonlocal turns
            load = asyncio.create_task(plugin.batched_get_non_blocking("a", keys(4)))
            while not load.done():
                await asyncio.sleep(0)
                turns += 1
            return load.result()

        assert asyncio.run(both()) == []
        assert turns > 100
        calm(members)
        wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)


def test_a_loop_that_ends_during_a_load_leaves_no_memory_behind(config: Path, members: Any) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(4))
        for member in members:
            member.slow_rate = 1.0
        loop = asyncio.new_event_loop()
        task = loop.create_task(plugin.batched_get_non_blocking("a", keys(4)))
        loop.run_until_complete(asyncio.sleep(0))
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)


# ----- close


@pytest.mark.parametrize("what", ["puts", "loads"])
def test_close_with_a_hanging_device_is_bounded_and_releases(
    config: Path, members: Any, what: str
) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(4))
        hold_io(members)
        objs = [new_obj(plugin.local_cpu_backend, n) for n in range(20, 24)]
        if what == "puts":
            plugin.batched_submit_put_task(keys(4, 20), objs)
        else:
            loader = threading.Thread(target=plugin.batched_get_blocking, args=(keys(4),))
            loader.start()
        wait_until(lambda: sum(m.held for m in members) > 0)
        started = time.monotonic()
        plugin.close()
        assert time.monotonic() - started < 10
        assert [obj.get_ref_count() for obj in objs] == [1] * 4
        free(objs)
        calm(members)
        if what == "loads":
            loader.join()
        wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)


def test_close_writes_what_is_queued(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with plugin_on(path) as plugin:
        objs = [new_obj(plugin.local_cpu_backend, n) for n in range(50)]
        plugin.batched_submit_put_task(keys(50), objs)
        free(objs)
        plugin.close()
        assert pool_bytes(plugin.local_cpu_backend) == 0
    with plugin_on(path) as plugin:
        assert plugin.batched_contains(keys(50)) == 50


# ----- ranks


def test_the_least_of_all_ranks_can_be_loaded_whatever_was_evicted(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=4, size="4MiB")
    told = [metadata(world_size=4, worker_id=rank) for rank in range(4)]
    rng = random.Random(1)
    with (
        plugin_on(path, told[0]) as a,
        plugin_on(path, told[1]) as b,
        plugin_on(path, told[2]) as c,
        plugin_on(path, told[3]) as d,
    ):
        ranks = list(zip([a, b, c, d], told, strict=True))
        for turn in range(12):
            for plugin, meta in ranks:
                put(plugin, keys(20, like=meta))
                put(plugin, keys(rng.randrange(25), 1000 * (turn + 1), like=meta))
            hits = [p.batched_contains(keys(20, like=meta), pin=True) for p, meta in ranks]
            for plugin, meta in ranks:  # between lookup and load
                put(plugin, keys(20, 500_000 + 100 * turn, like=meta))
            for plugin, meta in ranks:
                found = plugin.batched_get_blocking(keys(min(hits), like=meta))
                assert None not in found
                free(found)
            for (plugin, meta), hit in zip(ranks, hits, strict=True):
                assert all(plugin.unpin(one) for one in keys(hit, like=meta))
        assert sum(counts(plugin)["evictions"] for plugin, _ in ranks) > 0
        assert [pins(plugin) for plugin, _ in ranks] == [0] * 4
