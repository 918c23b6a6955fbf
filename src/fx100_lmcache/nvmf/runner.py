"""The ``nvme`` program as a subprocess: a deadline, bounded output, typed errors, no secrets."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fx100_lmcache.child import TooMuchOutputError, run_child
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
        If it did not end in time. What it started ends with it, in any case.
    CommandError
        A subclass by cause, if it failed.
    """
    _refuse_secrets(argv)
    command = shown or shlex.join(argv)
    logger.debug("run: %s", command)
    try:
        ended = await run_child(
            argv,
            timeout_s,
            stdin=stdin,
            environment={**os.environ, "LC_ALL": "C"},
            limit_bytes=MAX_OUTPUT_BYTES,
        )
    except TimeoutError:
        raise CommandTimeoutError(
            command,
            f"did not end within {timeout_s:g} s",
            "the target does not answer, or the kernel waits for a device: see dmesg and "
            "/sys/class/nvme/*/state",
        ) from None
    except TooMuchOutputError as error:
        raise CommandError(command, error.what, "run it by hand and look") from error
    except OSError as error:
        raise _not_started(argv[0], command, error) from error
    output = Output(ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace"))
    if ended.code:
        said = output.stderr + "\n" + (parse.error_text(output.stdout) or output.stdout)
        raise explain(command, ended.code, said)
    return output


def _not_started(program: str, command: str, error: OSError) -> CommandError:
    if isinstance(error, FileNotFoundError):
        return ToolMissingError(
            command, f"program {program!r} is not installed", "apt install nvme-cli (dnf, zypper)"
        )
    if isinstance(error, PermissionError):
        return NotPermittedError(
            command, f"program {program!r} may not be executed", "check its file mode"
        )
    return CommandError(
        command,
        f"program {program!r} cannot be started ({error.strerror})",
        "free memory and processes, or install the program anew",
    )


def _refuse_secrets(argv: Sequence[str]) -> None:
    for argument in argv:
        if argument.partition("=")[0] in _SECRET_OPTIONS or SECRET.search(argument):
            raise SecretError(
                f"refused to put a secret on the command line of {argv[0]}",
                remedy="give dhchap_secret_file, the secret's file",
            )


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

    async def discover(self, *address: str) -> list[parse.DiscoveryRecord]:
        """Ask a discovery controller what it offers; `address` are options such as ``-t tcp``."""
        output = await self.run("discover", *address, "-o", "json")
        return parse.parse_discovery(output.stdout, await self.version())

    async def disconnect(self, subsystem_nqn: str) -> None:
        """Remove all controllers of a subsystem; none being there is fine."""
        output = await self.run("disconnect", "-n", subsystem_nqn)
        logger.info("disconnect %s: %s", subsystem_nqn, masked(output.stdout).strip() or "done")
