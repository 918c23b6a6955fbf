"""What the contract asks of a backend, call by call."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat

from fx100_lmcache.lmcache.inprocess.forward_pass import LayerLoadError
from fx100_lmcache.lmcache.inprocess.puts import SecondTouch
from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from support.inprocess import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    HEAD_SIZE,
    HEADS,
    LAYER_SHAPE,
    LAYERS,
    SHAPE,
    counts,
    free,
    holds,
    key,
    keys,
    new_obj,
    plugin_on,
    pool_bytes,
    put,
    settle,
    wait_until,
    write_config,
)

# ----- reading and writing


def test_what_was_put_comes_back_with_one_reference(plugin: FX100StoragePlugin) -> None:
    wanted = keys(3)
    put(plugin, wanted)
    found = plugin.batched_get_blocking(wanted)
    assert [holds(obj, k.chunk_hash) for obj, k in zip(found, wanted, strict=True)] == [True] * 3
    assert [obj.get_ref_count() for obj in found] == [1, 1, 1]
    assert [obj.is_pinned for obj in found] == [False] * 3
    assert found[0].get_shape() == SHAPE
    assert found[0].metadata.fmt is MemoryFormat.KV_2LTD
    free(found)
    assert pool_bytes(plugin.local_cpu_backend) == 0


def test_a_list_of_the_same_length_with_none_for_what_is_missing(
    plugin: FX100StoragePlugin,
) -> None:
    put(plugin, [key(0), key(2)])
    found = plugin.batched_get_blocking(keys(3))
    assert [obj is None for obj in found] == [False, True, False]
    assert holds(found[2], 2)
    free(found)
    assert plugin.batched_get_blocking([]) == []
    assert plugin.get_blocking(key(1)) is None


def test_the_coroutine_ends_at_the_first_that_is_missing(plugin: FX100StoragePlugin) -> None:
    put(plugin, [key(0), key(1), key(3)])
    found = asyncio.run(plugin.batched_get_non_blocking("a", keys(4)))
    assert [holds(obj, n) for n, obj in enumerate(found)] == [True, True]
    free(found)
    assert pool_bytes(plugin.local_cpu_backend) == 0
    assert asyncio.run(plugin.batched_get_non_blocking("a", keys(2, 7))) == []
    assert asyncio.run(plugin.batched_get_non_blocking("a", [])) == []


def test_a_layer_is_all_or_nothing(config: Path) -> None:
    with plugin_on(config, use_layerwise=True) as plugin:
        layers = [key(n).split_layers(LAYERS)[0] for n in range(3)]
        kind = {"shape": LAYER_SHAPE, "fmt": MemoryFormat.KV_T2D}
        put(plugin, layers, **kind)
        found = asyncio.run(plugin.batched_get_non_blocking("fake_lookup_id", layers))
        assert [obj.metadata.fmt for obj in found] == [MemoryFormat.KV_T2D] * 3
        free(found)
        plugin.remove(layers[1])
        with pytest.raises(LayerLoadError):
            asyncio.run(plugin.batched_get_non_blocking("fake_lookup_id", layers))
        assert counts(plugin)["layer_load_failures"] == 1
        assert pool_bytes(plugin.local_cpu_backend) == 0


def test_layers_of_one_chunk_are_different_objects(config: Path) -> None:
    with plugin_on(config, use_layerwise=True) as plugin:
        layers = key(7).split_layers(LAYERS)
        kind = {"shape": LAYER_SHAPE, "fmt": MemoryFormat.KV_T2D}
        objs = [new_obj(plugin.local_cpu_backend, layer.layer_id, **kind) for layer in layers]
        plugin.batched_submit_put_task(layers, objs)
        free(objs)
        settle(plugin)
        assert plugin.batched_contains(layers) == LAYERS
        assert not plugin.contains(key(7))
        found = plugin.batched_get_blocking(layers)
        assert all(holds(obj, layer.layer_id) for obj, layer in zip(found, layers, strict=True))
        free(found)


@pytest.mark.parametrize(
    ("dtype", "fmt", "shape"),
    [
        (torch.uint8, MemoryFormat.KV_2LTD, SHAPE),
        (torch.float8_e4m3fn, MemoryFormat.KV_2LTD, SHAPE),
        (torch.float8_e5m2, MemoryFormat.KV_T2D, LAYER_SHAPE),
        (torch.float32, MemoryFormat.KV_MLA_FMT, torch.Size([1, LAYERS, CHUNK_TOKENS, 72])),
        (torch.uint16, MemoryFormat.KV_2LTD, SHAPE),
        (torch.bfloat16, MemoryFormat.KV_2LTD, torch.Size([2, LAYERS, 3, 100])),
        (torch.int8, MemoryFormat.KV_2TD, torch.Size([4099])),
        (torch.int8, MemoryFormat.KV_2TD, torch.Size([2, 3, 4, 5, 7])),
    ],
)
def test_any_dtype_and_shape_comes_back(
    plugin: FX100StoragePlugin, dtype: Any, fmt: Any, shape: Any
) -> None:
    put(plugin, [key(1)], shape=shape, dtype=dtype, fmt=fmt)
    found = plugin.get_blocking(key(1))
    assert (found.get_dtype(), found.get_shape(), found.metadata.fmt) == (dtype, shape, fmt)
    assert holds(found, 1)
    free([found])


def test_several_tensor_groups_come_back(plugin: FX100StoragePlugin) -> None:
    shapes = [torch.Size([2, 3, 16, 8]), torch.Size([1, 1, 16, 40])]
    dtypes = [torch.bfloat16, torch.uint8]
    put(plugin, [key(1)], shape=shapes, dtype=dtypes)
    found = plugin.get_blocking(key(1))
    assert (found.get_shapes(), found.get_dtypes()) == (shapes, dtypes)
    assert holds(found, 1)
    free([found])


def test_bytes_without_a_tensor_come_back(plugin: FX100StoragePlugin) -> None:
    plugin.batched_submit_put_task([key(1)], [BytesBufferMemoryObj(b"serialised" * 500)])
    settle(plugin)
    assert bytes(plugin.get_blocking(key(1)).byte_array) == b"serialised" * 500


def test_a_shorter_last_chunk_is_an_object_of_its_own(plugin: FX100StoragePlugin) -> None:
    short = torch.Size([2, LAYERS, 5, HEADS * HEAD_SIZE])
    put(plugin, [key(1)])
    put(plugin, [key(2)], shape=short)
    found = plugin.batched_get_blocking(keys(2, 1))
    assert [obj.get_shape() for obj in found] == [SHAPE, short]
    free(found)


def test_a_key_offered_again_with_another_shape_replaces_the_old(
    plugin: FX100StoragePlugin,
) -> None:
    put(plugin, [key(1)])
    short = torch.Size([2, LAYERS, 5, HEADS * HEAD_SIZE])
    put(plugin, [key(1)], shape=short)
    found = plugin.get_blocking(key(1))
    assert found.get_shape() == short
    assert holds(found, 1)
    free([found])


def test_everything_is_there_after_a_restart(config: Path) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(5))
    with plugin_on(config) as plugin:
        assert plugin.batched_contains(keys(6)) == 5
        found = plugin.batched_get_blocking(keys(5))
        assert all(holds(obj, n) for n, obj in enumerate(found))
        free(found)


# ----- puts


def test_a_present_key_is_not_written_again(plugin: FX100StoragePlugin) -> None:
    put(plugin, keys(2))
    before = counts(plugin)["written_bytes"]
    put(plugin, keys(2))
    assert counts(plugin)["written_bytes"] == before == 2 * CHUNK_BYTES
    assert counts(plugin)["puts_present"] == 2


def test_second_touch_writes_what_is_offered_twice(tmp_path: Path) -> None:
    config = write_config(tmp_path, inprocess={"admission": "second_touch"})
    with plugin_on(config) as plugin:
        put(plugin, keys(4))
        assert plugin.batched_contains(keys(4)) == 0
        assert counts(plugin)["put_not_admitted"] == 4
        put(plugin, keys(2))
        assert plugin.batched_contains(keys(4)) == 2
        assert counts(plugin)["written_bytes"] == 2 * CHUNK_BYTES


def test_second_touch_forgets_the_oldest() -> None:
    touch = SecondTouch(limit=2)
    assert [touch.admits(name) for name in (b"a", b"b", b"c", b"a", b"c")] == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_the_callback_comes_once_for_each_key_that_can_be_read(plugin: FX100StoragePlugin) -> None:
    told: list[int] = []

    def tell(done: Any) -> None:
        assert plugin.contains(done)
        told.append(done.chunk_hash)
        if done.chunk_hash == 0:
            raise RuntimeError("a listener fails")

    objs = [new_obj(plugin.local_cpu_backend, n) for n in range(3)]
    plugin.batched_submit_put_task(keys(3), objs, on_complete_callback=tell)
    free(objs)
    wait_until(lambda: len(told) == 3)
    assert sorted(told) == [0, 1, 2]
    wait_until(lambda: counts(plugin).get("callback_errors") == 1)


def test_async_put_and_positional_arguments(plugin: FX100StoragePlugin) -> None:
    objs = [new_obj(plugin.local_cpu_backend, n) for n in range(2)]
    asyncio.run(plugin.async_batched_submit_put_task([key(0)], objs[:1], None, None))
    plugin.batched_submit_put_task([key(1)], objs[1:], None, None)
    free(objs)
    settle(plugin)
    assert plugin.batched_contains(keys(2)) == 2


# ----- the rest of the interface


def test_what_lmcache_asks_of_any_backend(plugin: FX100StoragePlugin) -> None:
    assert str(plugin) == "FX100StoragePlugin"
    assert plugin.get_allocator_backend() is plugin.local_cpu_backend
    assert plugin.touch_cache() is None
    assert plugin.cancel_request("request") is None
    assert plugin.get_non_blocking(key(0)) is None
    assert plugin.exists_in_put_tasks(key(0)) is False
    assert plugin.report_status()["healthy"]


def test_after_close_everything_is_a_miss_and_nothing_raises(config: Path) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(2))
        obj = new_obj(plugin.local_cpu_backend, 5)
        plugin.close()
        plugin.close()
        assert not plugin.contains(key(0))
        assert plugin.batched_contains(keys(2)) == 0
        assert plugin.batched_get_blocking(keys(2)) == [None, None]
        assert asyncio.run(plugin.batched_get_non_blocking("a", keys(2))) == []
        assert asyncio.run(plugin.batched_async_contains("a", keys(2), True)) == 0
        plugin.batched_submit_put_task([key(5)], [obj])
        assert obj.get_ref_count() == 1
        free([obj])
        assert (plugin.pin(key(0)), plugin.unpin(key(0)), plugin.remove(key(0))) == (False,) * 3
        assert (plugin.clear(), plugin.batched_remove(keys(2))) == (0, 0)


@pytest.mark.parametrize("method", ["lookup", "unpin", "remove", "clear", "describe", "load"])
def test_a_failure_within_us_is_a_miss_and_leaves_no_lock(
    plugin: FX100StoragePlugin,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(plugin, keys(2))

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(plugin._store, method, broken)
        plugin.contains(key(0), pin=True)
        plugin.batched_contains(keys(2), pin=True)
        plugin.unpin(key(0))
        plugin.remove(key(9))
        plugin.clear() if method == "clear" else None
        assert len(plugin.batched_get_blocking(keys(2))) == 2 or method == "load"
        found = asyncio.run(plugin.batched_get_non_blocking("a", keys(2)))
        free(found)
    assert "a bug of ours" in caplog.text
    done = threading.Event()
    worker = threading.Thread(target=lambda: (put(plugin, [key(50)]), done.set()))
    worker.start()
    assert done.wait(10)
    worker.join()
