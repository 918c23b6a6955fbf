"""The error for a release of LMCache that we cannot work with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fx100_lmcache.errors import FX100Error
from fx100_lmcache.lmcache.versions import Supported, installed_version


class UnsupportedReleaseError(FX100Error):
    """A release of LMCache lacks something, or has it in another form; says which to install."""


def unsupported(program: Supported, what: str) -> UnsupportedReleaseError:
    """Make the error, one line.

    Parameters
    ----------
    what : str
        What is different.
    """
    found = program.installed(installed_version)
    return UnsupportedReleaseError(
        f"{program.name} {found} cannot be used: {what}. Supported is {program.range}. "
        f"Run: {program.install}"
    )


@contextmanager
def imports_of(program: Supported) -> Iterator[None]:
    """Import names of a program; where one is missing, say which release has it.

    Raises
    ------
    UnsupportedReleaseError
        If the program is there, and a name is not.
    ModuleNotFoundError
        If the program is not installed.
    """
    try:
        yield
    except ImportError as problem:
        if problem.name == program.distributions[0]:
            raise
        raise unsupported(program, str(problem)) from problem
