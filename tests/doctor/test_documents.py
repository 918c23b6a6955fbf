import json
from pathlib import Path

import pytest
import yaml

from fx100_lmcache.doctor.documents import DocumentError, EngineSettings, read_document
from support import ROOT
from support.doctor import inprocess_settings, vllm_settings, written

CONFIGS = ROOT / "configs"


def test_lmcache_file_is_read_and_the_rest_is_its_default(tmp_path: Path) -> None:
    path = written(tmp_path / "lmcache.yaml", {"chunk_size": 64, "local_cpu": False})
    document = read_document(path, {})
    assert document.engine == EngineSettings(chunk_size=64, local_cpu=False)
    assert document.load_failure_policy is None
    assert document.connector is None


def test_vllm_file_and_flag_say_the_same(tmp_path: Path) -> None:
    content = vllm_settings("/x.yaml", chunk_size=64)
    file = read_document(written(tmp_path / "a", content), {})
    flag = read_document(written(tmp_path / "b", content["kv-transfer-config"]), {})
    text = {"kv-transfer-config": json.dumps(content["kv-transfer-config"])}
    quoted = read_document(written(tmp_path / "c", text), {})
    assert file.engine == flag.engine == quoted.engine
    assert file.engine is not None
    assert file.engine.chunk_size == 64
    assert file.engine.storage_plugins == ("fx100",)
    assert file.load_failure_policy == "recompute"
    assert file.connector == "LMCacheConnectorV1Dynamic"
    assert file.connector_module == "lmcache.integration.vllm.lmcache_connector_v1"


def test_vllm_fails_requests_unless_told_otherwise(tmp_path: Path) -> None:
    document = read_document(written(tmp_path / "a", vllm_settings(None, policy=None)), {})
    assert document.load_failure_policy == "fail"


def test_variables_win_over_lmcache_file_and_vllm_over_both(tmp_path: Path) -> None:
    file = written(tmp_path / "lmcache.yaml", {"chunk_size": 1, "max_local_cpu_size": 2})
    environment = {
        "LMCACHE_CONFIG_FILE": str(file),
        "LMCACHE_CHUNK_SIZE": "3",
        "LMCACHE_LOCAL_CPU": "false",
        "LMCACHE_USE_LAYERWISE": "True",
        "UNRELATED": "x",
    }
    alone = read_document(file, environment).engine
    assert alone == EngineSettings(3, False, 2.0, use_layerwise=True)
    content = {"kv_connector": "C", "kv_connector_extra_config": {"lmcache.chunk_size": 4}}
    inside = read_document(written(tmp_path / "vllm", content), environment).engine
    assert inside == EngineSettings(4, False, 2.0, use_layerwise=True)


def test_text_is_converted_as_lmcache_does(tmp_path: Path) -> None:
    content = {"storage_plugins": "a, b", "max_local_cpu_size": "1.5", "extra_config": '{"k": 1}'}
    engine = read_document(written(tmp_path / "a", content), {}).engine
    assert engine is not None
    assert engine.storage_plugins == ("a", "b")
    assert engine.max_local_cpu_size == 1.5
    assert engine.get_extra_config_value("k") == 1
    assert engine.get_extra_config_value("other", 2) == 2


def test_mp_connector_has_no_settings_of_the_engine(tmp_path: Path) -> None:
    document = read_document(CONFIGS / "vllm-mp.yaml", {})
    assert document.engine is None
    assert document.connector == "LMCacheMPConnector"


def test_adapter_value_is_recognised(tmp_path: Path) -> None:
    value = {"type": "plugin", "module_path": "m", "class_name": "C"}
    document = read_document(written(tmp_path / "a", value), {})
    assert document.adapter == value
    assert document.engine is None


@pytest.mark.parametrize("name", ["lmcache-inprocess.yaml", "vllm-inprocess.yaml"])
def test_shipped_files_set_what_matters(name: str) -> None:
    engine = read_document(CONFIGS / name, {}).engine
    assert engine is not None
    assert engine.storage_plugins == ("fx100",)
    assert engine.pre_caching_hash_algorithm == "sha256_cbor"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"chunk_size": "many"}, "chunk_size cannot be 'many'"),
        ({"local_cpu": "maybe"}, "local_cpu cannot be 'maybe'"),
        ({"extra_config": [1]}, "extra_config cannot be [1]"),
        ({"kv-transfer-config": "{"}, "kv-transfer-config is not JSON"),
        ({"kv-transfer-config": "[]"}, "kv-transfer-config holds no settings"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, content: dict, told: str) -> None:
    path = written(tmp_path / "a", content)
    with pytest.raises(DocumentError) as raised:
        read_document(path, {})
    assert told in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", [b"a: [", b"- 1", b"", b"\xff\xfe\x00", b"text"])
def test_what_is_no_settings_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=str(path)):
        read_document(path, {})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="No such file"):
        read_document(tmp_path / "gone", {})


@pytest.mark.lmcache
@pytest.mark.filterwarnings("ignore")
def test_defaults_and_names_are_those_of_lmcache() -> None:
    config = pytest.importorskip("lmcache.v1.config", reason="needs the lmcache package")
    theirs = config.LMCacheEngineConfig.from_defaults()
    ours = EngineSettings()
    for name in ours.__dataclass_fields__:
        value = getattr(ours, name)
        expected = getattr(theirs, name)
        assert (value or None) == (expected or None), name


def test_settings_of_the_rig_are_plain(tmp_path: Path) -> None:
    settings = inprocess_settings("/x.yaml")
    assert yaml.safe_load(json.dumps(settings)) == settings
