"""LMCache and vLLM: which are installed, and whether those are supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.findings import Finding, problem
from fx100_lmcache.lmcache.versions import (
    LMCACHE,
    LMCACHE_INPROCESS,
    VLLM,
    Supported,
    installed_version,
)

EXTRAS = {LMCACHE: "lmcache", LMCACHE_INPROCESS: "lmcache", VLLM: "gpu"}
"""What installs it: an extra of our package."""


def built_for() -> list[str]:
    """Say, one line each, which versions of other programs this package is for."""
    modes = {LMCACHE: "lmcache server", LMCACHE_INPROCESS: "LMCache inside vLLM", VLLM: "vLLM"}
    return [
        f"{modes[program]}: {program.name} {program.range} (tested: {', '.join(program.tested)})"
        for program in modes
    ]


def installed_lmcache() -> str | None:
    """Return LMCache's version in this Python environment, None if there is none."""
    return LMCACHE.installed(installed_version)


def _needed(question: Question) -> dict[Supported, tuple[str, ...]]:
    """Return the programs to judge, each with the modes that need it in this environment.

    Where both modes are asked about, the narrower range of LMCache holds.
    """
    lmcache = LMCACHE if MP in question.modes else LMCACHE_INPROCESS
    return {lmcache: (MP, IN_PROCESS), VLLM: (IN_PROCESS,)}


def check_versions(
    question: Question, version_of: Callable[[str], str | None] | None = None
) -> Iterator[Finding]:
    """Judge what is installed in this Python environment.

    Parameters
    ----------
    version_of : callable or None
        Version of an installed package, or None; by default what Python itself says.
    """
    for program, modes in _needed(question).items():
        found = program.installed(version_of or installed_version)
        needed = question.modes.intersection(modes)
        if found is not None:
            yield program.judge(found)
        elif needed:
            yield problem(
                program.name,
                "not installed in this Python environment",
                f"mode {', '.join(sorted(needed))} runs inside it",
                f"run fx100 with the Python of vLLM or of `lmcache server`; or: "
                f"pip install 'fx100-lmcache[{EXTRAS[program]}]'",
            )
