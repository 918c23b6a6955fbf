"""``--wait``: for commands that open a volume whose devices may be late."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Annotated

import typer

from fx100_lmcache.cli.console import human
from fx100_lmcache.config import load
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.volume.arrival import missing_members, wait_for_members

MAX_WAIT_S = 86_400


def a_number(value: float | None) -> float | None:
    """Refuse `nan`, which lies within any limits."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("must be a number of seconds")
    return value


Wait = Annotated[
    float,
    typer.Option(
        "--wait",
        metavar="SECONDS",
        min=0,
        max=MAX_WAIT_S,
        callback=a_number,
        help="Wait so long for members that are not there yet; what nvme.subsystems names is "
        "connected meanwhile, unless nvme.reconnect is off.",
    ),
]


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    human(as_json=True).print(line, markup=False)


def wait_as_asked(config: Path, wait_s: float, *, creating: bool = False) -> None:
    """Wait for the members of a configuration file; what is wrong with it the command will say.

    Parameters
    ----------
    creating : bool
        As `missing_members`.
    """
    if wait_s <= 0:
        return
    with contextlib.suppress(FX100Error):
        settings = load(config)
        wait_for_members(
            settings, wait_s, say, missing=lambda: missing_members(settings, creating=creating)
        )
