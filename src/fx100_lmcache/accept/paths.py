"""Pulling paths: by a program of the user's, since only the site knows its switches and cables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fx100_lmcache.accept.bench import Bench, Paths
from fx100_lmcache.accept.devices import fabric_controllers, member_files, snapshot_of
from fx100_lmcache.accept.steps import CannotRunError, Outcome, does_not_apply, not_run
from fx100_lmcache.errors import FX100Error

MAX_PATHS = 64
_HOOK_S = 120.0
_READ_S, _POLL_S = 10.0, 0.5
_SETTLE_S = 2.0
"""Between a path's loss and the look whether reads go on over the others."""


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


def pull_each(bench: Bench) -> Outcome:
    """Pull every path once: reads go on over the others, and it comes back by itself."""
    before = fabric_controllers(snapshot_of(bench))
    if not before:
        return does_not_apply("no member is reached over a fabric")
    if bench.paths is None:
        return not_run("no --path-hook was given, so nothing here can pull a path")
    outcome = Outcome()
    live = sum(each.state == "live" for each in before)
    for name in bench.paths.names():
        bench.say(f"pulling {name}")
        _pull(bench, bench.paths, name, live, outcome)
    return outcome


def _pull(bench: Bench, paths: Paths, name: str, live: int, outcome: Outcome) -> None:
    limit_s = bench.criteria.g1.path_back_s
    paths.down(name)
    try:
        bench.pause(_SETTLE_S)
        if live > 1:
            stopped = unreadable(bench)
            found = f"{', '.join(stopped)} cannot be read" if stopped else "all members are read"
            outcome.judge(f"{name} pulled", found, "reads go on over the others", not stopped)
        else:
            outcome.note(f"{name} pulled", "the only path: reads were not tried")
    finally:
        paths.up(name)
    back_s = until_back(bench, live, limit_s)
    found = f"after {back_s:.1f} s" if back_s is not None else f"not within {limit_s:g} s"
    outcome.judge(f"{name} back", found, f"within {limit_s:g} s", back_s is not None)


def until_back(bench: Bench, live: int, limit_s: float) -> float | None:
    """Return after how long as many paths are live and every member is read; None: too long."""
    started = bench.now()
    while True:
        states = [each.state for each in fabric_controllers(snapshot_of(bench))]
        if states.count("live") >= live and not unreadable(bench):
            return bench.now() - started
        if bench.now() - started > limit_s:
            return None
        bench.pause(_POLL_S)


def unreadable(bench: Bench) -> list[str]:
    """Return the members whose first 4 KiB cannot be read, each tried in a process of its own."""
    return [str(path) for path in member_files(bench) if not _is_read(bench, path)]


def _is_read(bench: Bench, path: Path) -> bool:
    argv = ["dd", f"if={path}", "of=/dev/null", "bs=4096", "count=1", "iflag=direct"]
    try:
        return bench.run(argv, f"read-{path.name}", _READ_S).code == 0
    except CannotRunError:  # a read that hangs is what is looked for
        return False
