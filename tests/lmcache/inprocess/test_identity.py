"""What makes a chunk another chunk."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from support.inprocess import (
    CHUNK_TOKENS,
    LAYERS,
    MODEL,
    key,
    keys,
    metadata,
    new_obj,
    plugin_on,
    put,
    rewrite_config,
    settle,
)


def test_digests_do_not_depend_on_the_process(plugin: FX100StoragePlugin) -> None:
    digest = plugin._keys.digest(key(-5, request_configs={"lmcache.tag.user": "a"}))
    assert digest[16:] == (-5).to_bytes(16, "little", signed=True).ljust(32, b"\0")
    assert digest == plugin._keys.digest(key(-5, request_configs={"lmcache.tag.user": "a"}))


def test_every_field_of_a_key_is_part_of_the_name(plugin: FX100StoragePlugin) -> None:
    variants = [
        key(1),
        key(-1),
        key(2**64 - 1),
        key(1, worker_id=1),
        key(1, world_size=2),
        key(1, model_name="test/model@1"),
        key(1, dtype=torch.float16),
        key(1, request_configs={"lmcache.tag.a": "1"}),
        key(1, request_configs={"lmcache.tag.a": 1}),
        key(1, request_configs={"lmcache.tag.a": "1", "lmcache.tag.b": "2"}),
        key(1, request_configs={"lmcache.tag.b": "2", "lmcache.tag.a": "1"}),
        *key(1).split_layers(2),
    ]
    assert len(set(plugin._keys.digests(variants))) == len(variants)


def test_keys_that_cannot_be_named_are_never_stored(plugin: FX100StoragePlugin) -> None:
    odd = [
        key(2**200),
        key(0, chunk_hash=b"bytes"),
        key(1, request_configs={"lmcache.tag.a": ["not", "hashable"]}),
        key(1, model_name="x" * 70_000),
    ]
    for one in odd:
        put_one(plugin, one)
        assert not plugin.contains(one)
        assert plugin.get_blocking(one) is None
    assert len(plugin._store) == 0


def put_one(plugin: FX100StoragePlugin, one: Any) -> None:
    obj = new_obj(plugin.local_cpu_backend, "odd")
    plugin.batched_submit_put_task([one], [obj])
    obj.ref_count_down()
    settle(plugin)


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_dtype": torch.uint8},
        {"kv_shape": (LAYERS, 2, CHUNK_TOKENS, 1, 128)},
        {"chunk_size": 32},
    ],
)
def test_another_layout_of_equal_size_is_not_found(
    config: Path, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(3))
    with plugin_on(config, metadata(**changed)) as plugin:
        assert plugin.batched_contains(keys(3)) == 0
    [line] = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    name = {"kv_dtype": "dtype", "kv_shape": "kv_shape", "chunk_size": "chunk"}[next(iter(changed))]
    assert f"{name} (there: " in line


def test_another_namespace_is_not_found_and_start_up_says_so(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(3))
    rewrite_config(config, identity={"model_tags": {MODEL: "r2"}})
    with plugin_on(config) as plugin:
        assert plugin.batched_contains(keys(3)) == 0
    assert "model_tag (there: 'r1', now: 'r2')" in caplog.text


def test_what_is_of_use_is_not_complained_about(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin_on(config) as plugin:
        put(plugin, keys(3))
    with plugin_on(config):
        pass
    assert "cannot be used" not in caplog.text


def test_a_model_without_a_tag_is_warned_of_or_refused(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite_config(config, identity={"model_tags": {}})
    with plugin_on(config) as plugin:
        put(plugin, [key(0)])
        assert plugin.contains(key(0))
    assert "has no tag in identity.model_tags" in caplog.text
    rewrite_config(config, identity={"require_model_tag": True})
    with plugin_on(config) as plugin:
        put(plugin, [key(1)])
        assert not plugin.contains(key(1))
    assert "nothing of it is cached" in caplog.text
