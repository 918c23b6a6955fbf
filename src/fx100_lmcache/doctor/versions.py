"""LMCache and vLLM: which are installed, and whether those are supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fx100_lmcache.doctor.findings import IN_PROCESS, MP, Question, ok, problem, warning
from fx100_lmcache.lmcache.versions import LMCACHE, VLLM, Fit, Supported, installed_version
from fx100_lmcache.nvmf.check import Finding

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
            yield _judge(program, found)
        elif needed:
            yield problem(
                program.name,
                "not installed in this Python environment",
                f"mode {', '.join(sorted(needed))} runs inside it",
                f"run fx100 with the Python of vLLM or of `lmcache server`; or: "
                f"pip install 'fx100-lmcache[{EXTRAS[program]}]'",
            )


def _judge(program: Supported, found: str) -> Finding:
    subject, fit = f"{program.name} {found}", program.fit(found)
    if fit is Fit.TESTED:
        return ok(subject, "is supported")
    if fit is Fit.UNTESTED:
        return warning(
            subject,
            f"was not tested; {program.tested} was",
            "its interfaces should be the same, but nobody has looked",
            program.install,
        )
    return problem(
        subject,
        f"is outside the supported range: {program.series}.*",
        "the interfaces that LMCache and vLLM load us through change between such versions",
        program.install,
    )
