"""The adapter of LMCache's server, as its ``--l2-adapter`` names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fx100_lmcache.config import Config
from fx100_lmcache.doctor.documents import Document
from fx100_lmcache.findings import Finding, note, ok, problem, warning

_SUBJECT = "mp: --l2-adapter"


def check_adapter(
    document: Document | None, config: Config, config_path: Path
) -> Iterator[Finding]:
    """Judge the value of ``--l2-adapter``; whether its class can be loaded is judged elsewhere."""
    printed = f"fx100 l2-adapter {config_path}"
    if document is None or document.adapter is None:
        yield note(
            _SUBJECT,
            "not checked",
            "LMCache's server must be told of the adapter, its configuration, and when to evict",
            f'lmcache server ... --l2-adapter "$({printed})"',
        )
        return
    adapter = document.adapter
    if adapter.get("type") != "plugin":
        yield problem(
            _SUBJECT,
            f"type is {adapter.get('type')!r}, not 'plugin'",
            "LMCache's server does not start, or with another adapter",
            printed,
        )
    yield _check_path(adapter, config_path, printed)
    yield _check_eviction(adapter, config, printed)


def _check_path(adapter: Mapping[str, Any], config_path: Path, printed: str) -> Finding:
    given = adapter.get("adapter_params") or {}
    named = given.get("config") if isinstance(given, dict) else None
    if not isinstance(named, str) or set(given) != {"config"}:
        return problem(
            _SUBJECT,
            f'adapter_params must be {{"config": PATH}}, not {given!r}',
            "LMCache's server does not start",
            printed,
        )
    if Path(named).expanduser().absolute().resolve() != config_path.absolute().resolve():
        return problem(
            _SUBJECT,
            f"adapter_params.config is {named}, which from here is not {config_path}",
            "what is checked here is not what the server opens",
            printed,
        )
    return ok(_SUBJECT, f"adapter_params.config is {named}")


def _check_eviction(adapter: Mapping[str, Any], config: Config, printed: str) -> Finding:
    eviction = adapter.get("eviction")
    if not isinstance(eviction, dict):
        return warning(
            _SUBJECT,
            "has no eviction block",
            "LMCache never evicts, so the store does, which does not know what is in use",
            printed,
        )
    limit, mark = 1 - config.space.reserve_fraction, eviction.get("trigger_watermark")
    if isinstance(mark, int | float) and mark > limit:
        return warning(
            _SUBJECT,
            f"trigger_watermark {mark:g} lies above 1 - space.reserve_fraction, {limit:g}",
            "the store evicts by itself before LMCache ever does",
            printed,
        )
    return ok(_SUBJECT, f"eviction begins at {mark}")
