import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import churn, members, replay
from benchmarks.all import PARTS, README, markdown, replace_block
from benchmarks.bounded import shrunk, used_bytes
from benchmarks.common import Sample, Series, cell, publish
from benchmarks.failures import flip
from benchmarks.l1 import Arena
from benchmarks.options import numbers
from benchmarks.replay import compare_with_idle, summary


def test_every_part_has_its_place_in_the_readme() -> None:
    text = README.read_text()
    for part in PARTS:
        assert replace_block(text, part.name, "x").count(f"<!-- begin {part.name} -->") == 1


def test_a_block_is_replaced_and_nothing_else() -> None:
    text = "a\n<!-- begin t -->\nold\n<!-- end t -->\nz\n"
    once = replace_block(text, "t", "new")
    assert once == "a\n<!-- begin t -->\nnew\n<!-- end t -->\nz\n"
    assert replace_block(once, "t", "new") == once
    with pytest.raises(ValueError, match="begin u"):
        replace_block(text, "u", "new")


def test_a_result_is_a_table_and_json(tmp_path: Path) -> None:
    publish(
        "title", [{"a": 1, "_hidden": 2}, {"a": 0.12345, "b": True}], {"runs": 5}, tmp_path / "r"
    )
    result = json.loads((tmp_path / "r").read_text())
    assert result["method"] == {"runs": 5}
    assert result["machine"]["cores"] == os.cpu_count()
    table = markdown(result)
    assert "| a | b |" in table
    assert "| 0.123 | yes |" in table
    assert "_hidden" not in table


def test_cells_are_short() -> None:
    assert [cell(v) for v in (True, 0.123456, 1234.5, 7, "x")] == ["yes", "0.123", "1234", "7", "x"]


def test_series_report_medians() -> None:
    series = Series(
        "s", [Sample(1.0, 0.5, 10**9), Sample(2.0, 0.5, 10**9), Sample(4.0, 0.5, 10**9)]
    )
    assert series.median("gb_per_s") == 0.5
    assert series.spread("gb_per_s") == (0.25, 1.0)
    assert series.median("cpu_s_per_gb") == 0.5


def test_the_arena_sees_wrong_stale_and_missing_pages(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "l1", 2, 10_000)
    arena.stamp(0, 5)
    assert arena.holds(0, 5)
    assert not arena.holds(0, 6)
    assert not arena.holds(1, 5)
    other = Arena(tmp_path / "l1", 2, 10_000)
    assert other.holds(0, 5), "processes share the memory"
    other.erase(0)
    assert not arena.holds(0, 5)


def test_a_bit_is_flipped_where_the_chunk_lies(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "l1", 2, 8192)
    arena.stamp(0, 3)
    arena.stamp(1, 4)
    assert flip(tmp_path, 3) == 1
    assert not arena.holds(0, 3)
    assert arena.holds(1, 4)
    assert flip(tmp_path, 9) == 0


def test_a_cell_of_the_replay_counts_misses() -> None:
    result = {
        "wall_s": 2.0,
        "cpu_s": 0.5,
        "device_read_bytes": 10**9,
        "session_s": [1.0, 2.0],
        "asked": 20,
        "loaded": 10,
        "stored_beside_per_s": 0.0,
    }
    facts = {"direct_io": True, "kill_to_first_hit_s": 3.0, "open_s": 0.1}
    row = summary(("ours", "idle", 2), [result, result], 10**8, 1.0, facts)
    assert row["hit rate"] == 0.5
    assert row["GB/s"] == pytest.approx(0.5)
    assert row["of fio"] == pytest.approx(0.5)
    assert row["from device"] == pytest.approx(1.0)
    assert row["CPU s/GB"] == pytest.approx(0.5)
    assert (row["p50 s"], row["p99 s"]) == (1.0, 2.0)
    assert summary(("ours", "busy", 2), [result], 10**8, 0.0, facts)["of fio"] == "no fio"


def test_cells_are_compared_with_the_idle_one() -> None:
    rows = [
        {"backend": name, "mode": mode, "concurrency": 4, "p95 s": seconds}
        for name, mode, seconds in (
            ("ours", "idle", 2.0),
            ("ours", "stores", 3.0),
            ("fs", "busy", 1.0),
        )
    ]
    compare_with_idle(rows)
    assert [row["p95 to idle"] for row in rows] == [1.0, 1.5, "-"]


def test_numbers_are_read_with_commas_between() -> None:
    assert numbers("1, 4,16") == [1, 4, 16]


@pytest.mark.parametrize("text", ["", "1,,2", "0", "-1", "1.5", "x"])
def test_what_is_no_number_is_named(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="numbers with commas"):
        numbers(text)


@pytest.mark.parametrize("command", [churn.app, members.app, replay.app])
def test_an_unknown_model_is_refused_before_anything_starts(command: typer.Typer) -> None:
    said = CliRunner().invoke(command, ["--model", "gpt-99"], env={"COLUMNS": "200"})
    assert said.exit_code == 2
    assert "known: qwen3-coder-480b-tp8" in said.output


def test_smaller_chunks_are_whole_pages() -> None:
    sizing = shrunk("qwen3-coder-480b-tp8", 31, 10)
    assert (sizing.chunk_bytes, sizing.capacity_bytes) == (262_144, 2_621_440)
    assert shrunk("tiny-demo", 1_000_000, 1).chunk_bytes == 4096


def test_the_disk_use_of_a_directory_counts_blocks(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(bytes(8192))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert 8192 <= used_bytes(tmp_path) < 1 << 20
