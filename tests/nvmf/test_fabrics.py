"""A secret goes from its file through a pipe into the kernel, and nowhere else."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.nvmf import fabrics
from fx100_lmcache.nvmf.errors import CommandError, SecretError
from fx100_lmcache.nvmf.fabrics import connect_with_secret, read_secret

SECRET = "DHHC-1:01:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
OPTIONS = "transport=tcp,nqn=nqn.2024-01.io.fx100:array,traddr=10.0.0.1"


@pytest.fixture
def secret_file(tmp_path: Path) -> Any:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    return file


def test_options_and_secret_arrive_in_one_piece(
    secret_file: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    device = tmp_path / "nvme-fabrics"
    device.touch()

    asyncio.run(connect_with_secret(OPTIONS, secret_file, 30.0, device))

    assert device.read_text() == f"{OPTIONS},dhchap_secret={SECRET}"
    assert f"dhchap_secret=(from {secret_file})" in caplog.text
    assert SECRET not in caplog.text


def test_secret_is_on_no_command_line_and_in_no_environment(
    secret_file: Any, tmp_path: Path
) -> None:
    """Hold the child in its open of a FIFO, and look at every process that can be seen."""
    device = tmp_path / "nvme-fabrics"
    os.mkfifo(device)

    async def look() -> Any:
        task = asyncio.create_task(connect_with_secret(OPTIONS, secret_file, 3.0, device))
        while not (children := list(processes_with(str(device)))):
            await asyncio.sleep(0.02)
            assert not task.done()
        seen = [
            text
            for process in children
            for text in (process / "cmdline", process / "environ")
            if SECRET.encode() in text.read_bytes()
        ]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return children, seen

    children, seen = asyncio.run(look())

    assert children
    assert seen == []


def processes_with(argument: str) -> Iterator[Any]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if argument.encode() in (process / "cmdline").read_bytes():
                    yield process
            except OSError:
                continue


def test_refusal_of_the_kernel_is_explained_without_the_secret(secret_file: Any) -> None:
    with pytest.raises(CommandError) as caught:
        asyncio.run(connect_with_secret(OPTIONS, secret_file, 30.0, Path("/dev/full")))
    assert "ENOSPC" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert f"(from {secret_file})" in str(caught.value)


def test_device_that_is_missing_says_what_to_load(secret_file: Any, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="modprobe nvme-fabrics"):
        asyncio.run(connect_with_secret(OPTIONS, secret_file, 30.0, tmp_path / "nvme-fabrics"))


def test_options_that_are_too_long_for_the_kernel(tmp_path: Path) -> None:
    device = tmp_path / "nvme-fabrics"
    device.touch()
    child = [sys.executable, "-m", fabrics.__name__, str(device)]
    done = subprocess.run(child, input=b"x" * 4096, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"E2BIG" in done.stderr
    assert device.read_bytes() == b""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_secret_that_others_may_read_is_refused(secret_file: Any, mode: int) -> None:
    secret_file.chmod(mode)
    with pytest.raises(SecretError, match=f"chmod 600 {secret_file}"):
        asyncio.run(read_secret(secret_file))


@pytest.mark.parametrize(
    "text", ["", "hunter2", f"{SECRET},nqn=other", f"{SECRET}\n{SECRET}", "DHHC-1:09:aaaa:", "\xff"]
)
def test_what_is_no_secret_is_refused_unseen(secret_file: Any, text: str) -> None:
    secret_file.write_text(text)
    with pytest.raises(SecretError, match="is no DH-HMAC-CHAP secret") as caught:
        asyncio.run(read_secret(secret_file))
    assert not text or text not in str(caught.value)


def test_missing_secret_file(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="cannot be read"):
        asyncio.run(read_secret(tmp_path / "none"))
