"""What the matrix writes down, and how it reads pytest's report."""

from collections import Counter
from pathlib import Path

import pytest

from matrix import cell, table

PAGE = f"""before

{table.BEGIN}
{table.HEAD}
| 3.11 | 0.5.6 | 0.32.0 | 3 passed | 4 passed | 2026-01-01 |
| 3.11 | 0.5.10 | 0.32.0 | 1 passed | 1 passed | 2026-01-01 |
{table.END}

after
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_row_takes_the_place_of_the_one_before_and_others_stay(page: Path) -> None:
    row = ("none", "5 passed", "1 failed", "2026-02-02")
    table.update(page, {("3.11", "0.5.6"): row, ("3.9", "0.5.7rc2"): row})
    lines = page.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert [line.split(" | ")[:2] for line in lines if line.startswith("| 3.")] == [
        ["| 3.9", "0.5.7rc2"],
        ["| 3.11", "0.5.6"],
        ["| 3.11", "0.5.10"],
    ]
    assert "| 3.11 | 0.5.6 | none | 5 passed | 1 failed | 2026-02-02 |" in lines
    assert "| 3.11 | 0.5.10 | 0.32.0 | 1 passed | 1 passed | 2026-01-01 |" in lines


def test_writing_nothing_changes_nothing(page: Path) -> None:
    table.update(page, {})
    assert page.read_text() == PAGE


def test_a_page_without_a_place_for_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("nothing here")
    with pytest.raises(ValueError, match="has no"):
        table.update(path, {})


REPORT = """<testsuites><testsuite>
<testcase classname="tests.lmcache.mp.test_a" name="one"/>
<testcase classname="tests.lmcache.mp.test_a" name="two"><skipped/></testcase>
<testcase classname="tests.lmcache.inprocess.test_b" name="three"><failure/></testcase>
<testcase classname="tests.lmcache.inprocess.test_b" name="four"><error/></testcase>
</testsuite></testsuites>"""


def test_counts_are_told_apart_by_face_and_errors_are_failures(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = cell.read(path)
    assert found["mp"].counts == Counter(passed=1, skipped=1)
    assert str(found["mp"]) == "1 passed, 1 skipped"
    assert found["mp"].good
    assert found["in-process"].names == [
        "tests.lmcache.inprocess.test_b::three",
        "tests.lmcache.inprocess.test_b::four",
    ]
    assert not found["in-process"].good


def test_a_face_of_which_nothing_ran_is_not_good() -> None:
    assert not cell.Outcome(Counter(skipped=5)).good
