"""`use_layerwise`: LMCache looks at no result of a layer, so what is wrong is told to vLLM."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from lmcache.v1.memory_management import MemoryFormat

from fx100_lmcache.lmcache.inprocess.forward_pass import LayerLoadError
from fx100_lmcache.lmcache.inprocess.layers import Promises
from support.inprocess import (
    CHUNK_TOKENS,
    LAYER_SHAPE,
    LAYERS,
    counts,
    flip_bit,
    free,
    key,
    mount_on,
    new_obj,
    pins,
    plugin_on,
    pool_bytes,
    put,
    settle,
    stand_in_for_mount,
    wild_members,
    write_config,
)
from support.inprocess_engine import Vllm, served

SESSION = [7 * n % 1000 for n in range(117 * CHUNK_TOKENS)]
LONGER = SESSION + [5] * (10 * CHUNK_TOKENS)
LAYERWISE = {"use_layerwise": True}
LAYER = {"shape": LAYER_SHAPE, "fmt": MemoryFormat.KV_T2D}


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Any:
    members = wild_members(2, 16 << 20)
    stand_in_for_mount(monkeypatch, mount_on(members))
    return members


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm = Vllm()
    vllm.install(monkeypatch)
    return vllm


def store(worker: Any, tokens: Any) -> None:
    worker.store(tokens)
    settle(worker.plugin)


# ----- a layer that cannot be read


@pytest.mark.parametrize("layer", range(LAYERS))
def test_vllm_is_told_to_use_nothing_of_a_session_with_a_bad_layer(
    tmp_path: Path, members: Any, vllm: Any, layer: Any
) -> None:
    with served(write_config(tmp_path), **LAYERWISE) as worker:
        store(worker, SESSION)
        flip_bit(worker.plugin, members, worker.chunk_keys(SESSION)[56].split_layers(LAYERS)[layer])
        request, promised = worker.lookup(SESSION)
        assert promised == len(SESSION)  # nobody has read it yet
        with vllm.step(promised):
            got = worker.retrieve(request, SESSION, promised)
        assert got == promised  # as ever, LMCache has not looked
        assert not worker.right(SESSION)
        assert vllm.take_invalid_tokens() == list(range(promised))
        assert counts(worker.plugin)["layer_load_failures"] == 1

        request, promised = worker.lookup(SESSION)
        assert promised == 56 * CHUNK_TOKENS
        with vllm.step(promised):
            assert worker.retrieve(request, SESSION, promised) == promised
        assert worker.right(SESSION[:promised])
        assert vllm.take_invalid_tokens() == []
        store(worker, SESSION)  # what vLLM computed: the layer that is missing comes back
        request, promised = worker.lookup(SESSION)
        assert promised == len(SESSION)
        with vllm.step(promised):
            worker.retrieve(request, SESSION, promised)
        assert worker.right(SESSION)
        assert pins(worker.plugin) == 0
        assert pool_bytes(worker.manager.local_cpu_backend) == 0


def test_without_vllm_the_engine_stops_instead_of_going_on_with_wrong_kv(
    tmp_path: Path, members: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with served(write_config(tmp_path), **LAYERWISE) as worker:
        assert "set use_layerwise: false" in caplog.text
        store(worker, SESSION)
        flip_bit(worker.plugin, members, worker.chunk_keys(SESSION)[56].split_layers(LAYERS)[2])
        request, promised = worker.lookup(SESSION)
        with pytest.raises(LayerLoadError, match="vLLM cannot be told"):
            worker.retrieve(request, SESSION, promised)


def test_with_vllm_nobody_is_warned_of_layers(
    tmp_path: Path, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin_on(write_config(tmp_path), **LAYERWISE):
        pass
    assert "use_layerwise" not in caplog.text


def test_a_plugin_that_is_closed_has_promised_all_the_same(
    tmp_path: Path, members: Any, vllm: Any
) -> None:
    with served(write_config(tmp_path), **LAYERWISE) as worker:
        store(worker, SESSION)
        promised = worker.lookup(SESSION)[1]
        plugin = worker.plugin
        plugin.close()
        layer = [one.split_layers(LAYERS)[0] for one in worker.chunk_keys(SESSION)]
        with vllm.step(promised):
            assert asyncio.run(plugin.batched_get_non_blocking("fake_lookup_id", layer)) == []
        assert vllm.take_invalid_tokens() == list(range(promised))


@pytest.mark.parametrize("first", [0, 56])
def test_what_is_gone_after_the_promise_is_told_too(
    tmp_path: Path, members: Any, vllm: Any, first: int
) -> None:
    with served(write_config(tmp_path), **LAYERWISE) as worker:
        store(worker, SESSION)
        request, promised = worker.lookup(SESSION)
        gone = worker.chunk_keys(SESSION)[first:]
        for one in gone:
            worker.plugin.batched_remove(one.split_layers(LAYERS))
        with vllm.step(promised):
            worker.retrieve(request, SESSION, promised)
        assert vllm.take_invalid_tokens() == list(range(promised))
        assert worker.lookup(SESSION)[1] == first * CHUNK_TOKENS


# ----- what is computed on top of it


@pytest.mark.parametrize("mode", [{}, LAYERWISE])
def test_what_a_pass_computes_without_its_context_is_not_stored(
    tmp_path: Path, members: Any, vllm: Any, mode: Any
) -> None:
    with served(write_config(tmp_path), **mode) as worker:
        store(worker, SESSION)
        bad = worker.chunk_keys(SESSION)[56]
        flip_bit(worker.plugin, members, bad.split_layers(LAYERS)[1] if mode else bad)
        request, promised = worker.lookup(LONGER)
        assert promised == len(SESSION)
        with vllm.step(promised):
            worker.retrieve(request, LONGER, promised)
            store(worker, LONGER)  # LMCache saves at the end of the pass, whatever came of the load
        assert counts(worker.plugin)["put_after_failed_load"] > 0
        assert worker.lookup(LONGER)[1] == 56 * CHUNK_TOKENS
        with vllm.step():
            store(worker, LONGER)
        assert worker.lookup(LONGER)[1] == len(LONGER)


# ----- chunks of which layers are missing


def test_a_chunk_without_one_of_its_layers_is_not_there(tmp_path: Path) -> None:
    layers = key(7).split_layers(LAYERS)
    with plugin_on(write_config(tmp_path), **LAYERWISE) as plugin:
        put(plugin, layers, **LAYER)
        assert plugin.contains(layers[0])
        assert plugin.batched_contains(layers) == LAYERS
        plugin.remove(layers[2])
        assert not plugin.contains(layers[0])
        assert plugin.contains(layers[1])
        assert plugin.batched_contains(layers, pin=True) == 0
        assert pins(plugin) == 0
        assert plugin.batched_contains(layers[:2]) == 2  # no chunk: the ordinary rule


def test_a_promise_stands_until_its_last_request_unpins(tmp_path: Path) -> None:
    layers = key(7).split_layers(LAYERS)
    with plugin_on(write_config(tmp_path), **LAYERWISE) as plugin:
        put(plugin, layers, **LAYER)
        assert plugin.batched_contains(layers, pin=True) == LAYERS
        assert plugin.contains(layers[0], pin=True)  # as LMCache's audit wrapper asks
        plugin.batched_remove(layers)
        assert plugin.contains(layers[0])
        assert not plugin.contains(layers[0], pin=True)
        assert plugin.batched_contains(layers, pin=True) == 0
        plugin.unpin(layers[0])
        assert plugin.contains(layers[0])
        plugin.unpin(layers[0])
        assert not plugin.contains(layers[0])
        plugin.unpin(layers[0])


def test_promises_of_cancelled_requests_do_not_pile_up() -> None:
    promises = Promises(limit=3)
    for number in range(5):
        promises.make(bytes([number]))
    assert [promises.stands(bytes([n])) for n in range(5)] == [False, False, True, True, True]
    promises.make(bytes([2]))
    promises.make(bytes([9]))
    assert promises.stands(bytes([2]))


def test_objects_of_whole_chunks_are_loaded_as_ever(tmp_path: Path) -> None:
    with plugin_on(write_config(tmp_path), **LAYERWISE) as plugin:
        obj = new_obj(plugin.local_cpu_backend, 1)
        plugin.batched_submit_put_task([key(1)], [obj])
        obj.ref_count_down()
        settle(plugin)
        found = asyncio.run(plugin.batched_get_non_blocking("a", [key(1), key(2)]))
        assert len(found) == 1
        free(found)
