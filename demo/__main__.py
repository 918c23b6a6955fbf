"""Command line of the demo: ``python -m demo``."""

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo.commands import Ports, detect_device
from demo.report import Result, table, write_json
from demo.scenario import Options, check_shared_memory, run
from demo.services import Services, free_ports, uninterrupted
from demo.session import MAX_SESSION_TOKENS, MIN_SESSION_TOKENS

MARKER = ".fx100-demo"
"""A file that says: this directory was made by the demo and may be removed by it."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

console = Console()


@contextlib.contextmanager
def shown_step(text: str) -> Iterator[None]:
    """Show a spinner and the elapsed time, and one line when the step is done."""
    started = time.monotonic()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    terminal = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not terminal) as progress:
        progress.add_task(text, total=None)
        yield
    console.print(f"[green]done[/] {text} [dim]({time.monotonic() - started:.1f} s)[/]")


@contextlib.contextmanager
def _workplace(directory: Path, keep: bool) -> Iterator[None]:
    """Make the demo's directory, and remove it at the end unless it is to be kept.

    Raises
    ------
    RuntimeError
        When the directory holds something that the demo did not make.
    """
    if directory.exists():
        if any(directory.iterdir()) and not (directory / MARKER).exists():
            raise RuntimeError(f"{directory} holds files that are not the demo's; name another one")
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / MARKER).touch()
    try:
        yield
    finally:
        if not keep:
            with uninterrupted():
                shutil.rmtree(directory)


def stop_like_ctrl_c() -> None:
    """Make SIGINT, SIGTERM and SIGHUP stop the demo as Ctrl-C does: with all cleaned up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # `nohup` ignores SIGHUP, and means it.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def _choose_ports(lmcache: int, lmcache_http: int, vllm: int) -> Ports:
    """Replace every 0 by a free port."""
    free = free_ports(3)
    return Ports(lmcache or free[0], lmcache_http or free[1], vllm or free[2])


def _show(result: Result, json_file: Path | None) -> None:
    console.print()
    console.print(table(result))
    if json_file is not None:
        write_json(result, json_file)
    for failure in result.failures():
        console.print(f"[bold red]failed:[/] {failure}")


def demo(
    tokens: Annotated[
        int,
        typer.Option(
            min=MIN_SESSION_TOKENS, max=MAX_SESSION_TOKENS, help="Length of the session in tokens."
        ),
    ] = 29_800,
    directory: Annotated[
        Path, typer.Option(help="Where everything goes; removed at the end.")
    ] = Path(".demo"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the directory: model, volume, logs.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result to this file.")
    ] = None,
    l2_adapter: Annotated[
        str | None,
        typer.Option(help="Show another L2 adapter of LMCache: the JSON of its --l2-adapter."),
    ] = None,
    lmcache_port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0: any free port.")] = 0,
    lmcache_http_port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0: any free port.")] = 0,
    vllm_port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0: any free port.")] = 0,
) -> None:
    """Show that a session survives SIGKILL: its next turn, without a store and with one.

    Exit code 0 means that the output was identical and came from the store.
    """
    stop_like_ctrl_c()
    directory = directory.absolute()
    device = detect_device()
    try:
        check_shared_memory(device)
        with (
            _workplace(directory, keep),
            tempfile.TemporaryDirectory(prefix="fx100-") as sockets,
            Services() as services,
        ):
            options = Options(
                directory=directory,
                sockets=Path(sockets),
                session_tokens=tokens,
                ports=_choose_ports(lmcache_port, lmcache_http_port, vllm_port),
                device=device,
                adapter_json=l2_adapter,
            )
            result = run(options, services, shown_step)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted;[/] everything was stopped and removed")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (RuntimeError, httpx.HTTPError) as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}")
        if not keep:
            console.print("Logs and volume were removed; --keep keeps them.")
        raise typer.Exit(EXIT_FAILED) from error
    _show(result, json_file)
    if result.failures():
        raise typer.Exit(EXIT_FAILED)


if __name__ == "__main__":
    typer.run(demo)
