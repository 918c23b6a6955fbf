"""Whether a release of LMCache has what ours implements and calls. Found at start.

LMCache catches what an adapter raises and goes on without it, so that a method that takes other
arguments than it is given would be nothing but lookups that miss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from fx100_lmcache.lmcache.compat.release import unsupported
from fx100_lmcache.lmcache.versions import Supported

_VARIABLE = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


@dataclass(frozen=True)
class Contract:
    """What one of our classes relies on.

    Attributes
    ----------
    program : Supported
        Whose releases are meant.
    base : type
        What our class inherits from; it calls our methods as it declares them.
    calls : tuple of (callable, names)
        What we call, with the arguments that we give, in order.
    members : tuple of (object, names)
        What else we use of a class or module.
    attributes : tuple of str
        What the base's constructor sets, and we use.
    """

    program: Supported
    base: type
    calls: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]
    members: tuple[tuple[Any, tuple[str, ...]], ...]
    attributes: tuple[str, ...]

    def check(self, ours: type) -> None:
        """Compare our class with the release that is installed.

        Raises
        ------
        UnsupportedReleaseError
            Names the first difference, and the release to install.
        """
        self._refuse(self._differences(ours))

    def check_instance(self, made: object) -> None:
        """Compare an instance of ours, after the base's constructor.

        Raises
        ------
        UnsupportedReleaseError
            As above.
        """
        name = self.base.__name__
        self._refuse(f"{name} has no {each}" for each in self.attributes if not hasattr(made, each))

    def _refuse(self, differences: Iterator[str]) -> None:
        first = next(differences, None)
        if first is not None:
            raise unsupported(self.program, first)

    def _differences(self, ours: type) -> Iterator[str]:
        name = self.base.__name__
        for method in sorted(getattr(ours, "__abstractmethods__", ())):
            yield f"{name} wants {method}, which we do not have"
        for method, theirs in inspect.getmembers(self.base, inspect.isfunction):
            mine = getattr(ours, method)
            if not method.startswith("_") and mine is not theirs and not _takes(mine, theirs):
                yield f"{name}.{method} is called with {_names(theirs)}, ours with {_names(mine)}"
        for called, given in self.calls:
            if _names(called)[: len(given)] != given or not _suffices(called, len(given)):
                yield f"{called.__qualname__} takes {_names(called)}, we give {given}"
        for owner, wanted in self.members:
            for member in wanted:
                if not hasattr(owner, member):
                    yield f"{getattr(owner, '__name__', owner)} has no {member}"


def _parameters(called: Callable[..., Any]) -> list[Parameter]:
    """List what a callable takes, without self."""
    return [p for n, p in inspect.signature(called).parameters.items() if n != "self"]


def _names(called: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(p.name for p in _parameters(called) if p.kind not in _VARIABLE)


def _suffices(called: Callable[..., Any], given: int) -> bool:
    """Whether nothing beyond the first arguments must be given."""
    left = _parameters(called)[given:]
    return all(p.default is not Parameter.empty or p.kind in _VARIABLE for p in left)


def _takes(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether ours can be called as theirs: the same names in the same order, more if optional."""
    wanted = _names(theirs)
    return _names(ours)[: len(wanted)] == wanted and _suffices(ours, len(wanted))
