"""A process that forks with a store open: the child's copy is inert, the parent goes on."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fx100_lmcache.testing.volumes import file_volume
from support.engine import needs_native


@pytest.mark.parametrize("engine", ["python", pytest.param("native", marks=needs_native)])
def test_a_forked_child_does_nothing_and_waits_for_nobody(engine: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-members-") as folder:
        config = file_volume(
            Path(folder),
            volume={"object": 65536},
            io={"engine": engine, "reader_threads": 4, "writer_threads": 2},
        )
        found = subprocess.run(
            [sys.executable, "-m", "support.forking", config],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert (found.returncode, found.stdout) == (0, "passed\n"), found.stderr
