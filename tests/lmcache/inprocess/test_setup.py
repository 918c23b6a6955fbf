"""What is refused and warned of at start, and how LMCache loads the plugin."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fx100_lmcache.config import IdentityConfig
from fx100_lmcache.counters import PLUGIN
from fx100_lmcache.errors import FX100Error, VolumeError
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.inprocess import checks as guard
from fx100_lmcache.lmcache.inprocess.checks import Host, UnsupportedSetupError
from fx100_lmcache.lmcache.inprocess.keys import KeyContext, KeyNamer
from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from support.inprocess import (
    engine_config,
    holds,
    key,
    keys,
    manager_on,
    metadata,
    new_obj,
    plugin_on,
    put,
    refused,
    settle,
    write_config,
)
from support.inprocess_engine import Vllm
from support.releases import inprocess

# ----- what is refused


@pytest.mark.parametrize(
    "setting",
    [
        {"enable_blending": True},
        {"enable_p2p": True},
        {"enable_controller": True},
        {"enable_pd": True},
        {"use_layerwise": True, "enable_async_loading": True},
        {"pre_caching_hash_algorithm": "builtin"},
        {"pre_caching_hash_algorithm": "no such hash"},
        {"pre_caching_hash_algorithm": "xxhash_cbor"},
    ],
)
def test_what_is_not_served_is_refused_by_the_name_of_its_setting(
    tmp_path: Path, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    told = types.SimpleNamespace(role="worker")
    config = engine_config(write_config(tmp_path))
    for name, value in setting.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedSetupError) as caught:
        FX100StoragePlugin(config=config, metadata=metadata(), local_cpu_backend=told)
    assert next(iter(setting)) in str(caught.value)
    assert re.search("set (one|pre_caching|enable)", str(caught.value))


def test_the_scheduler_is_refused() -> None:
    with pytest.raises(UnsupportedSetupError, match="enable_scheduler_bypass_lookup: false"):
        FX100StoragePlugin(config=engine_config(None), metadata=metadata(role="scheduler"))


def test_no_host_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetupError, match="max_local_cpu_size above 0"):
        FX100StoragePlugin(config=engine_config(write_config(tmp_path)), metadata=metadata())


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(UnsupportedSetupError, match="no config or metadata"):
        FX100StoragePlugin()


def test_no_configuration_of_ours_is_refused(tmp_path: Path) -> None:
    assert "fx100.config" in refused(None)
    with pytest.raises(FX100Error, match=r"nowhere\.yaml"), plugin_on(tmp_path / "nowhere.yaml"):
        pass


@pytest.mark.parametrize("seed", ["0", "random", None])
def test_an_unstable_hash_is_refused_and_a_seed_makes_it_stable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: str | None
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    path = write_config(tmp_path)
    if seed == "0":
        with plugin_on(path, pre_caching_hash_algorithm="builtin") as plugin:
            put(plugin, [key(-1)])
            assert plugin.contains(key(-1))
    else:
        told = refused(path, pre_caching_hash_algorithm="builtin")
        assert "sha256_cbor" in told
        assert "PYTHONHASHSEED" in told


def test_another_hash_or_seed_finds_nothing_and_start_up_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token_database = inprocess("token_database")

    path = write_config(tmp_path)
    monkeypatch.setattr(token_database, "NONE_HASH", 1)
    with plugin_on(path) as plugin:
        put(plugin, keys(2))
    monkeypatch.setattr(token_database, "NONE_HASH", 2)
    with plugin_on(path, pre_caching_hash_algorithm="sha256") as plugin:
        assert plugin.batched_contains(keys(2)) == 0
    [line] = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    assert "hash (there: 'sha256_cbor', now: 'sha256')" in line
    assert f"seed (there: '{1:016x}', now: '{2:016x}')" in line


DIGEST = """
import warnings; warnings.simplefilter("ignore")
from support.inprocess import key
from fx100_lmcache.config import IdentityConfig
from fx100_lmcache.counters import PLUGIN
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.inprocess.keys import KeyNamer, KeyContext
namer = KeyNamer(IdentityConfig(), KeyContext("h", "s", 16, (4, 2), "bf16"), Counts(PLUGIN))
print(namer.digest(key(7, request_configs={"lmcache.tag.b": "x", "lmcache.tag.a": "y"})).hex())
"""


def test_a_fresh_interpreter_names_a_key_alike() -> None:
    other = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env={**os.environ, "PYTHONHASHSEED": "1", "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    namer = KeyNamer(IdentityConfig(), KeyContext("h", "s", 16, (4, 2), "bf16"), Counts(PLUGIN))
    ours = namer.digest(key(7, request_configs={"lmcache.tag.b": "x", "lmcache.tag.a": "y"}))
    assert other.stdout.splitlines()[-1] == ours.hex()


# ----- what is warned of


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enable_async_loading": True, "local_cpu": True}, "local_cpu: false"),
        ({"use_layerwise": True}, "a failed read stops the engine (do: set use_layerwise: false"),
        ({"use_layerwise": True, "local_cpu": True}, "partly on NVMe"),
        ({"retrieve_locations": ["LocalCPUBackend"]}, "add 'fx100'"),
        ({"store_location": "LocalCPUBackend"}, "never asked"),
        ({"extra_config": {"audit_backend_enabled": True}}, "audit_backend_enabled: false"),
    ],
)
def test_modes_that_lmcache_breaks_are_warned_of(
    tmp_path: Path, fields: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin_on(write_config(tmp_path), **fields):
        pass
    assert words in caplog.text


def test_good_setups_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_config(tmp_path)
    for fields in ({}, {"enable_async_loading": True}, {"store_location": "fx100"}):
        with plugin_on(path, **fields):
            pass
    ours = [r for r in caplog.records if r.name.startswith("fx100") and r.levelname == "WARNING"]
    of_every_setup = ("direct I/O", "deprecated")  # by what is below, and by LMCache 0.5.7
    said = [r.getMessage() for r in ours]
    assert [each for each in said if not any(word in each for word in of_every_setup)] == []


def vllm_stand_in(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    told = {
        "max_model_len": 1000,
        "cache_dtype": "fp8_e5m2",
        "policy": "recompute",
        "ranks": 1,
        "hosts": 1,
        "executor": "mp",
        **changes,
    }
    current = types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=told["max_model_len"]),
        cache_config=types.SimpleNamespace(cache_dtype=told["cache_dtype"]),
        kv_transfer_config=types.SimpleNamespace(kv_load_failure_policy=told["policy"]),
        parallel_config=types.SimpleNamespace(
            world_size=told["ranks"],
            nnodes_within_dp=told["hosts"],
            distributed_executor_backend=told["executor"],
        ),
    )
    module = types.SimpleNamespace(get_current_vllm_config_or_none=lambda: current)
    monkeypatch.setitem(sys.modules, "vllm.config", module)


def test_vllm_is_asked_for_what_lmcache_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stand_in(monkeypatch)
    assert guard.ask_vllm("id_dp3") == Host(1000, "fp8_e5m2", "recompute", 3, False)
    Vllm().install(monkeypatch)
    assert guard.ask_vllm("id") == Host(1000, "fp8_e5m2", "recompute", 0, True)
    monkeypatch.delitem(sys.modules, "vllm.config")
    assert guard.ask_vllm("id") == Host()


@pytest.mark.parametrize(
    ("parallel", "fields", "warned"),
    [
        ({"ranks": 2, "hosts": 2}, {}, True),
        ({"ranks": 2, "executor": "ray"}, {}, True),
        ({"ranks": 2, "hosts": 2}, {"enable_async_loading": True}, False),
        ({"ranks": 2}, {}, False),
        ({"ranks": 1, "executor": "ray"}, {}, False),
    ],
)
def test_ranks_that_may_be_on_other_hosts_are_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    parallel: dict[str, Any],
    fields: dict[str, Any],
    warned: bool,
) -> None:
    vllm_stand_in(monkeypatch, **parallel)
    path = write_config(tmp_path, shards=2)
    with plugin_on(path, metadata(world_size=parallel["ranks"]), **fields):
        pass
    assert ("may be on other hosts" in caplog.text) == warned


def test_eight_bit_kinds_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path)
    eight = metadata(kv_dtype=torch.uint8)
    vllm_stand_in(monkeypatch, cache_dtype="fp8_e5m2")
    with plugin_on(path, eight) as plugin:
        put(plugin, [key(1, like=eight)], dtype=torch.uint8)
        assert plugin.contains(key(1, like=eight))
    vllm_stand_in(monkeypatch, cache_dtype="fp8_e4m3")
    with plugin_on(path, eight) as plugin:
        assert not plugin.contains(key(1, like=eight))


def test_a_policy_that_fails_requests_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_stand_in(monkeypatch, policy="fail")
    with plugin_on(write_config(tmp_path)):
        pass
    assert '"kv_load_failure_policy": "recompute"' in caplog.text


def test_too_small_staging_is_warned_of_and_refused_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_config(tmp_path)
    vllm_stand_in(monkeypatch, max_model_len=1_000_000)
    with plugin_on(path):
        pass
    assert "max_local_cpu_size holds 4096 tokens" in caplog.text
    assert "set max_local_cpu_size: 1.91 or more" in caplog.text
    assert "set max_local_cpu_size: 1.91 or more" in refused(path, use_layerwise=True)


# ----- loading by LMCache


def test_a_wrong_class_or_device_leaves_lmcache_without_us(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_config(tmp_path)
    wrong = {"storage_plugin.fx100.class_name": "FX100Storage"}
    with manager_on(path, extra_config=wrong) as manager:
        assert list(manager.storage_backends) == ["LocalCPUBackend"]
    (tmp_path / "m1").unlink()
    with manager_on(path) as manager:
        assert list(manager.storage_backends) == ["LocalCPUBackend"]
    with pytest.raises(VolumeError, match="m1"), plugin_on(path):
        pass


def test_lmcache_loads_the_plugin_under_its_name(tmp_path: Path) -> None:
    with manager_on(write_config(tmp_path)) as manager:
        assert manager.list_backends() == {
            "LocalCPUBackend": "LocalCPUBackend",
            "fx100": "FX100StoragePlugin",
        }
        assert manager.contains(key(1)) is None
        assert manager.get(key(1)) is None


def test_the_audit_wrapper_works(tmp_path: Path) -> None:
    extra = {"audit_backend_enabled": True}
    with manager_on(write_config(tmp_path), extra_config=extra) as manager:
        wrapped = manager.storage_backends["fx100"]
        obj = new_obj(manager.local_cpu_backend, 1)
        manager.batched_put([key(1)], [obj])
        settle(wrapped.real_backend)
        assert manager.contains(key(1), pin=True) == "fx100"
        manager.batched_unpin([key(1)])
        [found] = manager.batched_get([key(1)], "fx100")
        assert holds(found, 1)
        found.ref_count_down()
        assert manager.remove(key(1)) == 1
