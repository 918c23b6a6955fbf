"""Options that several commands share, under the same names and with the same meaning."""

from pathlib import Path
from typing import Annotated

import typer

from fx100_lmcache.sizing import MODELS

DISK = Path(".cache")
MEMORY_FAST = Path("/dev/shm")
DEFAULT_MODEL = "qwen3-coder-480b-tp8"


def known_model(name: str) -> str:
    """Return the name of a model, if it is in the table.

    Raises
    ------
    typer.BadParameter
        If it is not.
    """
    if name not in MODELS:
        raise typer.BadParameter(f"unknown model {name}; known: {', '.join(MODELS)}")
    return name


Backends = Annotated[list[str] | None, typer.Option(help="Contender; all if left out.")]
Model = Annotated[str, typer.Option(help="KV shape, of one rank.", callback=known_model)]
Directory = Annotated[Path, typer.Option(help="Where the files go: on what is to be measured.")]
Memory = Annotated[Path, typer.Option(help="A tmpfs for the memory loaded into.")]
Shrink = Annotated[int, typer.Option(min=1, help="Chunks are smaller by this factor.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs of each point.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write results here.")]
Plot = Annotated[Path | None, typer.Option(help="Write PLOT.png and PLOT.svg.")]


def numbers(text: str) -> list[int]:
    """Read whole numbers from 1 up, with commas between.

    Raises
    ------
    typer.BadParameter
        If a part is none.
    """
    parts = [part.strip() for part in text.split(",")]
    if bad := [part for part in parts if not part.isdecimal() or int(part) < 1]:
        raise typer.BadParameter(f"numbers with commas between are wanted, not {bad[0]!r}")
    return [int(part) for part in parts]
