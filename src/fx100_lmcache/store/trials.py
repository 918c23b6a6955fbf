"""Tries again, at a measured pace, whether members without space below have some."""

from __future__ import annotations

from collections.abc import Callable

from fx100_lmcache.store.state import Core

WhenOurs = Callable[[Callable[[bool], None]], None]


class SpaceTrials:
    """Writes what belongs to nobody, when the engine has looked at a member.

    Parameters
    ----------
    when_ours : callable
        ``when_ours(go)`` calls ``go(ours)`` when it is known whether the shards are still ours:
        what is free to us may be somebody else's by now.
    """

    def __init__(self, core: Core, when_ours: WhenOurs) -> None:
        self._core = core
        self._when_ours = when_ours

    def look(self, member: int) -> None:
        """Begin a trial of a member whose label could be read, if one is due."""
        core = self._core
        with core.lock:
            due = not core.closing and core.backing.due(member)
        if due:
            self._when_ours(lambda ours: self._try(member) if ours else None)

    def _try(self, member: int) -> None:
        core = self._core
        with core.lock:
            if not core.backing.due(member):
                return  # another look was faster
            job = core.backing.trial(member, lambda works: self._tried(member, works))
            if job is not None:
                core.send(job)
            else:
                core.wake()

    def _tried(self, member: int, works: bool) -> None:
        with self._core.lock:
            self._core.backing.tried(member, works)
            self._core.wake()
