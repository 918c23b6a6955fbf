"""A real file system that runs out of space below a store: a tmpfs of 40 MiB."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import SUPPORT

CHILD = SUPPORT / "thin_child.py"
MOUNT = 'mount -t tmpfs -o size=40m tmpfs "$1" && exec "$2" "$3" "$1"'


def in_small_tmpfs(directory: Path) -> dict[str, Any]:
    """Run the child with a tmpfs that nobody else sees, and that goes with it."""
    command: list[str | Path] = [
        "unshare",
        "-m",
        "sh",
        "-c",
        MOUNT,
        "sh",
        directory,
        sys.executable,
        CHILD,
    ]
    try:
        trial = subprocess.run(
            ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs "$1"', "sh", directory],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare (package util-linux)")
    if trial.returncode:
        pytest.skip(f"needs a mount namespace of its own (root): {trial.stderr.strip()}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_members_of_200_mib_in_a_file_system_of_40(tmp_path: Path) -> None:
    found = in_small_tmpfs(tmp_path)
    assert found["wrong"] == 0
    assert found["states"] == ["up", "up"]
    assert set(found["outcomes"]) <= {"stored", "no_space_below"}
    assert int(str(found["stored"])) >= 100  # of 150, though 30 fit
    assert int(str(found["right"])) >= 20
    assert found["newest"] == "right"
    problems = found["problems"]
    assert isinstance(problems, list)
    assert problems
    assert all("no space below" in problem and "bytes are there" in problem for problem in problems)
    assert found["healthy at last"]
    assert found["last"] == ["stored"]
    assert found["left"] == 0
    assert int(str(found["right again"])) >= 15
