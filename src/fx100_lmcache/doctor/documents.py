"""LMCache's and vLLM's files -> settings.

Three kinds of file are understood: LMCache's own YAML (``LMCACHE_CONFIG_FILE``), vLLM's YAML or
the JSON of its ``--kv-transfer-config``, and the JSON of ``lmcache server --l2-adapter``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fx100_lmcache.errors import FX100Error

MP_CONNECTOR = "LMCacheMPConnector"
DEFAULT_LOAD_FAILURE_POLICY = "fail"
"""vLLM 0.32, ``KVTransferConfig.kv_load_failure_policy``."""

_PREFIX = "lmcache."
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class DocumentError(FX100Error):
    """A file of LMCache or vLLM cannot be read, or is none."""


@dataclass(frozen=True)
class EngineSettings:
    """LMCache's configuration inside vLLM, as far as it concerns us.

    The names are LMCache's, the defaults those of LMCache 0.5.6 (``v1/config.py``).
    """

    chunk_size: int = 256
    local_cpu: bool = True
    max_local_cpu_size: float = 5.0
    pre_caching_hash_algorithm: str = "builtin"
    storage_plugins: tuple[str, ...] = ()
    retrieve_locations: tuple[str, ...] | None = None
    store_location: str | None = None
    use_layerwise: bool = False
    enable_async_loading: bool = False
    enable_blending: bool = False
    enable_p2p: bool = False
    enable_controller: bool = False
    enable_pd: bool = False
    enable_scheduler_bypass_lookup: bool = False
    extra_config: Mapping[str, Any] = field(default_factory=dict)

    def get_extra_config_value(self, key: str, default: Any = None) -> Any:
        """Return a value of ``extra_config``, as LMCache's own class does."""
        return self.extra_config.get(key, default)


@dataclass(frozen=True)
class Document:
    """What one file says.

    Attributes
    ----------
    engine : EngineSettings or None
        For LMCache inside vLLM.
    adapter : mapping or None
        Value of ``--l2-adapter``.
    connector : str or None
        vLLM's KV connector.
    connector_module : str or None
        Where vLLM is to import it from; None if it is one of vLLM's own.
    load_failure_policy : str or None
        What vLLM does when a promised load fails; None if the file is not vLLM's.
    """

    path: Path
    engine: EngineSettings | None = None
    adapter: Mapping[str, Any] | None = None
    connector: str | None = None
    connector_module: str | None = None
    load_failure_policy: str | None = None


def read_document(path: Path, environment: Mapping[str, str]) -> Document:
    """Read a file of LMCache or vLLM.

    Parameters
    ----------
    environment : mapping
        Its ``LMCACHE_*`` variables win over LMCache's file, and vLLM's settings over both.

    Raises
    ------
    DocumentError
        If it cannot be read, or a value is of the wrong type.
    """
    content = _read(path)
    if "module_path" in content:
        return Document(path, adapter=content)
    transfer = _transfer_config(path, content)
    if transfer is None:
        return Document(path, engine=_engine(path, {**content, **_variables(environment)}))
    extra = transfer.get("kv_connector_extra_config") or {}
    connector = str(transfer.get("kv_connector", ""))
    engine = None
    if connector != MP_CONNECTOR:
        named = environment.get("LMCACHE_CONFIG_FILE")
        values = _read(Path(named)) if named else {}
        values |= _variables(environment)
        values |= {
            name.removeprefix(_PREFIX): value
            for name, value in extra.items()
            if name.startswith(_PREFIX)
        }
        engine = _engine(path, values)
    policy = str(transfer.get("kv_load_failure_policy", DEFAULT_LOAD_FAILURE_POLICY))
    return Document(
        path,
        engine=engine,
        connector=connector,
        connector_module=transfer.get("kv_connector_module_path"),
        load_failure_policy=policy,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DocumentError(f"{path} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        raise DocumentError(f"{path} holds no settings")
    return content


def _transfer_config(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the value of ``--kv-transfer-config``; None if the file is not vLLM's."""
    if "kv_connector" in content:
        return content
    for name in ("kv-transfer-config", "kv_transfer_config"):
        if name in content:
            value = content[name]
            try:
                value = json.loads(value) if isinstance(value, str) else value
            except json.JSONDecodeError as error:
                raise DocumentError(f"{path}: {name} is not JSON: {error}") from error
            if not isinstance(value, dict):
                raise DocumentError(f"{path}: {name} holds no settings")
            return value
    return None


def _variables(environment: Mapping[str, str]) -> dict[str, Any]:
    names = {f"LMCACHE_{field.name.upper()}": field.name for field in _FIELDS}
    return {names[name]: value for name, value in environment.items() if name in names}


_FIELDS = dataclasses.fields(EngineSettings)


def _engine(path: Path, values: Mapping[str, Any]) -> EngineSettings:
    given = {}
    for each in _FIELDS:
        value = values.get(each.name)
        if value is None:
            continue
        try:
            given[each.name] = _CONVERT[str(each.type)](value)
        except (ValueError, TypeError) as error:
            raise DocumentError(f"{path}: {each.name} cannot be {value!r}") from error
    return EngineSettings(**given)


def _bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(value)
    return text in _TRUE


def _names(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(str(part).strip() for part in parts)


def _mapping(value: Any) -> Mapping[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise TypeError(value)
    return found


_CONVERT: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": _bool,
    "str": str,
    "str | None": str,
    "tuple[str, ...]": _names,
    "tuple[str, ...] | None": _names,
    "Mapping[str, Any]": _mapping,
}
