import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.doctor.documents import read_document
from fx100_lmcache.doctor.inprocess import check_inprocess
from fx100_lmcache.findings import Finding
from support.doctor import (
    NOTE,
    OK,
    PROBLEM,
    WARNING,
    graded,
    inprocess_settings,
    only,
    vllm_settings,
    written,
)


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard asks whether vLLM is installed, since LMCache takes its hash from there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())


def judged(
    tmp_path: Path,
    content: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    lmcache: str | None = "0.5.6",
    **fields: Any,
) -> list[Finding]:
    config = tmp_path / "fx100.yaml"
    if content is None:
        content = vllm_settings(config, **fields)
    document = read_document(written(tmp_path / "vllm.yaml", content), {})
    return list(check_inprocess(document, config, environment or {}, lmcache))


def test_settings_as_shipped_are_fine(tmp_path: Path) -> None:
    found = judged(tmp_path)
    assert {each.severity for each in found} == {OK}
    assert {each.subject for each in found} == {
        "in-process: fx100.config",
        "in-process: hash",
        "in-process: kv_load_failure_policy",
    }


def test_without_a_file_what_was_not_checked_is_told(tmp_path: Path) -> None:
    [found] = check_inprocess(None, tmp_path / "fx100.yaml", {})
    assert found.severity is NOTE
    assert "--lmcache-config" in found.do


@pytest.mark.parametrize("algorithm", ["builtin", "xxhash"])
def test_unstable_hash_is_a_problem(tmp_path: Path, algorithm: str) -> None:
    found = only(judged(tmp_path, pre_caching_hash_algorithm=algorithm), PROBLEM)
    assert algorithm in found.what
    assert "PYTHONHASHSEED" in found.what
    assert "ever found again" in found.why
    assert "sha256_cbor" in found.do


def test_hash_that_nobody_set_is_a_problem(tmp_path: Path) -> None:
    settings = inprocess_settings(tmp_path / "fx100.yaml")
    del settings["pre_caching_hash_algorithm"]
    assert only(judged(tmp_path, settings), PROBLEM).subject == "in-process: hash"


def test_a_seed_makes_any_hash_stable(tmp_path: Path) -> None:
    found = judged(
        tmp_path, environment={"PYTHONHASHSEED": "0"}, pre_caching_hash_algorithm="builtin"
    )
    assert not graded(found, PROBLEM)
    assert any("PYTHONHASHSEED=0" in each.what for each in found)


def test_random_seed_does_not(tmp_path: Path) -> None:
    found = judged(
        tmp_path, environment={"PYTHONHASHSEED": "random"}, pre_caching_hash_algorithm="builtin"
    )
    assert only(found, PROBLEM).subject == "in-process: hash"


@pytest.mark.parametrize("policy", ["fail", None])
def test_load_failures_must_be_recomputed(tmp_path: Path, policy: str | None) -> None:
    found = only(judged(tmp_path, policy=policy), PROBLEM)
    assert found.what == "is fail"
    assert '"kv_load_failure_policy": "recompute"' in found.do


def test_a_file_that_does_not_say_the_policy_is_told(tmp_path: Path) -> None:
    found = judged(tmp_path, inprocess_settings(tmp_path / "fx100.yaml"))
    assert "kv_load_failure_policy" in only(found, NOTE).subject
    assert not graded(found, PROBLEM)


def test_plugins_must_be_named(tmp_path: Path) -> None:
    found = only(judged(tmp_path, storage_plugins=[]), PROBLEM)
    assert "names no storage_plugins" in found.what


@pytest.mark.parametrize("key", ["module_path", "class_name"])
def test_a_plugin_without_a_path_is_named(tmp_path: Path, key: str) -> None:
    setting = f"storage_plugin.fx100.{key}"
    found = graded(judged(tmp_path, extra_config={setting: ""}), PROBLEM)
    assert setting in found[0].what
    assert setting in found[0].do


def test_other_plugins_alone_are_a_problem(tmp_path: Path) -> None:
    extra = {"storage_plugin.fx100.class_name": "Another"}
    found = only(judged(tmp_path, extra_config=extra), PROBLEM)
    assert "none of the plugins (fx100)" in found.what


