"""``fx100 l2-adapter``: what `lmcache server` needs to know."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fx100_lmcache.cli.console import ConfigPath, explained
from fx100_lmcache.cli.waiting import MAX_WAIT_S, a_number, wait_as_asked
from fx100_lmcache.config import Config, load
from fx100_lmcache.volume.opening import open_volume


def adapter_spec(config: Config, path: Path) -> dict[str, Any]:
    """Return the value of ``lmcache server --l2-adapter``.

    Parameters
    ----------
    path : Path
        Where the configuration lies; the adapter reads it again.
    """
    return {
        "type": "plugin",
        "module_path": "fx100_lmcache.lmcache.l2_adapter",
        "class_name": "FX100L2Adapter",
        "adapter_params": {"config": str(path.absolute())},
        "eviction": {
            "eviction_policy": "LRU",
            "trigger_watermark": config.space.trigger_watermark,
            "eviction_ratio": config.space.eviction_ratio,
        },
    }


@explained
def l2_adapter_command(
    config: ConfigPath,
    wait_s: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            max=MAX_WAIT_S,
            callback=a_number,
            help="Wait so long for members that are not there yet; by default deadlines.start of "
            "CONFIG, as the server itself does.",
        ),
    ] = None,
) -> None:
    """Print the JSON for `lmcache server --l2-adapter`.

    One line, and nothing else on stdout. The configuration is checked first, and that the volume
    can be assembled: LMCache itself would only log why an adapter did not start.
    """
    settings = load(config)
    wait_as_asked(config, settings.deadlines.start_s if wait_s is None else wait_s)
    for member in open_volume(settings, read_only=True).members:
        member.close()
    sys.stdout.write(json.dumps(adapter_spec(settings, config)) + "\n")
