"""Programs that misbehave: each ends in time, with bounded output, and nothing of it stays."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fx100_lmcache import child
from fx100_lmcache.child import Ended, TooMuchOutputError, run_child
from fx100_lmcache.doctor import loading
from fx100_lmcache.nvmf.errors import CommandError, CommandTimeoutError
from fx100_lmcache.nvmf.runner import run_program

LIMIT_S = 1.5
MARK = "FX100_TEST_MARK"
LONG = "sleep 1000"
DAEMON = f"setsid {LONG} & "

HANGING = {
    "it sleeps": f"exec {LONG}",
    "it ignores SIGTERM": f"trap '' TERM INT HUP; {LONG}; {LONG}",
    "its child and grandchild sleep": f"({LONG} & {LONG}) & {LONG}",
    "its child ignores SIGTERM": f"sh -c \"trap '' TERM; {LONG}; {LONG}\" & wait",
    "it closed its output": f"exec >&- 2>&-; exec {LONG}",
    "it waits for input": f"cat; exec {LONG}",
    "it is stopped": "kill -STOP $$",
    "it prints now and then": "while :; do echo x; sleep 0.01; done",
}
"""Scripts that do not end."""

ENDING = {
    "its child sleeps and holds the pipes": f"echo done; {LONG} & exit 3",
    "its grandchild sleeps and holds the pipes": f"({LONG} & {LONG}) & echo done; exit 3",
    "its child ignores SIGTERM": f"sh -c \"trap '' TERM; {LONG}; {LONG}\" & echo done; exit 3",
    "its child prints for ever": "yes >&2 & echo done; exit 3",
    "it closed its output": "echo done; exec >&- 2>&-; sleep 0.05; exit 3",
    "it does not read its input": "echo done; exit 3",
}
"""Scripts that print ``done`` and end with exit code 3."""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Mark all that is started from here on, and kill what is left of it at the end."""
    value = f"{os.getpid()}-{abs(hash(request.node.name))}"
    monkeypatch.setenv(MARK, value)
    yield value
    for process in marked(value):
        os.kill(process, 9)


def marked(value: str) -> list[int]:
    """Return the processes that run with this mark; zombies have no environment any more."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = file.read_bytes()
        except OSError:
            continue
        if f"{MARK}={value}".encode() in environment.split(b"\0"):
            found.append(int(file.parent.name))
    return [process for process in found if process != os.getpid()]


def nothing_is_left(value: str) -> bool:
    for _ in range(200):  # a killed process may need a moment
        if not marked(value):
            return True
        time.sleep(0.01)
    return False


def shell(script: str, limit_s: float = 60.0, **options: object) -> Ended:
    return asyncio.run(run_child(["sh", "-c", script], limit_s, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("what", HANGING)
def test_after_its_time_nothing_is_left(mark: str, what: str) -> None:
    with pytest.raises(CommandTimeoutError, match=r"did not end within 0\.2 s"):
        asyncio.run(run_program(["sh", "-c", HANGING[what]], 0.2, stdin=b"x" * (1 << 18)))
    assert nothing_is_left(mark)


@pytest.mark.parametrize("what", HANGING)
def test_after_a_cancel_nothing_is_left(mark: str, what: str) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(run_child(["sh", "-c", HANGING[what]], 60.0, stdin=b"x"))
        while not marked(mark):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert nothing_is_left(mark)


@pytest.mark.parametrize("what", ENDING)
def test_one_that_ends_is_not_kept_by_what_it_leaves_behind(mark: str, what: str) -> None:
    """Its own exit code and output count, and its children end with it."""
    ended = shell(ENDING[what], LIMIT_S, stdin=b"x" * (1 << 18))
    assert (ended.code, ended.stdout) == (3, b"done\n")
    assert nothing_is_left(mark)


@pytest.mark.parametrize("what", ENDING)
def test_a_command_that_leaves_something_behind_is_judged_by_its_own_end(
    mark: str, what: str
) -> None:
    with pytest.raises(CommandError, match=r"\(exit code 3\)"):
        asyncio.run(run_program(["sh", "-c", ENDING[what]], LIMIT_S, stdin=b"x" * (1 << 18)))
    assert nothing_is_left(mark)


def test_a_daemon_that_left_the_group_keeps_nobody_waiting(mark: str) -> None:
    ended = shell(f"{DAEMON} echo done; exit 0", LIMIT_S)
    assert ended == Ended(0, b"done\n", b"")


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("printing", ["yes >&{0}", "yes >&{0} & wait", "trap '' PIPE; yes >&{0}"])
def test_a_flood_is_cut_and_ended(mark: str, printing: str, stream: int) -> None:
    with pytest.raises(TooMuchOutputError, match="printed more than 65536 bytes"):
        shell(printing.format(stream), limit_bytes=1 << 16)
    assert nothing_is_left(mark)


def test_a_flood_that_ends_by_itself_is_cut_as_well(mark: str) -> None:
    printed = "head -c 65537 /dev/zero"
    with pytest.raises(TooMuchOutputError):
        shell(printed, limit_bytes=1 << 16)
    assert len(shell(printed, limit_bytes=65537).stdout) == 65537


def test_all_that_was_printed_comes_back_in_order(mark: str) -> None:
    lines = [f"{number}\n" for number in range(100_000)]
    ended = shell("cat; echo twice >&2; exit 4", stdin="".join(lines).encode())
    assert ended == Ended(4, "".join(lines).encode(), b"twice\n")


@pytest.mark.parametrize("number", [9, 15])
def test_a_signal_is_a_negative_exit_code(mark: str, number: int) -> None:
    assert shell(f"kill -{number} $$").code == -number


def test_nothing_of_ours_stays_open_or_unreaped(mark: str) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for what in ("it sleeps", "it closed its output"):
        with pytest.raises(TimeoutError):
            shell(HANGING[what], 0.05, stdin=b"x" * (1 << 18))
    assert shell("true").code == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_one_that_sleeps_in_the_kernel_is_left_behind_with_a_word(
    mark: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fx100_lmcache")
    monkeypatch.setattr(child, "_has_ended", lambda _process: False)
    monkeypatch.setattr(child, "REAP_S", 0.05)
    with pytest.raises(TimeoutError):
        shell(HANGING["it sleeps"], 0.05)
    assert re.search(r"process \d+ sleeps in the kernel, left behind", caplog.text)
    assert nothing_is_left(mark)  # it is reaped by a thread, when the kernel lets go


@pytest.mark.parametrize(
    ("contents", "words"),
    [("", "cannot be started (Exec format error)"), (None, "is not installed")],
)
def test_a_program_that_cannot_be_started_is_explained(
    tmp_path: Path, contents: str | None, words: str
) -> None:
    program = tmp_path / "nvme"
    if contents is not None:
        program.write_text(contents)
        program.chmod(0o755)
    with pytest.raises(CommandError) as caught:
        asyncio.run(run_program([str(program)], 20.0))
    assert words in str(caught.value)
    assert caught.value.remedy


# Other users of the same


def test_an_import_that_hangs_leaves_nothing(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing starts processes of its own, which hold the pipes."""
    (tmp_path / "hanging.py").write_text(
        "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    monkeypatch.setattr(loading, "TIMEOUT_S", LIMIT_S)
    [outcome] = loading.try_imports([loading.Target("x", "hanging", "A", "builtins:object")])
    assert outcome == loading.Outcome("import failed", "not done after 1.5 s")
    assert nothing_is_left(mark)
