"""``fx100 verify``: read everything back and check it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from fx100_lmcache.admin.scrub import Scrubber, ScrubResult
from fx100_lmcache.cli.console import (
    EXIT_FAILED,
    ConfigPath,
    JsonFlag,
    dropped_lines,
    explained,
    human,
    print_json,
    progress_bar,
    size_text,
)
from fx100_lmcache.cli.waiting import Wait, wait_as_asked
from fx100_lmcache.config import Config, load
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.errors import FX100Error, VolumeError
from fx100_lmcache.members.base import Member
from fx100_lmcache.mount import engine_options
from fx100_lmcache.ondisk.reason import IMPOSSIBLE
from fx100_lmcache.volume.claim import newest_claim, read_claims
from fx100_lmcache.volume.opening import open_volume
from fx100_lmcache.volume.recovery import Recovered, recover
from fx100_lmcache.volume.volume import Volume, read_label

SHOWN = 20  # bad pieces printed; all are in the JSON


@explained
def verify_command(config: ConfigPath, as_json: JsonFlag = False, wait_s: Wait = 0) -> None:
    """Read every entry back and check each piece's checksum. Reads only, also beside a server.

    Exit code 1 if anything is bad.

    [bold]JSON fields[/] (only ever added to): ok; volume (UUID); entries, pieces, read_bytes,
    gone (pieces evicted meanwhile), seconds; torn_inodes; dropped_inodes (by reason);
    unreadable_inodes; damaged_labels (paths); bad: digest, member, offset, length, reason.
    """
    wait_as_asked(config, wait_s)
    settings = load(config)
    volume = open_volume(settings, read_only=True)
    started = time.monotonic()
    try:
        found = _entries(volume)
        result = _read_back(settings, volume, found)
    except OSError as problem:
        raise VolumeError(f"the volume cannot be read: {problem}") from problem
    finally:
        for member in volume.members:
            member.close()
    summary = _summary(volume, found, result, time.monotonic() - started)
    if as_json:
        print_json(summary)
    else:
        _show(human(), config, summary)
    if not summary["ok"]:
        raise typer.Exit(EXIT_FAILED)


def _entries(volume: Volume) -> Recovered:
    """Read the inode tables of all shards."""
    geometry = volume.geometry
    claims = {
        shard: newest_claim(read_claims(volume.members, geometry, shard), volume.uuid, shard)
        for shard in range(geometry.shards)
    }
    generations = {shard: claim.generation if claim else 1 for shard, claim in claims.items()}
    epoch = max((claim.epoch for claim in claims.values() if claim), default=None)
    return recover(volume.members, geometry, volume.uuid, generations, claim_epoch=epoch)


def _read_back(settings: Config, volume: Volume, found: Recovered) -> ScrubResult:
    engine = LaneEngine(volume.members, engine_options(settings), _still_answers)
    try:
        deadline_s = settings.deadlines.stuck_io_s
        scrubber = Scrubber(volume, engine, found, deadline_s=deadline_s)
        with progress_bar() as progress:
            task = progress.add_task("reading", total=scrubber.total_bytes)
            return scrubber.run(lambda count: progress.advance(task, count))
    finally:
        engine.close(0.0)


def _still_answers(_index: int, member: Member) -> Member | None:
    """Return the member if its label can be read."""
    try:
        read_label(member)
    except (FX100Error, OSError):
        return None
    return member


def _summary(
    volume: Volume, found: Recovered, result: ScrubResult, seconds: float
) -> dict[str, Any]:
    sound = not any(found.dropped[reason] for reason in IMPOSSIBLE)
    readable = not volume.damaged_labels and not found.unreadable_rows
    return {
        "ok": sound and readable and not result.bad,
        "volume": str(volume.label.volume),
        "seconds": round(seconds, 3),
        "torn_inodes": found.torn,
        "dropped_inodes": found.dropped_by_reason,
        "unreadable_inodes": len(found.unreadable_rows),
        "damaged_labels": list(volume.damaged_labels),
        **dataclasses.asdict(result),
    }


def _show(console: Console, config: Path, summary: dict[str, Any]) -> None:
    rate = summary["read_bytes"] / max(summary["seconds"], 1e-3)
    console.print(
        f"{summary['entries']:,} entries, {size_text(summary['read_bytes'])} read back in "
        f"{summary['seconds']:.1f} s ({size_text(rate)}/s)"
    )
    if summary["gone"]:
        console.print(f"{summary['gone']:,} pieces were evicted meanwhile")
    if summary["torn_inodes"]:
        console.print(f"{summary['torn_inodes']:,} torn inodes: interrupted writes, not counted")
    for line in dropped_lines(summary["dropped_inodes"]):
        console.print(line)
    if summary["unreadable_inodes"]:
        console.print(
            f"[bold red]bad:[/] {summary['unreadable_inodes']:,} inodes cannot be read: their "
            "entries are lost. A server overwrites them when it starts; look at the device "
            "(nvme smart-log)."
        )
    for piece in summary["bad"][:SHOWN]:
        console.print(
            f"[bold red]bad:[/] {escape(piece['member'])} at byte {piece['offset']}, "
            f"{piece['length']} bytes: {escape(piece['reason'])}; entry {piece['digest']}"
        )
    if len(summary["bad"]) > SHOWN:
        console.print(f"and {len(summary['bad']) - SHOWN:,} more; see --json")
    if summary["bad"]:
        console.print(
            "The server serves none of these: it reads them as misses and drops them. "
            "If there are more on one device, replace it (nvme smart-log)."
        )
    for name in summary["damaged_labels"]:
        console.print(
            f"[bold red]bad:[/] {escape(name)}: one label copy; see fx100 status {config}"
        )
    console.print("[green]all good[/]" if summary["ok"] else "[bold red]damage found[/]")
