"""The table of ``docs/compatibility.md``: rows that are not run now stay as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

BEGIN, END = "<!-- matrix: written by make test-matrix -->", "<!-- end of matrix -->"
HEAD = (
    "| Python | LMCache | vLLM | `lmcache server` | inside vLLM | when |\n|---|---|---|---|---|---|"
)

Key = tuple[str, str]
"""Python and LMCache."""


def update(page: Path, rows: Mapping[Key, tuple[str, str, str, str]]) -> None:
    """Put rows into the page, in place of those with the same key.

    Parameters
    ----------
    rows : mapping
        vLLM, both faces and the date, by Python and LMCache.
    """
    before, inside, after = _parts(page.read_text())
    both = {**_rows(inside), **rows}
    lines = ("| " + " | ".join((*key, *both[key])) + " |" for key in sorted(both, key=_order))
    page.write_text("\n".join([f"{before}{BEGIN}", HEAD, *lines, f"{END}{after}"]))


def _parts(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return before, inside, after


def _rows(inside: str) -> dict[Key, tuple[str, str, str, str]]:
    found = {}
    for line in inside.strip().splitlines()[2:]:
        python, lmcache, vllm, mp, inprocess, when = (
            x.strip() for x in line.strip("| ").split("|")
        )
        found[python, lmcache] = (vllm, mp, inprocess, when)
    return found


def _order(key: Key) -> tuple[list[int], list[int], str]:
    python, lmcache = key
    return _numbers(python), _numbers(lmcache), lmcache


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
