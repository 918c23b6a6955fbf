"""The command line: ``fx100 COMMAND CONFIG``."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from fx100_lmcache import __version__
from fx100_lmcache.cli.accept import app as accept_app
from fx100_lmcache.cli.adapter import l2_adapter_command
from fx100_lmcache.cli.console import EXIT_FAILED, print_error, system_error
from fx100_lmcache.cli.doctor import doctor_command
from fx100_lmcache.cli.format import format_command
from fx100_lmcache.cli.nvme import app as nvme_app
from fx100_lmcache.cli.plan import plan_command
from fx100_lmcache.cli.status import status_command
from fx100_lmcache.cli.streams import prepare_streams
from fx100_lmcache.cli.take_over import take_over_command
from fx100_lmcache.cli.verify import verify_command
from fx100_lmcache.engine.native_lane import native_available

app = typer.Typer(
    name="fx100",
    help="KV-cache storage for LMCache on NVMe-over-Fabrics arrays.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("format")(format_command)
app.command("status")(status_command)
app.command("verify")(verify_command)
app.command("doctor")(doctor_command)
app.command("plan")(plan_command)
app.command("l2-adapter")(l2_adapter_command)
app.command("take-over")(take_over_command)
app.add_typer(nvme_app)
app.add_typer(accept_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        # here, so that no other command loads a part of the faces
        from fx100_lmcache.doctor.versions import built_for

        engine = "native" if native_available() else "Python threads"
        typer.echo("\n".join([f"fx100 {__version__}", *built_for(), f"engine here: {engine}"]))
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and what it was built for.",
        ),
    ] = False,
) -> None:
    """KV-cache storage for LMCache on NVMe-over-Fabrics arrays.

    Exit codes: 0 all is well, 1 refused, failed or not healthy, 2 wrong usage, 130 interrupted.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)


def main() -> None:
    """Run the command line."""
    prepare_streams()
    try:
        app()
    except OSError as problem:  # outside of a command: a help text that cannot be written
        print_error(system_error(problem))
        sys.exit(EXIT_FAILED)
