"""The ``nvme`` program as a subprocess: a deadline, bounded output, typed errors, no secrets."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fx100_lmcache.nvmf import parse
from fx100_lmcache.nvmf.causes import SECRET, explain, masked
from fx100_lmcache.nvmf.errors import (
    CommandError,
    CommandTimeoutError,
    NotPermittedError,
    SecretError,
    ToolMissingError,
)

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 30.0
"""A connect to a silent address gives up after 3 to 10 s; nothing else takes a second."""
MAX_OUTPUT_BYTES = 8 << 20
"""``nvme list`` prints about 300 B per namespace."""
REAP_S = 1.0
"""Wait for a killed process; one that sleeps in the kernel is left behind."""

_SECRET_OPTIONS = ("--dhchap-secret", "--dhchap-ctrl-secret", "--tls_key", "--tls-key", "-S", "-C")


@dataclass(frozen=True)
class Output:
    """What a command printed."""

    stdout: str
    stderr: str


async def run_program(
    argv: Sequence[str], timeout_s: float, stdin: bytes | None = None, shown: str | None = None
) -> Output:
    """Run a program to its end.

    Parameters
    ----------
    argv : sequence of str
        Program and arguments. Every user of the machine can read them: never a secret.
    timeout_s : float
        After this long its process group is killed.
    stdin : bytes or None
        What the program reads; not logged.
    shown : str or None
        How messages call the command, if not by `argv`.

    Raises
    ------
    SecretError
        If an argument is a secret.
    ToolMissingError, NotPermittedError
        If the program cannot be started.
    CommandTimeoutError
        If it did not end in time.
    CommandError
        A subclass by cause, if it failed.
    """
    _refuse_secrets(argv)
    command = shown or shlex.join(argv)
    logger.debug("run: %s", command)
    process = await _start(argv, command, stdin is not None)
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await _communicate(process, stdin, command)
    except TimeoutError:
        raise CommandTimeoutError(
            command,
            f"did not end within {timeout_s:g} s",
            "the target does not answer, or the kernel waits for a device: see dmesg and "
            "/sys/class/nvme/*/state",
        ) from None
    finally:
        await _end(process, command)
    output = Output(stdout.decode(errors="replace"), stderr.decode(errors="replace"))
    if process.returncode:
        said = output.stderr + "\n" + (parse.error_text(output.stdout) or output.stdout)
        raise explain(command, process.returncode, said)
    return output


def _refuse_secrets(argv: Sequence[str]) -> None:
    for argument in argv:
        if argument.partition("=")[0] in _SECRET_OPTIONS or SECRET.search(argument):
            raise SecretError(
                f"refused to put a secret on the command line of {argv[0]}",
                remedy="give dhchap_secret_file, the secret's file",
            )


async def _start(argv: Sequence[str], command: str, with_stdin: bool) -> asyncio.subprocess.Process:
    environment: Mapping[str, str] = {**os.environ, "LC_ALL": "C"}
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if with_stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise ToolMissingError(
            command, f"program {argv[0]!r} is not installed", "apt install nvme-cli (dnf, zypper)"
        ) from error
    except PermissionError as error:
        raise NotPermittedError(
            command, f"program {argv[0]!r} may not be executed", "check its file mode"
        ) from error


async def _communicate(
    process: asyncio.subprocess.Process, stdin: bytes | None, command: str
) -> tuple[bytes, bytes]:
    if process.stdin is not None:
        # A program that ends early closes its side; its exit code says why.
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(stdin or b"")
            await process.stdin.drain()
        process.stdin.close()
    streams = (process.stdout, process.stderr)
    readers = [asyncio.create_task(_read(stream, command)) for stream in streams]
    try:
        stdout, stderr = await asyncio.gather(*readers)
        await process.wait()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return stdout, stderr


async def _read(stream: asyncio.StreamReader | None, command: str) -> bytes:
    assert stream is not None
    parts: list[bytes] = []
    size_bytes = 0
    while part := await stream.read(1 << 16):
        size_bytes += len(part)
        if size_bytes > MAX_OUTPUT_BYTES:
            raise CommandError(
                command, f"printed more than {MAX_OUTPUT_BYTES} bytes", "run it by hand and look"
            )
        parts.append(part)
    return b"".join(parts)


async def _end(process: asyncio.subprocess.Process, command: str) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(REAP_S):
            await process.communicate()  # to the end, so that its pipes are closed
    except TimeoutError:
        logger.warning("%s: process %d sleeps in the kernel, left behind", command, process.pid)


class NvmeCli:
    """nvme-cli.

    Parameters
    ----------
    program : str
        Name or path of the ``nvme`` program.
    timeout_s : float
        Deadline of each command.
    """

    def __init__(self, program: str = "nvme", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.program = program
        self.timeout_s = timeout_s
        self._version: str | None = None

    async def run(self, *arguments: str) -> Output:
        """Run one command; see `run_program` for what it raises."""
        return await run_program([self.program, *arguments], self.timeout_s)

    async def version(self) -> str:
        """Return nvme-cli's version, e.g. ``2.3``; asked once."""
        if self._version is None:
            self._version = parse.parse_version((await self.run("version")).stdout)
        return self._version

    async def list_namespaces(self) -> list[parse.ListedNamespace]:
        """Return what ``nvme list`` shows."""
        output = await self.run("list", "-o", "json")
        return parse.parse_list(output.stdout, await self.version())

    async def list_subsystems(self) -> list[parse.ListedSubsystem]:
        """Return what ``nvme list-subsys`` shows."""
        output = await self.run("list-subsys", "-o", "json")
        return parse.parse_list_subsys(output.stdout, await self.version())

    async def discover(self, *address: str) -> list[parse.DiscoveryRecord]:
        """Ask a discovery controller what it offers; `address` are options such as ``-t tcp``."""
        output = await self.run("discover", *address, "-o", "json")
        return parse.parse_discovery(output.stdout, await self.version())

    async def disconnect(self, subsystem_nqn: str) -> None:
        """Remove all controllers of a subsystem; none being there is fine."""
        output = await self.run("disconnect", "-n", subsystem_nqn)
        logger.info("disconnect %s: %s", subsystem_nqn, masked(output.stdout).strip() or "done")