def test_the_plugin_must_know_its_volume(tmp_path: Path) -> None:
    found = only(judged(tmp_path, vllm_settings(None)), PROBLEM)
    assert "no fx100.config" in found.what
    assert str(tmp_path / "fx100.yaml") in found.do


def test_the_plugin_must_know_this_volume(tmp_path: Path) -> None:
    found = only(judged(tmp_path, vllm_settings("/elsewhere/fx100.yaml")), PROBLEM)
    assert "/elsewhere/fx100.yaml" in found.what


def test_a_relative_path_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = only(judged(tmp_path, vllm_settings("fx100.yaml")), NOTE)
    assert "relative" in found.what
    assert str(tmp_path / "fx100.yaml") in found.do


@pytest.mark.parametrize(
    "setting",
    [
        "enable_blending",
        "enable_p2p",
        "enable_controller",
        "enable_pd",
        "enable_scheduler_bypass_lookup",
    ],
)
def test_what_the_plugin_refuses_is_a_problem(tmp_path: Path, setting: str) -> None:
    fields: dict[str, Any] = {setting: True}
    found = only(judged(tmp_path, **fields), PROBLEM)
    assert found.what.startswith(f"{setting} is on")
    assert "refuses to start" in found.why
    assert found.do == f"set {setting}: false"


def test_no_host_memory_at_all_is_a_problem(tmp_path: Path) -> None:
    assert "max_local_cpu_size" in only(judged(tmp_path, max_local_cpu_size=0), PROBLEM).do


@pytest.mark.parametrize(
    ("fields", "what", "do"),
    [
        ({"enable_async_loading": True}, "enable_async_loading", "set local_cpu: false"),
        ({"store_location": "LocalDiskBackend"}, "store_location", "add 'fx100'"),
        ({"retrieve_locations": ["Other"]}, "retrieve_locations", "add 'fx100'"),
        (
            {"extra_config": {"audit_backend_enabled": True}},
            "audit_backend_enabled",
            "set audit_backend_enabled: false",
        ),
    ],
)
def test_what_the_plugin_warns_of_is_a_warning(
    tmp_path: Path, fields: dict[str, Any], what: str, do: str
) -> None:
    found = judged(tmp_path, **fields)
    assert only(found, WARNING).what.startswith(what)
    assert only(found, WARNING).do == do
    assert not graded(found, PROBLEM)


def test_another_connector_is_a_warning(tmp_path: Path) -> None:
    content = vllm_settings(tmp_path / "fx100.yaml")
    content["kv-transfer-config"]["kv_connector"] = "Another"
    assert "LMCacheConnectorV1Dynamic" in only(judged(tmp_path, content), WARNING).do


def test_vllms_own_connector_does_not_find_its_half_in_a_newer_lmcache(tmp_path: Path) -> None:
    content = vllm_settings(tmp_path / "fx100.yaml")
    transfer = content["kv-transfer-config"]
    transfer["kv_connector"] = "LMCacheConnectorV1"
    del transfer["kv_connector_module_path"]
    assert {each.severity for each in judged(tmp_path, content, lmcache="0.5.6")} == {OK}
    found = only(judged(tmp_path, content, lmcache="0.5.7rc2"), PROBLEM)
    assert "LMCache 0.5.7rc2" in found.what
    assert "kv_connector: LMCacheConnectorV1Dynamic" in found.do
    assert "kv_connector_module_path: lmcache.integration.vllm.lmcache_connector_v1" in found.do


@pytest.mark.parametrize("module", [None, "lmcache.integration.vllm.vllm_v1_adapter"])
def test_lmcaches_connector_must_be_said_where_to_find(tmp_path: Path, module: str | None) -> None:
    content = vllm_settings(tmp_path / "fx100.yaml")
    content["kv-transfer-config"]["kv_connector_module_path"] = module
    assert "kv_connector_module_path" in only(judged(tmp_path, content), PROBLEM).what


def test_what_upstream_announces_for_this_mode_is_said(tmp_path: Path) -> None:
    found = only(judged(tmp_path, lmcache="0.5.7rc2"), NOTE)
    assert "deprecated" in found.what
    assert "lmcache server" in found.do
