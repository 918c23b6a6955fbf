"""What all commands share: where text goes, how errors look, exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fx100_lmcache.cli.streams import flush_output
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.ondisk.reason import TEXTS, Reason

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

P = ParamSpec("P")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the volume.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def human(as_json: bool = False) -> Console:
    """Return the console for people: stdout, or stderr where stdout is for machines."""
    return Console(stderr=as_json, highlight=False, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_error(problem: Exception) -> None:
    """Print one readable message on stderr."""
    console = human(as_json=True)
    console.print("error:", style="bold red", end=" ")
    console.print(str(problem), markup=False)


def agreed(question: str) -> bool:
    """Ask on stderr; only y or yes is a yes."""
    human(as_json=True).print(f"{question} [y/N] ", end="", markup=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def explained(command: Callable[P, None]) -> Callable[P, None]:
    """Make errors one message and exit code 1, and Ctrl-C exit code 130.

    Our own errors and those of the operating system, such as a full disk where the output goes.
    Anything else is a defect and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            flush_output()
        except FX100Error as problem:
            print_error(problem)
            raise typer.Exit(EXIT_FAILED) from problem
        except OSError as problem:
            if problem.errno == errno.EPIPE:  # nobody reads on; typer ends without a word
                raise
            print_error(system_error(problem))
            raise typer.Exit(EXIT_FAILED) from problem
        except KeyboardInterrupt:
            human(as_json=True).print("[yellow]interrupted[/]")
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return run


def system_error(problem: OSError) -> FX100Error:
    """Describe what the operating system refused; output that cannot be written is dropped."""
    with contextlib.suppress(OSError):
        flush_output()
    doing = problem.filename or "reading, or writing the output"
    return FX100Error(f"{doing}: {problem.strerror or problem}")


def progress_bar() -> Progress:
    """Return a bar with bytes, bytes per second and the time left; silent without a terminal."""
    console = human(as_json=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def size_text(size_bytes: float) -> str:
    """Return a size for people: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.2f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"


def dropped_lines(dropped: Mapping[str, int]) -> list[str]:
    """Say which inodes do not count, and why: one line for each reason that there was."""
    return [
        f"dropped inodes {count:,} ({reason}): {TEXTS[Reason(reason)]}"
        for reason, count in dropped.items()
        if count
    ]
