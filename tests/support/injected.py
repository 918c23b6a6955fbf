"""Exceptions at the k-th call of something that a face calls."""

from collections.abc import Callable
from typing import Any

import pytest


class InjectedError(Exception):
    """What the k-th call raises."""


class Injection:
    """Counts calls of functions that were put in its way, and lets one of them fail.

    Parameters
    ----------
    fail_at : int
        Number of the call that fails, from 1 on; 0 lets none fail.
    after : bool
        Whether it fails after it has done its work.
    """

    def __init__(self, fail_at: int, *, after: bool = False) -> None:
        self.fail_at = fail_at
        self.after = after
        self.calls = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def injected(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            number = self.calls
            if number == self.fail_at and not self.after:
                raise InjectedError(f"call {number}")
            result = call(*args, **kwargs)
            if number == self.fail_at:
                raise InjectedError(f"after call {number}")
            return result

        return injected

    def into(self, patch: pytest.MonkeyPatch, owner: Any, *names: str) -> None:
        """Put it in the way of attributes of an object, a class or a module."""
        for name in names:
            patch.setattr(owner, name, self.around(getattr(owner, name)))


def each_call(run: Callable[[Injection], None], *, after: bool = False) -> int:
    """Run something once undisturbed, then with each of the calls failing; return how many."""
    undisturbed = Injection(0)
    run(undisturbed)
    for number in range(1, undisturbed.calls + 1):
        run(Injection(number, after=after))
    return undisturbed.calls
