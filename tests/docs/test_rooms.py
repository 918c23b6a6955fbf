"""The rule of `docs/architecture.md` on which room may import which, held to the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

PACKAGE = "fx100_lmcache"
SOURCE = ROOT / "src" / PACKAGE
DOC = ROOT / "docs" / "architecture.md"
EDGES_ONLY = {"lmcache": {"lmcache"}, "torch": {"lmcache"}, "vllm": {"lmcache"}}
"""Third-party packages, and the only rooms that may import them."""


def room_of(path: Path) -> str:
    """Name the room of a source file: its folder, or the file itself if it has none."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imported(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == PACKAGE
            yield from (f"{PACKAGE}.{a.name}" for a in node.names) if whole else (node.module,)


def allowed() -> dict[str, set[str]]:
    """Read the table of the page: room -> rooms that it may import."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", DOC.read_text(), re.M)
    return {room: set(re.findall(r"`(\w+)`", may)) for room, may in rows}


def rooms() -> set[str]:
    return {room_of(path) for path in SOURCE.rglob("*.py")} - {"__init__"}


def test_the_page_names_every_room_and_no_other() -> None:
    assert set(allowed()) == rooms()


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_imports_only_what_the_page_lets_it(room: str) -> None:
    may = allowed()[room] | {room, "__version__"}
    wrong = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in SOURCE.rglob("*.py")
        if room_of(path) == room
        for module in imported(path)
        if module.startswith(f"{PACKAGE}.") and module.split(".")[1] not in may
    ]
    assert wrong == []


def test_the_rooms_have_no_cycle() -> None:
    left = {room: may - {room} for room, may in allowed().items()}
    while left:
        free = [room for room, may in left.items() if not may & set(left)]
        assert free, f"a cycle among {sorted(left)}"
        for room in free:
            del left[room]


def test_lmcache_torch_and_vllm_are_imported_at_the_edge_alone() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in SOURCE.rglob("*.py")
        for module in imported(path)
        if (may := EDGES_ONLY.get(module.split(".")[0])) is not None and room_of(path) not in may
    ]
    assert wrong == []


def test_lmcaches_names_are_imported_in_one_place_alone() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE / "lmcache" / "compat"
        for module in imported(path)
        if module.split(".")[0] == "lmcache"
    ]
    assert wrong == []


def test_the_rule_notices_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(f"def f():\n    from {PACKAGE} import cli\n    import {PACKAGE}.cli.console\n")
    assert list(imported(wrong)) == [f"{PACKAGE}.cli", f"{PACKAGE}.cli.console"]
