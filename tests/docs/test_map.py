"""The map leads to what it promises: files that there are, functions that are in them."""

import ast
import re
from pathlib import Path

import pytest

from support import ROOT

SOURCE = ROOT / "src" / "fx100_lmcache"
MAP = (ROOT / "docs" / "architecture.md").read_text()
README = (ROOT / "README.md").read_text()


def names_in(path: Path) -> set[str]:
    """Names of the functions and classes of a file; of a C file, every word."""
    text = path.read_text()
    if path.suffix == ".c":
        return set(re.findall(r"\w+", text))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


def found(name: str) -> list[Path]:
    """Source files whose path ends so."""
    return [p for p in SOURCE.rglob(Path(name).name) if str(p.relative_to(SOURCE)).endswith(name)]


def section(text: str, heading: str) -> str:
    return text.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize(
    "text", [section(MAP, "## Four trails"), section(README, "## Development")]
)
def test_every_file_that_is_named_is_there(text: str) -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|c))`", text))
    assert len(named) >= 6
    assert [name for name in sorted(named) if not found(name)] == []


@pytest.mark.parametrize(
    "text", [section(MAP, "## Four trails"), section(README, "## Development")]
)
def test_every_function_that_is_named_is_in_its_file(text: str) -> None:
    pairs = re.findall(r"`([\w/]+\.(?:py|c))`,? `([\w.]+)`", text)
    assert len(pairs) >= 5
    wrong = [
        (file, name)
        for file, name in pairs
        if not any(set(name.split(".")) <= names_in(path) for path in found(file))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("question", "answer", "file", "code"),
    [
        ("where is a checksum compared", "checksums are compared in", "engine/_pool.c", "expected"),
        ("where is an object evicted", "(`evict.py`)", "store/evict.py", "self._eraser.drop"),
        ("where is a lost path noticed", "is noticed in `health.py`", "engine/health.py", "_row"),
        (
            "where does a put become visible",
            "visible in `_publish`",
            "store/put.py",
            "catalog.add(",
        ),
    ],
)
def test_the_readme_answers_the_four_questions(
    question: str, answer: str, file: str, code: str
) -> None:
    reading = " ".join(section(README, "## Development").split())
    assert answer in reading, question
    assert code in (SOURCE / file).read_text(), question


def test_every_thread_that_is_made_is_on_the_page() -> None:
    made = set()
    for path in SOURCE.rglob("*.py"):
        if "testing" not in path.parts:
            text = path.read_text()
            made |= set(re.findall(r'(?:name=|name: str = |, )f?"(fx100-[a-z]+)', text))
    made -= {"fx100-lmcache", "fx100-plain"}
    assert len(made) >= 12
    assert {name for name in made if name not in section(MAP, "## Threads")} == set()


def test_every_lock_that_is_made_is_on_the_page() -> None:
    """By the file's name, or the class's, or among those that nothing is called under."""
    leaves = {"burst_log", "metrics", "defects", "error_boundary", "counts", "buffers"}
    locks = section(MAP, "## Locks")
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if "testing" in path.parts or not re.search(r"threading\.(?:R?Lock|Condition)\(\)", text):
            continue
        named = {path.stem, *re.findall(r"^class (\w+)", text, re.M)}
        assert path.stem in leaves or any(name in locks for name in named), path
