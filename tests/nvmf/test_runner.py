"""nvme-cli as a subprocess, with shell scripts in its place."""

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.nvmf import errors, runner
from fx100_lmcache.nvmf.causes import MAX_DETAIL_CHARACTERS, explain, shortened
from fx100_lmcache.nvmf.errors import (
    CommandError,
    CommandTimeoutError,
    NotPermittedError,
    SecretError,
    ToolMissingError,
    UnknownOutputError,
    UnreachableError,
)
from fx100_lmcache.nvmf.runner import NvmeCli, run_program

SECRET = "DHHC-1:01:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    """Return a function that makes an ``nvme`` of a shell script."""

    def make(script: str, timeout_s: float = 20.0) -> NvmeCli:
        program = tmp_path / "nvme"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return NvmeCli(str(program), timeout_s)

    return make


def test_unknown_output_is_named_with_the_version(fake: Any) -> None:
    cli = fake(
        """case $1 in
        version) echo "nvme version 2.11 (git 2.11)";;
        discover) echo noise; exit 0;;
        esac"""
    )

    with pytest.raises(UnknownOutputError, match=r"nvme-cli 2\.11"):
        asyncio.run(cli.discover("-t", "tcp"))


def test_messages_are_asked_for_in_english(fake: Any) -> None:
    assert asyncio.run(fake("echo $LC_ALL").run("x")).stdout == "C\n"


def test_missing_program() -> None:
    with pytest.raises(ToolMissingError, match="not installed") as caught:
        asyncio.run(NvmeCli("/nonexistent/nvme").run("list"))
    assert "apt install nvme-cli" in str(caught.value)


def test_program_without_permission(tmp_path: Path) -> None:
    program = tmp_path / "nvme"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(NotPermittedError, match="may not be executed"):
        asyncio.run(NvmeCli(str(program)).run("list"))


def test_deadline_ends_the_whole_process_group(fake: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    cli = fake(f"sleep 1000 & echo $! > {pid_file}; wait", timeout_s=1.0)

    with pytest.raises(CommandTimeoutError, match="did not end within 1 s"):
        asyncio.run(cli.run("connect"))

    grandchild = Path("/proc") / pid_file.read_text().strip() / "stat"
    for _ in range(100):
        # It may stay as a zombie until the machine's process 1 looks for it.
        if not grandchild.exists() or grandchild.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child of the command still runs")


def test_cancelling_ends_the_process(fake: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    cli = fake(f"echo $$ > {pid_file}; exec sleep 1000")

    async def cancel() -> None:
        task = asyncio.create_task(cli.run("connect"))
        while not (pid_file.exists() and pid_file.read_text().strip()):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())

    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_endless_output_is_cut(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_OUTPUT_BYTES", 1 << 16)
    with pytest.raises(CommandError, match="printed more than 65536 bytes"):
        asyncio.run(fake("yes").run("list"))


def test_a_program_that_does_not_read_its_input() -> None:
    output = asyncio.run(run_program(["true"], 20.0, stdin=b"x" * (1 << 20)))
    assert output.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["connect", f"--dhchap-secret={SECRET}"],
        ["connect", "--dhchap-secret", "x"],
        ["connect", "-S", "x"],
        ["connect", "-C", "x"],
        ["connect", "--dhchap-ctrl-secret=x"],
        ["connect", f"--anything={SECRET}"],
        ["connect", "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:"],
    ],
)
def test_a_secret_never_reaches_a_command_line(
    fake: Any, tmp_path: Path, arguments: list[Any]
) -> None:
    cli = fake(f"touch {tmp_path}/ran")
    with pytest.raises(SecretError, match="refused to put a secret") as caught:
        asyncio.run(cli.run(*arguments))
    assert not (tmp_path / "ran").exists()
    assert arguments[-1].partition("=")[2] not in str(caught.value) or "=" not in arguments[-1]


def test_secrets_in_what_a_command_says_are_masked(
    fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with pytest.raises(CommandError) as caught:
        asyncio.run(fake(f"echo 'bad key {SECRET}' >&2; exit 1").run("connect"))
    assert "bad key (secret)" in str(caught.value)
    assert SECRET not in str(caught.value) + caplog.text


def test_failure_has_command_code_cause_and_remedy(fake: Any) -> None:
    script = "echo 'Failed to write to /dev/nvme-fabrics: Connection refused' >&2; exit 1"
    with pytest.raises(UnreachableError) as caught:
        asyncio.run(fake(script).run("connect", "--traddr=10.0.0.1"))
    text = str(caught.value)
    assert caught.value.exit_code == 1
    assert "connect --traddr=10.0.0.1 (exit code 1): no NVMe target answers" in text
    assert "it said: Failed to write" in text
    assert "do: check traddr" in text


def test_failure_that_is_told_in_json(fake: Any) -> None:
    script = f"cat {RECORDED}/3.0/connect-again.json; exit 1"
    with pytest.raises(errors.AlreadyConnectedError):
        asyncio.run(fake(script).run("connect"))


def test_an_error_key_with_exit_code_0_is_no_failure(fake: Any) -> None:
    script = f"cat {RECORDED}/3.0/connect-again.json; exit 0"
    assert "already connected" in asyncio.run(fake(script).run("connect")).stdout


NO_SLOTS = "failed to open slots dir /sys/bus/pci/slots\n"
NO_NAMES = "no support for hostname ip address resolution; recompile with libnss support.\n"
WRITE = "Failed to write to /dev/nvme-fabrics: "
ADD = "could not add new controller: "
NO_CONTROLLER = "no controller found: failed to write to nvme-fabrics device"


@pytest.mark.parametrize(
    ("said", "exit_code", "kind"),
    [
        # Seen with 1.16, 2.0, 2.3, 2.10.2, 2.16, 3.0-rc1: connected already.
        ("", errno.EALREADY, errors.AlreadyConnectedError),
        (f"{WRITE}Operation already in progress\n{NO_CONTROLLER}", 1, errors.AlreadyConnectedError),
        ("already connected", 1, errors.AlreadyConnectedError),
        (f"{NO_SLOTS}already connected", 1, errors.AlreadyConnectedError),
        (f"{NO_SLOTS}{NO_NAMES}{ADD}already connected", 1, errors.AlreadyConnectedError),
        ("already connected to hostnqn=a,nqn=b", 1, errors.AlreadyConnectedError),
        # Nothing listens.
        (f"{WRITE}Connection refused", errno.ECONNREFUSED, errors.UnreachableError),
        (f"{WRITE}Connection refused\n{NO_CONTROLLER}", 1, errors.UnreachableError),
        (f"{WRITE}Connection refused\n{ADD}connection refused", 1, errors.UnreachableError),
        (f"{NO_SLOTS}{ADD}connection refused", 1, errors.UnreachableError),
        ("failed to add controller, error connection refused", 1, errors.UnreachableError),
        (f"{WRITE}Connection timed out", 1, errors.UnreachableError),
        (f"{WRITE}No route to host", 1, errors.UnreachableError),
        # The target does not know the subsystem.
        (f"{WRITE}Input/output error", errno.EIO, errors.RefusedByTargetError),
        (f"{WRITE}Input/output error\n{NO_CONTROLLER}", 1, errors.RefusedByTargetError),
        (f"{ADD}failed to write to nvme-fabrics device", 1, errors.RefusedByTargetError),
        # The kernel has no such transport.
        (f"{WRITE}Invalid argument\n{NO_CONTROLLER}", 1, errors.InvalidSettingsError),
        (f"{ADD}invalid arguments/configuration", 1, errors.InvalidSettingsError),
        ("Failed to open /dev/nvme-fabrics: No such file or directory", 1,
         errors.TransportMissingError),
        # Ours (fabrics.py).
        ("failed to write to /dev/nvme-fabrics: EKEYREJECTED, Key was rejected by service", 1,
         errors.AuthenticationError),
        ("failed to open /dev/nvme-fabrics: EACCES, Permission denied", 1,
         errors.NotPermittedError),
        # The rest.
        (f"{WRITE}Permission denied", 1, errors.NotPermittedError),
        (f"{ADD}hostnqn already in use", 1, errors.HostInUseError),
        (f"{WRITE}Cannot assign requested address", 1, errors.AddressError),
        (f"{ADD}Operation not supported", 1, CommandError),
        ("", 1, CommandError),
        ("", -9, CommandError),
    ],
)  # fmt: skip
def test_cause_of_a_failure(said: str, exit_code: Any, kind: Any) -> None:
    error = explain("nvme connect", exit_code, said)

    assert type(error) is kind
    assert "\n  do: " in str(error)


def test_long_text_is_shortened() -> None:
    assert len(shortened("x" * 10_000)) == MAX_DETAIL_CHARACTERS + 3
    assert shortened(" a \n\n b \n") == "a; b"
