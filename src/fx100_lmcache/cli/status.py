"""``fx100 status``: what a volume is, who owns it, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fx100_lmcache.admin.inspect import MemberReport, Report, ShardReport, Usage, inspect
from fx100_lmcache.cli.console import (
    EXIT_FAILED,
    ConfigPath,
    JsonFlag,
    dropped_lines,
    explained,
    human,
    print_json,
    size_text,
)
from fx100_lmcache.cli.waiting import Wait, wait_as_asked
from fx100_lmcache.findings import Finding


@explained
def status_command(
    config: ConfigPath,
    as_json: JsonFlag = False,
    watch_s: Annotated[
        float,
        typer.Option(
            "--watch",
            min=0,
            max=600,
            metavar="SECONDS",
            help="Watch so long whether the owners of shards renew their claims.",
        ),
    ] = 0.0,
    wait_s: Wait = 0,
) -> None:
    """Show a volume: members, owners, usage, problems. Reads only, also beside a live server.

    Exit code 1 if the volume would not open or not work.

    [bold]JSON fields[/] (only ever added to): healthy; config; volume (UUID or null);
    formatted_unix_s; members: path, identity, index, label ("good", "damaged copy", "unreadable"),
    io_mode ("direct", "buffered", null), logical_block_bytes, size_bytes, formatted_bytes,
    allocated_bytes (null where the storage below does not say), paths; shards: shard, state ("in
    use", "free", "left behind", "claimed by another host"), holder, generation, epoch, same_boot
    (the holder runs, or ran, under this kernel), renews (an owner of this kind shows that it
    lives), still_s (how long the claim stood still at the end of --watch, or null); usage (null
    unless the volume is whole): entries, live_bytes, used_bytes, free_bytes, capacity_bytes,
    inode_slots, torn_inodes, dropped_inodes (by reason), used_share (the larger of the shares of
    blocks and inodes in use), limit ("blocks" or "inodes"); problems and warnings: severity,
    subject, what, why, do, member (its path, or null).
    """
    wait_as_asked(config, wait_s)
    report = inspect(config, watch_s)
    if as_json:
        print_json(report.as_dict())
    else:
        _show(human(), report)
    if not report.healthy:
        raise typer.Exit(EXIT_FAILED)


def _show(console: Console, report: Report) -> None:
    if report.volume is not None:
        console.print(f"volume {report.volume}")
    if report.members:
        console.print(_member_table(report.members))
    if report.shards:
        console.print(_shard_table(report.shards))
    if report.usage is not None:
        _show_usage(console, report.usage)
    show_problems(console, report.warnings, "[yellow]warning:[/]")
    show_problems(console, report.problems, "[bold red]problem:[/]")
    console.print("[green]healthy[/]" if report.healthy else "[bold red]not healthy[/]")


def show_problems(console: Console, problems: Iterable[Finding], heading: str) -> None:
    """Print each problem as what, why and what to type."""
    for problem in problems:
        console.print(f"{heading} {escape(problem.what)}")
        console.print(f"  why: {escape(problem.why)}")
        console.print(f"  do:  {escape(problem.do)}")


def _member_table(members: Iterable[MemberReport]) -> Table:
    table = Table("#", "member", "size", "I/O", "logical block", "label", "paths")
    for member in members:
        name = member.path or ", ".join(f"{k}={v}" for k, v in member.identity.items())
        table.add_row(
            "?" if member.index is None else str(member.index),
            escape(name),
            "-" if member.size_bytes is None else size_text(member.size_bytes),
            member.io_mode or "-",
            "-" if member.logical_block_bytes is None else f"{member.logical_block_bytes} B",
            member.label,
            escape("\n".join(member.paths)) or "-",
        )
    return table


def _shard_table(shards: Iterable[ShardReport]) -> Table:
    table = Table("shard", "state", "this boot", "stands still", "holder")
    for shard in shards:
        table.add_row(
            str(shard.shard),
            shard.state,
            ("yes" if shard.same_boot else "no") if shard.holder else "-",
            "-" if shard.still_s is None else f"{shard.still_s:g} s",
            escape(shard.holder) or "-",
        )
    return table


def _show_usage(console: Console, usage: Usage) -> None:
    share = usage.used_bytes / usage.capacity_bytes
    console.print(
        f"entries {usage.entries:,} of at most {usage.inode_slots:,} inodes "
        f"({usage.entries / usage.inode_slots:.1%}), {size_text(usage.live_bytes)} of data"
    )
    console.print(
        f"used {size_text(usage.used_bytes)} ({share:.1%}), free {size_text(usage.free_bytes)}, "
        f"capacity {size_text(usage.capacity_bytes)}"
    )
    if usage.torn_inodes:
        console.print(
            f"torn inodes {usage.torn_inodes:,}: writes that a crash or a running server "
            "interrupted; they do not count, and their slots are used again"
        )
    for line in dropped_lines(usage.dropped_inodes):
        console.print(line)
