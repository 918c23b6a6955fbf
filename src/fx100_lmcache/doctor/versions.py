"""LMCache and vLLM: which are installed, and whether those are supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.findings import Finding, problem
from fx100_lmcache.lmcache.versions import LMCACHE, VLLM, installed_version

NEEDED_BY = {LMCACHE: (MP, IN_PROCESS), VLLM: (IN_PROCESS,)}
"""Modes that need a program in this environment."""

EXTRAS = {LMCACHE: "lmcache", VLLM: "gpu"}
"""What installs it: an extra of our package."""


def check_versions(
    question: Question, version_of: Callable[[str], str | None] | None = None
) -> Iterator[Finding]:
    """Judge what is installed in this Python environment.

    Parameters
    ----------
    version_of : callable or None
        Version of an installed package, or None; by default what Python itself says.
    """
    for program, modes in NEEDED_BY.items():
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
