"""What the tests of the doctor share: small volumes, configurations, and how findings are read."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fx100_lmcache.config import Config, parse
from fx100_lmcache.findings import Finding, Severity
from fx100_lmcache.testing.volumes import file_volume

PROBLEM, WARNING, NOTE, OK = Severity.PROBLEM, Severity.WARNING, Severity.NOTE, Severity.OK


def config_of(**sections: Any) -> Config:
    """Make a configuration whose members do not exist."""
    volume = {"members": [{"path": "/nowhere/m0"}], "object": "1MiB", **sections.pop("volume", {})}
    return parse(yaml.safe_dump({"volume": volume, **sections}), Path("/nowhere/fx100.yaml"))


def write_volume(directory: Path, *, members: int = 2, size: str = "4MiB", **sections: Any) -> Path:
    """Write a YAML of a file volume and format it."""
    volume = {"object": "64KiB", **sections.pop("volume", {})}
    return file_volume(directory, members=members, size=size, volume=volume, **sections)


def inprocess_settings(config: Path | str | None, **fields: Any) -> dict[str, Any]:
    """LMCache's settings as they should be."""
    extra = {
        "storage_plugin.fx100.module_path": "fx100_lmcache.lmcache.plugin",
        "storage_plugin.fx100.class_name": "FX100StoragePlugin",
        **fields.pop("extra_config", {}),
    }
    if config is not None:
        extra["fx100.config"] = str(config)
    return {
        "chunk_size": 256,
        "max_local_cpu_size": 1,
        "pre_caching_hash_algorithm": "sha256_cbor",
        "storage_plugins": ["fx100"],
        "extra_config": extra,
        **fields,
    }


def vllm_settings(
    config: Path | str | None, policy: str | None = "recompute", **fields: Any
) -> Any:
    """vLLM's settings, with LMCache's inside."""
    settings = inprocess_settings(config, **fields)
    transfer: dict[str, Any] = {
        "kv_connector": "LMCacheConnectorV1Dynamic",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {f"lmcache.{key}": value for key, value in settings.items()},
    }
    if policy is not None:
        transfer["kv_load_failure_policy"] = policy
    return {"kv-transfer-config": transfer}


def written(path: Path, content: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def graded(findings: Iterable[Finding], severity: Severity) -> list[Finding]:
    return [each for each in findings if each.severity is severity]


def only(findings: Iterable[Finding], severity: Severity) -> Finding:
    """Return the one finding of a severity; it must say why it matters and what to type."""
    [found] = graded(findings, severity)
    assert found.why
    assert found.do or severity is NOTE
    return found
