"""The embedded volume of the demo: four preallocated files in its directory."""

import asyncio
import sys
from pathlib import Path

import yaml

from demo.commands import CHUNK_TOKENS
from demo.model import KV_BYTES_PER_TOKEN
from fx100_lmcache.child import run_child

MEMBERS = 4
MEMBER_SIZE = "128MiB"
COMMAND_TIMEOUT_S = 120.0


def write_config(directory: Path, model: str) -> Path:
    """Write the store's YAML and return its path.

    Parameters
    ----------
    directory : Path
        Absolute; the members go into its ``volume`` folder, which is made.
    model : str
        Name of the model as vLLM knows it.
    """
    volume = directory / "volume"
    volume.mkdir(parents=True, exist_ok=True)
    members = [
        {"path": str(volume / f"member-{number}"), "size": MEMBER_SIZE} for number in range(MEMBERS)
    ]
    config = {
        "volume": {"members": members, "object": CHUNK_TOKENS * KV_BYTES_PER_TOKEN},
        "identity": {"model_tags": {model: "demo"}},
    }
    path = directory / "fx100.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def format_volume(config: Path) -> None:
    """Run ``fx100 format``."""
    _fx100("format", str(config), "--yes")


def _fx100(*arguments: str) -> None:
    """Run the `fx100` command of this environment.

    Raises
    ------
    RuntimeError
        When it fails; with all that it said.
    """
    command = [str(Path(sys.executable).with_name("fx100")), *arguments]
    called = f"`fx100 {' '.join(arguments)}`"
    try:
        done = asyncio.run(run_child(command, COMMAND_TIMEOUT_S))
    except TimeoutError:
        raise RuntimeError(f"{called} did not end within {COMMAND_TIMEOUT_S:g} s") from None
    if done.code:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise RuntimeError(f"{called} ended with code {done.code}:\n{said}")
