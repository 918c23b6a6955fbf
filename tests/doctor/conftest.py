import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OWNER = """
import sys
from fx100_lmcache.config import load
from fx100_lmcache.mount import mount
mounted = mount(load(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
mounted.close()
"""


@pytest.fixture
def owner() -> Iterator[Callable[[Path], int]]:
    """Start processes that own a volume; returns their process ids."""
    started: list[subprocess.Popen[str]] = []

    def start(config: Path) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        return process.pid

    yield start
    for process in started:
        process.communicate("", timeout=30)
