"""Pulling paths: by a program of the user's, since only the site knows its switches and cables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fx100_lmcache.accept.bench import Bench, Paths
from fx100_lmcache.accept.steps import CannotRunError
from fx100_lmcache.errors import FX100Error

MAX_PATHS = 64
_HOOK_S = 120.0


class HookedPaths:
    """Paths that ``PROGRAM list``, ``PROGRAM down NAME`` and ``PROGRAM up NAME`` know.

    The tests' own target has such a program; on a site it asks a switch, or a person.
    """

    def __init__(self, bench: Bench, program: Path) -> None:
        self._bench = bench
        self._program = program

    def names(self) -> Sequence[str]:
        """Return the paths that may be pulled: one a line of what it prints."""
        lines = self._call("list").split("\n")
        names = [line.strip() for line in lines if line.strip()]
        if not 0 < len(names) <= MAX_PATHS:
            raise CannotRunError(f"{self._program} list: 1 to {MAX_PATHS} lines are wanted")
        return names

    def down(self, name: str) -> None:
        """Take a path away."""
        self._call("down", name)

    def up(self, name: str) -> None:
        """Give it back."""
        self._call("up", name)

    def _call(self, *words: str) -> str:
        name = f"path-{'-'.join(words)}".replace("/", "_")[:100]
        ended = self._bench.run([str(self._program), *words], name, _HOOK_S)
        if ended.code:
            said = ended.stderr.decode(errors="replace").strip()
            raise FX100Error(f"{self._program} {' '.join(words)}: exit code {ended.code}: {said}")
        return ended.stdout.decode(errors="replace")


def hooked_paths(bench: Bench, program: Path | None) -> Paths | None:
    """Return the paths of a program, None if none was named."""
    return None if program is None else HookedPaths(bench, program.absolute())
