"""The tables of docs/metrics.md, and the names in the code, are those of the tables in the code."""

import re

import pytest

from fx100_lmcache.counters import ADAPTER, PLUGIN, STORE, Tally
from fx100_lmcache.metrics import (
    COUNTERS,
    EVENTS,
    GAUGES,
    INODE_USES,
    LOADS,
    LOOKUPS,
    PUTS,
    USES,
    place_of,
)
from fx100_lmcache.ondisk.reason import Reason
from support import ROOT

SOURCE = ROOT / "src" / "fx100_lmcache"
DOC = (ROOT / "docs" / "metrics.md").read_text()


def table(heading: str) -> dict[str, tuple[str, ...]]:
    """Rows under a heading: first cell, without backticks -> the other cells."""
    section = DOC.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    body = section.split("|---|", 1)[1]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", body, re.MULTILINE)
    return {name: tuple(cell.strip() for cell in rest.split("|")) for name, rest in rows}


def test_metrics_are_those_of_the_document() -> None:
    expected = {
        f"{m.name}_total": (f"`{m.label}`" if m.label else "", m.text) for m in COUNTERS.values()
    }
    assert table("## Counters") == expected
    expected = {m.name: (f"`{m.label}`" if m.label else "", m.text) for m in GAUGES.values()}
    assert table("## Gauges") == expected


def test_label_values_are_those_of_the_document() -> None:
    for heading, values in (
        ("### Outcomes of lookups", LOOKUPS),
        ("### Outcomes of loads", LOADS),
        ("### Outcomes of puts", PUTS),
        ("### Events", EVENTS),
        ("### Uses of space", USES),
        ("### Uses of inodes", INODE_USES),
    ):
        assert table(heading) == {name: (text,) for name, text in values.items()}, heading


def counted() -> set[str]:
    """Every counter name that stands in the code of the store and of the faces."""
    found = {"bounced_transfers", "internal_errors", "writes_without_claim"}
    found |= {f"inodes_dropped_{reason}" for reason in Reason}
    patterns = {
        r'counts\["(\w+)"\]': "",
        r'counts\.add\(\s*"(\w+)"': "",
        r'\bcaught\(\s*"(\w+)"': "",
        r'self\._count\("(\w+)"\)': "",
        r'self\._miss\("(\w+)"\)': "load_miss_",
        r'reasons\.append\("(\w+)"\)': "load_miss_",
    }
    folders = (SOURCE / "store", SOURCE / "lmcache", SOURCE / "nvmf")
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        text = path.read_text()
        for pattern, prefix in patterns.items():
            found |= {prefix + name for name in re.findall(pattern, text)}
    put = (SOURCE / "store" / "put.py").read_text()
    for pattern in (r'_drop\("(\w+)"\)', r'_wait\(\w+, "(\w+)"\)', r'reason="(\w+)"\)'):
        found |= {f"put_drop_{name}" for name in re.findall(pattern, put)} - {"put_drop_joined"}
    lost = (SOURCE / "store" / "ownership.py").read_text().split("def why_not")[1].split("def ")[0]
    found |= {f"put_drop_{name}" for name in re.findall(r'"(claim_\w+)"', lost)}
    queue = (SOURCE / "lmcache" / "inprocess" / "puts.py").read_text()
    taken = queue.split("def _take")[1].split("\n    def ")[0]
    return found | {f"put_{name}" for name in re.findall(r'return "(\w+)"', taken)}


def test_every_counter_of_the_code_is_in_a_table_and_has_its_place() -> None:
    names = counted()
    assert len(names) > 40, "the patterns of this test find nothing any more"
    assert names - set(STORE) - set(ADAPTER) - set(PLUGIN) == set()
    for name in sorted(names):
        metric, value = place_of(name)
        assert value in COUNTERS[metric].values or not COUNTERS[metric].label, name


def test_nothing_is_described_that_the_code_does_not_count() -> None:
    shown = {place_of(name) for name in counted()}
    assert set(EVENTS) == {value for metric, value in shown if metric == "events"}
    assert set(LOADS) == {value for metric, value in shown if metric == "loads"}
    puts = {value for metric, value in shown if metric == "puts"}
    assert set(PUTS) - puts <= {"dropped_error"}, "the reason of a transfer that failed"


def test_a_counter_that_is_in_no_table_does_harm_in_tests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tally = Tally(STORE)
    assert dict(tally) == dict.fromkeys(STORE, 0)
    with pytest.raises(KeyError, match=r"unheard_of.*fx100_lmcache\.counters"):
        tally["unheard_of"] += 1
    monkeypatch.setattr(Tally, "strict", False)
    tally["unheard_of"] += 1
    tally["evictions"] += 2
    assert (tally["unheard_of"], tally["evictions"]) == (1, 2)
