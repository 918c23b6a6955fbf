import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cli import Owner, Rig, formatted


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A formatted volume of two files."""
    return formatted(tmp_path / "volume")


@pytest.fixture
def owner() -> Iterator[Callable[..., Owner]]:
    """Start processes that own volumes; all are killed at the end."""
    started: list[Owner] = []

    def start(config: Path, *options: str) -> Owner:
        started.append(Owner(config, *options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Make block devices of files."""
    devices: list[str] = []

    def make(name: str, size_bytes: int = 4 << 20, sector: int = 4096) -> Path:
        if os.geteuid():
            pytest.skip("needs root to make loop devices (losetup)")
        backing = tmp_path / name
        backing.write_bytes(bytes(size_bytes))
        command = ["losetup", "--find", "--show", "--sector-size", str(sector), str(backing)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("needs losetup (package util-linux)")
        if done.returncode:
            pytest.skip(f"needs loop devices with --sector-size: {done.stderr.strip()}")
        devices.append(done.stdout.strip())
        return Path(devices[-1])

    yield make
    for device in devices:
        subprocess.run(["losetup", "--detach", device], check=True)
