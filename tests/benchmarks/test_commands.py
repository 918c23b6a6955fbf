"""One tiny run of each command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.emulated import missing
from support import ROOT

NEEDS_FIO = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(300)]


def run(tmp_path: Path, *words: object) -> list[dict[str, object]]:
    """Run a command with --json; return its rows."""
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{words[0]}", *map(str, words[1:])]
    done = subprocess.run(
        [*command, "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = sorted(tmp_path.glob("result*.json"))
    return [row for one in found for row in json.loads(one.read_text())["rows"]]


def test_plan(tmp_path: Path) -> None:
    rows = run(tmp_path, "plan", "--model", "tiny-demo", "--published")
    assert any(row.get("model") == "tiny-demo" for row in rows)
    assert sum("verdict" in row for row in rows) == 11


def test_engine(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        *("engine", "--object-bytes", 65536, "--objects", 4, "--rounds", 2, "--runs", 1),
        *("--directory", tmp_path),
    )
    assert len(rows) == 2 * 4


@NEEDS_FIO
def test_disk(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        *("disk", "--object-bytes", 4 << 20, "--objects", 4, "--runs", 1),
        *("--directory", ROOT / ".cache"),
    )
    assert len(rows) == 2


@NEEDS_FIO
def test_replay_survives_the_kill(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        *("replay", "--model", "tiny-demo", "--scale", 0.02, "--concurrency", 2, "--runs", 1),
        *("--backend", "ours", "--mode", "idle,stores"),
        *("--directory", tmp_path, "--memory", tmp_path, "--plot", tmp_path / "plot"),
    )
    assert [row["mode"] for row in rows] == ["idle", "stores"]
    assert all(row["hit rate"] == 1.0 for row in rows)
    facts = json.loads((tmp_path / "result.json").read_text())["method"]["backends"]
    assert all(one["found"] == one["stored"] and one["wrong"] == 0 for one in facts.values())
    assert (tmp_path / "plot.png").stat().st_size
    assert (tmp_path / "plot.svg").stat().st_size


@pytest.mark.skipif(bool(missing()), reason=missing() or "the emulation works here")
def test_members(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        *("members", "--model", "tiny-demo", "--concurrency", 2, "--runs", 1, "--delay-ms", 1),
        *("--directory", tmp_path, "--memory", tmp_path),
    )
    assert {"one member, one chunk at a time", "four members, parallel"} <= {
        str(row["contender"]) for row in rows
    }


def test_mooncake(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"input_length": 1024, "hash_ids": ids} for ids in ([1, 2], [1, 3], [1, 2])]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = run(
        tmp_path,
        *("mooncake", trace, "--backend", "ours", "--model", "tiny-demo", "--concurrency", 1),
        *("--capacity", 4, "--directory", tmp_path, "--memory", tmp_path),
    )
    assert rows[0]["hit rate"] == pytest.approx(6 / 12)


def test_churn(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        *("churn", "--backend", "ours", "--capacity-chunks", 32, "--session-chunks", 4),
        *("--times", 2, "--pace-s", 0, "--runs", 1, "--shrink", 31),
        *("--directory", tmp_path, "--memory", tmp_path),
    )
    assert (rows[0]["newest found"], rows[0]["wrong"]) == (1.0, 0)


@pytest.mark.parametrize(
    "words",
    [
        ("entries", "--counts", "100,200"),
        ("chunks", "--sizes", "32,64", "--total-mib", 1, "--runs", 1),
        ("members", "--counts", "1,2", "--chunk-bytes", 65536, "--count", 4, "--runs", 1),
        ("processes", "--counts", "1,2", "--chunk-bytes", 65536, "--count", 4, "--runs", 1),
    ],
    ids=lambda words: words[0],
)
def test_scale(tmp_path: Path, words: tuple[object, ...]) -> None:
    assert len(run(tmp_path, "scale", *words, "--directory", tmp_path)) >= 2


def test_failures(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        *("failures", "--backend", "ours", "--backend", "fs", "--failure", "flipped bit"),
        *("--directory", tmp_path, "--memory", tmp_path),
    )
    ours, fs = rows
    assert (ours["acknowledged"], ours["found"], ours["wrong"]) == (24, 23, 0)
    assert fs["wrong"] == 1
