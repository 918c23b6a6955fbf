"""Fails one call after the other, one per run: memory may lack wherever something is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from fx100_lmcache.testing.interpose import SOURCE

ALLOCATING = ("numpy", "_heapq", "fx100_lmcache")
"""Modules whose functions in C allocate, when one of our functions calls them."""


class FailingCall:
    """Has the call with one number raise MemoryError; of this thread, while it is entered.

    Calls of our functions count, and those that our functions make of numpy, heapq and the C
    extension.

    Parameters
    ----------
    folders : tuple of str
        The packages of ours whose functions fail.
    spared : set of str
        Functions that do not: they allocate nothing.
    number : int
        Of the call that fails, from 0.

    Attributes
    ----------
    failed : str
        Name of the function that failed; empty if there were fewer calls.
    """

    def __init__(self, folders: tuple[str, ...], spared: set[str], number: int) -> None:
        self._folders = tuple(str(SOURCE / folder) for folder in folders)
        self._spared = spared
        self._left = number
        self.failed = ""

    def __enter__(self) -> FailingCall:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._folders):
            self._strike(frame.f_code.co_name)
        elif event == "c_call" and frame.f_code.co_filename.startswith(self._folders):
            module = getattr(arg, "__module__", None) or type(arg.__self__).__module__
            if module.startswith(ALLOCATING):
                self._strike(arg.__name__)

    def _strike(self, name: str) -> None:
        if name in self._spared or name.startswith("<"):
            return
        self._left -= 1
        if self._left < 0:
            sys.setprofile(None)
            self.failed = name
            raise MemoryError(f"injected into {name}")


def each_failing_call(
    folders: tuple[str, ...], spared: set[str], scenario: Callable[[FailingCall], None]
) -> Iterator[str]:
    """Run a scenario with the first call failing, then the second, until none is left to fail.

    Yields
    ------
    str
        The function that failed.
    """
    number = 0
    while True:
        failing = FailingCall(folders, spared, number)
        scenario(failing)
        if not failing.failed:
            return
        yield failing.failed
        number += 1
