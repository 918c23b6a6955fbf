"""``fx100 take-over``: an operator's word that the owner on another host is gone."""

from __future__ import annotations

from typing import Annotated

import typer

from fx100_lmcache.admin.inspect import inspect
from fx100_lmcache.cli.console import EXIT_FAILED, ConfigPath, agreed, explained, human
from fx100_lmcache.config import load
from fx100_lmcache.mount import mount


@explained
def take_over_command(
    config: ConfigPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Free the claims of a host that is gone, so that this one may open the volume.

    A server that starts replaces such claims by itself, once they stood still for the watched time
    (15 s); this skips the watch. Needed only for claims of a version that does not renew them. If
    that host lives after all, it notices with its next write or heartbeat and stops storing;
    entries may be lost, wrong bytes are never served. A process under this kernel cannot be
    replaced so: stop it.
    """
    settings = load(config)
    console = human()
    watch_s = 0.0 if yes else 1.5 * settings.claim.heartbeat_s
    for shard in inspect(config, watch_s).shards:
        console.print(f"shard {shard.shard}: {shard.state} {shard.holder}".rstrip(), markup=False)
        if shard.still_s is not None and shard.still_s < watch_s:
            console.print("  [bold red]it was renewed just now: that server lives[/]")
    if not yes and not agreed("Is that host really gone?"):
        raise typer.Exit(EXIT_FAILED)
    mount(settings, take_over=True).close()
    console.print("The claims are free. Start the server now.")
