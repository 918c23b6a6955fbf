"""``fx100 format``: show the plan, ask, write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fx100_lmcache.cli.console import (
    EXIT_FAILED,
    ConfigPath,
    JsonFlag,
    agreed,
    explained,
    human,
    print_json,
    progress_bar,
    size_text,
)
from fx100_lmcache.cli.waiting import Wait, wait_as_asked
from fx100_lmcache.config import load
from fx100_lmcache.errors import VolumeError
from fx100_lmcache.members.allocation import Allocation, allocation_of
from fx100_lmcache.ondisk.geometry import Geometry
from fx100_lmcache.volume.format import FormatPlan, format_members, plan_format, refuse_foreign
from fx100_lmcache.volume.volume import Volume


@explained
def format_command(
    config: ConfigPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite members that hold something else.")
    ] = False,
    allocate: Annotated[
        bool,
        typer.Option(
            "--allocate",
            help="Write zeros over all of every member first, so that sparse files and thin "
            "devices really have the space. Refused if there is no room.",
        ),
    ] = False,
    as_json: JsonFlag = False,
    wait_s: Wait = 0,
) -> None:
    """Make a new, empty volume on the members; what they hold is lost.

    Files with a `size` are created, and written through. Nothing is written before every member
    was looked at: one that holds foreign data or is in use is refused.

    [bold]JSON fields:[/] volume (UUID); members: path, size_bytes, logical_block_bytes, created,
    destroyed (what it held, or null), allocated_bytes (what the storage below really has; null
    where it does not say), thin (it promises more than it has); shards, block_bytes, frame_bytes,
    inode_bytes, inode_slots, capacity_bytes.
    """
    wait_as_asked(config, wait_s, creating=True)
    settings = load(config)
    console = human(as_json)
    try:
        plan = plan_format(settings, allocate=allocate)
        if not as_json or not yes:
            _show_plan(console, plan, allocate)
        if not force:
            for (name, _, _), contents in zip(plan.members, plan.contents, strict=True):
                refuse_foreign(name, contents)
        if not yes:
            _ask(plan)
        with progress_bar() as progress:
            listed = [size for _, size, _ in plan.members] if allocate else []
            total = sum(listed) or sum(size for _, size in plan.create)
            task = progress.add_task("writing zeros", total=total, visible=bool(total))
            volume = format_members(
                settings,
                plan,
                force=force,
                allocate=allocate,
                progress=lambda count: progress.advance(task, count),
            )
    except OSError as problem:
        raise VolumeError(f"a member cannot be read or written: {problem}") from problem
    allocations = [allocation_of(member) for member in volume.members]
    for member in volume.members:
        member.close()
    if as_json:
        print_json(_result(plan, volume, allocations))
    else:
        if allocate:
            _show_still_thin(console, volume, allocations)
        console.print(f"[green]formatted[/] volume {volume.label.volume}")
        console.print(f"next: fx100 status {config}", markup=False)


def _ask(plan: FormatPlan) -> None:
    lost = any(contents.kind != "nothing" for contents in plan.contents)
    if not agreed("Destroy what the members hold, and format?" if lost else "Format?"):
        human(as_json=True).print("Nothing was written. To go ahead, answer y or give --yes.")
        raise typer.Exit(EXIT_FAILED)


def _show_still_thin(console: Console, volume: Volume, allocations: Sequence[Allocation]) -> None:
    """Name the members whose storage made nothing of the zeros, as compressing ones do."""
    for member, allocation in zip(volume.members, allocations, strict=True):
        if allocation.thin:
            console.print(
                f"[yellow]warning:[/] {escape(member.name)} is {_thin_text(allocation)} even now: "
                "the storage below keeps no zeros. Only free space there helps"
            )


def _thin_text(allocation: Allocation) -> str:
    there = allocation.allocated_bytes
    return "thin" if there is None else f"sparse ({size_text(there)} allocated)"


def _show_plan(console: Console, plan: FormatPlan, allocate: bool) -> None:
    table = Table("member", "size", "logical block", "what happens", title="Plan", expand=False)
    new = {str(path) for path, _ in plan.create}
    for (name, size, block), contents in zip(plan.members, plan.contents, strict=True):
        fate = "file is created and zeroed" if name in new else "empty"
        if contents.kind != "nothing":
            fate = f"[bold red]destroyed:[/] {escape(contents.what)}"
        if allocate and name not in new:
            fate += "; zeros are written over all of it"
        block_text = "-" if name in new else f"{block} B"
        table.add_row(escape(name), size_text(size), block_text, fate)
    console.print(table)
    for name, value in _sizes(plan.geometry).items():
        console.print(f"  {name:<16} {value}", markup=False)
    for (name, _, _), allocation in zip(plan.members, plan.allocations, strict=True):
        if allocation.thin and not allocate:
            console.print(
                f"[yellow]warning:[/] {escape(name)} is {_thin_text(allocation)}: writes find no "
                "space when the storage below is full. --allocate makes sure of it now"
            )


def _sizes(geometry: Geometry) -> dict[str, str]:
    numbers = _numbers(geometry)
    per_inode = numbers["capacity_bytes"] / numbers["inode_slots"]
    share = geometry.rows * geometry.inode_bytes / sum(m.size_bytes for m in geometry.members)
    return {
        "shards": str(numbers["shards"]),
        "block": size_text(numbers["block_bytes"]),
        "frame": f"{size_text(numbers['frame_bytes'])} ({geometry.frame_blocks} blocks)",
        "inode": size_text(numbers["inode_bytes"]),
        "inode slots": f"{numbers['inode_slots']:,} (the most objects there can be), "
        f"one for {size_text(per_inode)}: {share:.1%} of the space",
        "capacity": f"{size_text(numbers['capacity_bytes'])} for data",
    }


def _numbers(geometry: Geometry) -> dict[str, int]:
    blocks = geometry.total_blocks(range(geometry.shards))
    return {
        "shards": geometry.shards,
        "block_bytes": geometry.block_bytes,
        "frame_bytes": geometry.frame_bytes,
        "inode_bytes": geometry.inode_bytes,
        "inode_slots": geometry.rows,
        "capacity_bytes": blocks * geometry.block_bytes,
    }


def _result(plan: FormatPlan, volume: Volume, allocations: Sequence[Allocation]) -> dict[str, Any]:
    new = {path for path, _ in plan.create}
    members = [
        {
            "path": member.name,
            "size_bytes": member.size_bytes,
            "logical_block_bytes": member.logical_block_bytes,
            "created": Path(member.name) in new,
            "destroyed": contents.what or None,
            "allocated_bytes": allocation.allocated_bytes,
            "thin": allocation.thin,
        }
        for member, contents, allocation in zip(
            volume.members, plan.contents, allocations, strict=True
        )
    ]
    return {"volume": str(volume.label.volume), "members": members, **_numbers(volume.geometry)}
