"""Start servers, wait until they are ready, and kill them so that nothing is left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import httpx

from fx100_lmcache.accept.processes import (
    remove_shared_memory,
    session_processes,
    shared_memory_of,
)

READY_TIMEOUT_S = 600.0
KILL_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.25
LOG_TAIL_LINES = 25

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServiceError(RuntimeError):
    """A server did not start or died; the message ends with the last lines of its log."""


def free_ports(count: int) -> list[int]:
    """Return distinct TCP ports of 127.0.0.1 that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP until the block is done. Main thread only."""
    held_back: list[int] = []

    def hold_back(number: int, _frame: FrameType | None) -> None:
        held_back.append(number)

    previous = {number: signal.signal(number, hold_back) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if held_back:
        signal.raise_signal(held_back[0])


class Service:
    """One server with all its children, in a process session of its own.

    Parameters
    ----------
    name : str
        For messages.
    command : sequence of str
        Program and arguments.
    environment : mapping
        The whole environment of the server.
    directory : Path
        Where it runs.
    log : Path
        Where its output goes, appended.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
    ) -> None:
        self.name = name
        self.log = log
        self._segments: set[int] = set()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.session_id = self._process.pid

    def wait_ready(self, url: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when `url` answers with success.

        Raises
        ------
        ServiceError
            When the server ends before, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=POLL_INTERVAL_S * 4).is_success:
                    return
            time.sleep(POLL_INTERVAL_S)
        raise ServiceError(f"{self.name} was not ready after {timeout_s:.0f} s{self._log_tail()}")

    def check_alive(self) -> None:
        """Raise `ServiceError` when the server has ended; also remember its shared memory."""
        code = self._process.poll()
        if code is not None:
            raise ServiceError(f"{self.name} ended with code {code}{self._log_tail()}")
        self._segments |= shared_memory_of(session_processes(self.session_id))

    def kill(self) -> None:
        """Kill the server and all its children with SIGKILL and remove their shared memory.

        Raises
        ------
        ServiceError
            When a process outlives SIGKILL, which means that it hangs in the kernel.
        """
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while processes := session_processes(self.session_id):
            self._segments |= shared_memory_of(processes)
            for process_id in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ServiceError(f"{self.name} outlives SIGKILL: processes {sorted(processes)}")
            time.sleep(0.01)
        self._process.wait()
        remove_shared_memory(self._segments)

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"; the end of {self.log}:", *lines])


class Services:
    """The servers that run now. Leaving the block kills them all, whatever happened in it."""

    def __init__(self) -> None:
        self._running: list[Service] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill_all()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
    ) -> Service:
        """Start a server; see `Service`."""
        with uninterrupted():
            service = Service(name, command, environment, directory, log)
            self._running.append(service)
        return service

    def check_alive(self) -> None:
        """Raise `ServiceError` when one of them has ended."""
        for service in self._running:
            service.check_alive()

    def kill_all(self) -> None:
        """Kill every server with SIGKILL, then raise the first `ServiceError` if there was one."""
        errors = []
        with uninterrupted():
            while self._running:
                try:
                    self._running.pop().kill()
                except ServiceError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
