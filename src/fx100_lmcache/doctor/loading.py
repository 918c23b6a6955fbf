"""Whether LMCache would find our classes, tried in another process.

In a process of its own, because importing LMCache takes seconds, prints, and changes loggers.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fx100_lmcache.child import TooMuchOutputError, run_child
from fx100_lmcache.doctor.documents import Document
from fx100_lmcache.doctor.import_probe import MARK
from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.findings import Finding, ok, problem

TIMEOUT_S = 120.0
"""Importing LMCache and torch takes 5 to 30 s on a cold machine."""


@dataclass(frozen=True)
class Target:
    """A class that LMCache is told to load.

    Attributes
    ----------
    subject : str
        Who names it.
    base : str
        What LMCache wants it to be, as ``module:Class``.
    """

    subject: str
    module_path: str
    class_name: str
    base: str


@dataclass(frozen=True)
class Outcome:
    """How an import went; see :func:`fx100_lmcache.doctor.import_probe.probe`."""

    outcome: str
    detail: str = ""
    names: tuple[str, ...] = ()


ADAPTER = Target(
    "mp: adapter",
    "fx100_lmcache.lmcache.l2_adapter",
    "FX100L2Adapter",
    "lmcache.v1.distributed.l2_adapters.base:L2AdapterInterface",
)
PLUGIN = Target(
    "in-process: plugin",
    "fx100_lmcache.lmcache.plugin",
    "FX100StoragePlugin",
    "lmcache.v1.storage_backend.abstract_backend:StoragePluginInterface",
)


def targets(question: Question, document: Document | None) -> list[Target]:
    """List the classes to try: those that the document names, else our own."""
    found = []
    if MP in question.modes:
        named = (document.adapter if document else None) or {}
        module, name = named.get("module_path"), named.get("class_name")
        found.append(_replaced(ADAPTER, ADAPTER.subject, module, name) if named else ADAPTER)
    if IN_PROCESS in question.modes:
        engine = document.engine if document else None
        plugins = [] if engine is None else engine.storage_plugins
        for plugin in plugins:
            keys = (f"storage_plugin.{plugin}.{key}" for key in ("module_path", "class_name"))
            module, name = map(engine.get_extra_config_value, keys) if engine else (None, None)
            if module and name:  # else the settings are at fault
                found.append(_replaced(PLUGIN, f"in-process: plugin {plugin}", module, name))
        if not plugins:
            found.append(PLUGIN)
    return found


def _replaced(like: Target, subject: str, module: object, name: object) -> Target:
    return Target(subject, str(module or ""), str(name or ""), like.base)


def try_imports(wanted: Sequence[Target]) -> list[Outcome]:
    """Import all of them in one other process, with this Python."""
    if not wanted:
        return []
    arguments = [part for t in wanted for part in (t.module_path, t.class_name, t.base)]
    command = [sys.executable, "-P", "-m", "fx100_lmcache.doctor.import_probe", *arguments]
    try:
        done = asyncio.run(run_child(command, TIMEOUT_S))
    except TimeoutError:
        return [Outcome("import failed", f"not done after {TIMEOUT_S:g} s")] * len(wanted)
    except (TooMuchOutputError, OSError) as error:
        return [Outcome("import failed", f"{sys.executable}: {error}")] * len(wanted)
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            return [
                Outcome(each["outcome"], each["detail"], tuple(each["names"]))
                for each in json.loads(line.removeprefix(MARK))
            ]
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    return [Outcome("import failed", f"Python ended with {done.code}: {last[0]}")] * len(wanted)


def check_loading(wanted: Sequence[Target], outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    """Judge how the imports went."""
    for target, outcome in zip(wanted, outcomes, strict=True):
        yield _judge(target, outcome)


def _judge(target: Target, outcome: Outcome) -> Finding:
    path = f"{target.module_path}.{target.class_name}"
    right = PLUGIN if target.base == PLUGIN.base else ADAPTER
    why = "LMCache only logs that, and goes on without the store"
    if right is ADAPTER:
        why = "LMCache's server does not start"
    correct = f"module_path: {right.module_path}, class_name: {right.class_name}"
    subject = target.subject
    if outcome.outcome == "ok":
        return ok(subject, f"{path} can be loaded")
    if outcome.outcome == "no module":
        what = f"there is no module {target.module_path!r} ({outcome.detail})"
        return problem(subject, what, why, f"set {correct}; or: pip install fx100-lmcache")
    if outcome.outcome == "no class":
        close = difflib.get_close_matches(target.class_name, outcome.names, 1, 0.5)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        what = f"{target.module_path} has no class {target.class_name!r}{meant}"
        return problem(subject, what, why, f"set {correct}")
    if outcome.outcome == "wrong base":
        what = f"{path} is not a {outcome.detail} of LMCache"
        return problem(subject, what, why, f"set {correct}")
    if outcome.outcome == "no base":
        what = f"LMCache has no {target.base.partition(':')[2]} ({outcome.detail})"
        return problem(subject, what, why, "pip install 'fx100-lmcache[lmcache]'")
    what = f"importing {target.module_path} fails: {outcome.detail}"
    return problem(subject, what, why, f"python -c 'import {target.module_path}'")
