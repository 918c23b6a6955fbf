"""LMCache's settings inside vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

from fx100_lmcache.doctor.documents import Document, EngineSettings
from fx100_lmcache.findings import Finding, note, ok, problem, warning
from fx100_lmcache.lmcache.inprocess.checks import (
    STABLE_HASH,
    SUBJECT,
    Host,
    UnsupportedSetupError,
    check_hash,
    check_setup,
    warnings_for,
)
from fx100_lmcache.lmcache.versions import DEPRECATED, has_moved

CONNECTOR = "LMCacheConnectorV1Dynamic"
CONNECTOR_MODULE = "lmcache.integration.vllm.lmcache_connector_v1"
VLLMS_CONNECTOR = "LMCacheConnectorV1"
"""vLLM's own; up to 0.34 it imports a module that LMCache 0.5.7 has moved."""

OUR_CLASS = "FX100StoragePlugin"


def check_inprocess(
    document: Document | None,
    config_path: Path,
    environment: Mapping[str, str] = os.environ,
    lmcache: str | None = None,
) -> Iterator[Finding]:
    """Judge what LMCache and vLLM are told.

    Parameters
    ----------
    document : Document or None
        What their file says; None if none was given.
    config_path : Path
        Our own YAML, which LMCache must be told of.
    lmcache : str or None
        Version that is installed.
    """
    if document is None or document.engine is None:
        yield note(
            "in-process: settings",
            "hash, host memory, plugin and load failure policy were not checked",
            "LMCache's defaults find nothing again after a restart",
            "give --lmcache-config with LMCache's file, or vLLM's (configs/vllm-inprocess.yaml)",
        )
        return
    engine, file = document.engine, document.path
    yield from _check_plugins(engine, file, config_path)
    yield _check_hash(engine, environment)
    yield from _check_policy(document)
    yield from _check_connector(document, lmcache)
    yield from _check_refused(engine, file)
    host = Host()  # its policy is judged above, with its own words
    yield from warnings_for(engine, host, _our_names(engine))


def _check_plugins(engine: EngineSettings, file: Path, config_path: Path) -> Iterator[Finding]:
    subject = "in-process: storage_plugins"
    why = "LMCache does not load the plugin, logs nothing of it, and finds nothing"
    if not engine.storage_plugins:
        do = "see configs/lmcache-inprocess.yaml: storage_plugins: [fx100], and its extra_config"
        yield problem(subject, f"{file} names no storage_plugins", why, do)
        return
    for name in engine.storage_plugins:
        for key in ("module_path", "class_name"):
            setting = f"storage_plugin.{name}.{key}"
            if not engine.get_extra_config_value(setting):
                what = f"extra_config of {file} has no {setting}"
                yield problem(subject, what, why, f"add {setting} to extra_config")
    if not _our_names(engine):
        names = ", ".join(engine.storage_plugins)
        what = f"none of the plugins ({names}) has class_name {OUR_CLASS}"
        yield problem(subject, what, why, f"storage_plugin.NAME.class_name: {OUR_CLASS}")
        return
    yield _check_path(engine, file, config_path)


def _our_names(engine: EngineSettings) -> list[str]:
    return [
        name
        for name in engine.storage_plugins
        if engine.get_extra_config_value(f"storage_plugin.{name}.class_name") == OUR_CLASS
    ]


def _check_path(engine: EngineSettings, file: Path, config_path: Path) -> Finding:
    subject, named = "in-process: fx100.config", engine.get_extra_config_value("fx100.config")
    if not isinstance(named, str) or not named:
        return problem(
            subject,
            f"extra_config of {file} has no fx100.config",
            "the plugin does not know its volume, and LMCache goes on without it",
            f"add fx100.config: {config_path.absolute()} to extra_config",
        )
    path = Path(named).expanduser()
    if path.absolute().resolve() != config_path.absolute().resolve():
        return problem(
            subject,
            f"is {named}, which from here is not {config_path}",
            "what is checked here is not what the plugin opens",
            f"set fx100.config: {config_path.absolute()}, or: fx100 doctor {named}",
        )
    if not path.is_absolute():
        return note(
            subject,
            f"is {named}, relative to where vLLM is started",
            "started elsewhere, the plugin does not find it",
            f"set fx100.config: {path.absolute()}",
        )
    return ok(subject, f"is {named}")


def _check_hash(engine: EngineSettings, environment: Mapping[str, str]) -> Finding:
    algorithm, subject = engine.pre_caching_hash_algorithm, "in-process: hash"
    seed = environment.get("PYTHONHASHSEED")
    try:
        check_hash(algorithm, environment)
    except UnsupportedSetupError:
        return problem(
            subject,
            f"pre_caching_hash_algorithm {algorithm} without PYTHONHASHSEED is another one after "
            "every start",
            "nothing that was stored is ever found again; the plugin refuses to start",
            f"set {STABLE_HASH}",
        )
    if seed not in (None, "random"):
        return ok(subject, f"{algorithm} with PYTHONHASHSEED={seed}, if vLLM has that too")
    return ok(subject, f"{algorithm} is the same after every start")


def _check_policy(document: Document) -> Iterator[Finding]:
    subject, policy = "in-process: kv_load_failure_policy", document.load_failure_policy
    do = 'set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
    why = "a chunk that cannot be read fails its request instead of being computed"
    if policy is None:
        yield note(subject, f"not in {document.path}; vLLM's default is fail", why, do)
    elif policy != "recompute":
        yield problem(subject, f"is {policy}", why, do)
    else:
        yield ok(subject, "is recompute")


def _check_connector(document: Document, lmcache: str | None) -> Iterator[Finding]:
    """Judge what vLLM is to load; it does not start with what it cannot import.

    Parameters
    ----------
    lmcache : str or None
        Version that is installed.
    """
    subject, named, module = (
        "in-process: kv_connector",
        document.connector,
        document.connector_module,
    )
    do = f"set kv_connector: {CONNECTOR}, kv_connector_module_path: {CONNECTOR_MODULE}"
    moved = lmcache is not None and has_moved(lmcache)
    if named == CONNECTOR and module != CONNECTOR_MODULE:
        where = f"kv_connector_module_path {module}" if module else "no kv_connector_module_path"
        yield problem(subject, f"{named} with {where}", "vLLM does not find it", do)
    elif named == VLLMS_CONNECTOR and moved:
        what = f"is {named}, which cannot be loaded with LMCache {lmcache}"
        yield problem(subject, what, "it imports what LMCache 0.5.7 has moved: no vLLM starts", do)
    elif named not in (None, CONNECTOR, VLLMS_CONNECTOR):
        what = f"is {named}, not {CONNECTOR}"
        yield warning(subject, what, "only with the latter was LMCache inside vLLM tested", do)
    if moved:
        yield note("in-process: mode", *DEPRECATED)


def _check_refused(engine: EngineSettings, file: Path) -> Iterator[Finding]:
    """Ask the plugin's own checks, for an ordinary model on one rank."""
    role = "scheduler" if engine.enable_scheduler_bypass_lookup else "worker"
    metadata = SimpleNamespace(role=role, use_mla=False)
    pool = None if engine.max_local_cpu_size <= 0 else object()
    try:
        check_setup(engine, metadata, pool)
    except UnsupportedSetupError as error:
        why = f"{error.why}; the plugin refuses to start, and LMCache goes on without it"
        yield problem(SUBJECT, f"{error.found} ({file})", why, error.remedy or "")
