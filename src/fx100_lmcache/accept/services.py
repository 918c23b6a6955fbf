"""Servers that a gate starts, waits for and kills with SIGKILL, as a crash would."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fx100_lmcache.accept.bench import Bench, Command
from fx100_lmcache.accept.processes import (
    remove_shared_memory,
    session_processes,
    shared_memory_of,
)
from fx100_lmcache.accept.steps import CannotRunError
from fx100_lmcache.errors import FX100Error

_POLL_S, _ANSWER_S, _KILL_S = 0.5, 2.0, 30.0


class Services:
    """The servers that run now. Leaving the block kills them all."""

    def __init__(self, bench: Bench, environment: Mapping[str, str]) -> None:
        self._bench = bench
        self._environment = environment
        self._running: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill_all()

    def start(self, name: str, argv: Sequence[str], url: str, within_s: float) -> None:
        """Start a server, and return when it answers.

        Raises
        ------
        CannotRunError
            If it is not installed, something else answers there already, or it never answers.
        """
        if shutil.which(argv[0], path=self._environment.get("PATH")) is None:
            raise CannotRunError(f"{argv[0]} is not installed")
        if _answers(url):
            raise CannotRunError(f"{url} answers already: stop what runs there first")
        log = self._bench.raw / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append((name, process, log))
        line = Command(shlex.join(argv), 0, 0.0, str(log.relative_to(self._bench.out)))
        self._bench.commands.append(line)
        self._wait(name, process, log, url, within_s)

    def _wait(
        self, name: str, process: subprocess.Popen[bytes], log: Path, url: str, within_s: float
    ) -> None:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if process.poll() is not None:
                raise CannotRunError(f"{name} ended with code {process.returncode}: {_tail(log)}")
            if _answers(url):
                return
            time.sleep(_POLL_S)
        raise CannotRunError(f"{name} did not answer at {url} within {within_s:.0f} s")

    def check_alive(self) -> None:
        """Raise `FX100Error` if one has ended by itself."""
        for name, process, log in self._running:
            if process.poll() is not None:
                raise FX100Error(f"{name} ended with code {process.returncode}: {_tail(log)}")

    def kill_all(self) -> None:
        """Kill every server with all its children, and remove the shared memory they leave."""
        while self._running:
            name, process, _ = self._running.pop()
            if not _kill(process):
                raise FX100Error(f"{name} outlives SIGKILL: it hangs in the kernel")


def _kill(process: subprocess.Popen[bytes]) -> bool:
    until, segments = time.monotonic() + _KILL_S, set[int]()
    while members := session_processes(process.pid):
        segments |= shared_memory_of(members)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    process.wait()
    remove_shared_memory(segments)
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:  # noqa: S310 - http alone
            return 200 <= int(answer.status) < 300
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-600:].strip()
