"""A program that is run to its end: bounded in time and output, and its process group ends with it.

The program leads a session and a process group of its own. When it has ended, or its time is over,
the whole group is killed before the program is reaped: until then nobody else can get its process
id, which is also the group's. A descendant that left the group lives on, but keeps nobody waiting
although it may hold our pipes: what the program itself wrote is in them when it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from fx100_lmcache.errors import FX100Error

log = logging.getLogger(__name__)

MAX_OUTPUT_BYTES = 8 << 20
REAP_S = 1.0
"""Wait for a killed process; one that sleeps in the kernel is left behind."""
FIRST_POLL_S, LONGEST_POLL_S = 0.001, 0.05
"""Pauses between two looks whether it has ended. pidfd_open is refused in some containers."""


class TooMuchOutputError(FX100Error):
    """A program printed more than was allowed, and was killed."""


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it had printed by then.

    Attributes
    ----------
    code : int
        Its exit code, or minus the signal's number.
    """

    code: int
    stdout: bytes
    stderr: bytes


async def run_child(
    argv: Sequence[str],
    timeout_s: float,
    *,
    stdin: bytes | None = None,
    environment: Mapping[str, str] | None = None,
    limit_bytes: int = MAX_OUTPUT_BYTES,
) -> Ended:
    """Run a program until it ends; all that is left of its process group is killed then.

    Parameters
    ----------
    argv : sequence of str
        Program and arguments.
    timeout_s : float
        After this long it is killed.
    stdin : bytes or None
        What it may read.
    environment : mapping or None
        Its environment; by default ours.
    limit_bytes : int
        Bytes that it may print, for each of stdout and stderr.

    Raises
    ------
    TimeoutError
        If it did not end in time.
    TooMuchOutputError
        If it printed more than `limit_bytes`.
    OSError
        If it cannot be started.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    pipes = [_Pipe(file, limit_bytes) for file in (process.stdout, process.stderr) if file]
    try:
        await _until_it_ends(process, pipes, stdin or b"", timeout_s)
    finally:
        _kill_group(process)
        code = await _reaped(process)
        for pipe in pipes:
            pipe.close()
        if process.stdin is not None:
            process.stdin.close()
    if any(pipe.overfull for pipe in pipes):
        raise TooMuchOutputError(f"printed more than {limit_bytes} bytes")
    return Ended(code, *(bytes(pipe.data) for pipe in pipes))


async def _until_it_ends(
    process: subprocess.Popen[bytes], pipes: Sequence[_Pipe], stdin: bytes, timeout_s: float
) -> None:
    tasks = [asyncio.create_task(_collect(pipe, process)) for pipe in pipes]
    if process.stdin is not None:
        tasks.append(asyncio.create_task(_feed(process.stdin, stdin)))
    try:
        async with asyncio.timeout(timeout_s):
            await _end_of(process)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Pipe:
    """Our end of a pipe from which a program's output comes, and what has come."""

    def __init__(self, file: IO[bytes], limit_bytes: int) -> None:
        self.data = bytearray()
        self.descriptor = file.fileno()
        self._file = file
        self._limit_bytes = limit_bytes
        os.set_blocking(self.descriptor, False)

    @property
    def overfull(self) -> bool:
        """Whether more has come than was allowed."""
        return len(self.data) > self._limit_bytes

    def take(self) -> bool:
        """Take what is there; return whether more may come."""
        while not self.overfull:
            try:
                part = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                return False
            self.data += part
        return False

    def close(self) -> None:
        """Take what is left, and let go of the pipe."""
        self.take()
        self._file.close()


async def _collect(pipe: _Pipe, process: subprocess.Popen[bytes]) -> None:
    loop = asyncio.get_running_loop()
    while pipe.take():
        await _ready(loop.add_reader, loop.remove_reader, pipe.descriptor)
    if pipe.overfull:
        _kill_group(process)


async def _feed(file: IO[bytes], data: bytes) -> None:
    """Write all that the program wants to read, and close."""
    loop = asyncio.get_running_loop()
    os.set_blocking(file.fileno(), False)
    left = memoryview(data)
    try:
        while left:
            try:
                left = left[os.write(file.fileno(), left) :]
            except BlockingIOError:
                await _ready(loop.add_writer, loop.remove_writer, file.fileno())
            except BrokenPipeError:
                return
    finally:
        file.close()


async def _ready(
    add: Callable[[int, Callable[[], None]], None],
    remove: Callable[[int], object],
    descriptor: int,
) -> None:
    ready = asyncio.Event()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    pause_s = FIRST_POLL_S
    while not _has_ended(process):
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended; it stays a zombie."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, process.pid, look) is not None
    except ChildProcessError:  # reaped by somebody who waits for every child of this process
        return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # EPERM: every one that is left runs as another user now
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _reaped(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that was killed or has ended."""
    until = time.monotonic() + REAP_S
    try:
        while not _has_ended(process) and time.monotonic() < until:
            await asyncio.sleep(FIRST_POLL_S)
    finally:
        if _has_ended(process):
            process.wait()
        else:
            log.warning(
                "%s: process %d sleeps in the kernel, left behind", process.args, process.pid
            )
            threading.Thread(target=process.wait, name="fx100-reap", daemon=True).start()
    return -signal.SIGKILL if process.returncode is None else process.returncode
