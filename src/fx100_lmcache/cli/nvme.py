"""``fx100 nvme``: connect the array's namespaces, and see whether they suit the job."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fx100_lmcache.admin.inspect import inspect
from fx100_lmcache.cli.console import (
    EXIT_FAILED,
    ConfigPath,
    JsonFlag,
    explained,
    human,
    print_error,
    print_json,
)
from fx100_lmcache.cli.nvme_views import (
    describe,
    describe_discovery,
    describe_others,
    show_check,
    show_discovery,
    show_namespace,
    show_report,
)
from fx100_lmcache.cli.waiting import Wait, say
from fx100_lmcache.config import Config, load, subsystems_named
from fx100_lmcache.config.nvme import NvmeConfig, NvmeSubsystem
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.findings import Finding, Severity, worst
from fx100_lmcache.nvmf.check import check
from fx100_lmcache.nvmf.connect import (
    ConnectReport,
    connect_subsystem,
    disconnect_subsystem,
    host_identity,
    with_numbers,
)
from fx100_lmcache.nvmf.discover import discover
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.nvmf.resolve import find, identity_of, resolve
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.scope import part_of_volume, rest_of_host
from fx100_lmcache.nvmf.snapshot import FABRICS, Snapshot, Subsystem
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.volume.arrival import missing_members, missing_paths, wait_for_members

APPEAR_S = 5.0
"""Wait for the members after a connect: the kernel scans namespaces in the background."""

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]

app = typer.Typer(
    name="nvme",
    help="Connect NVMe-oF subsystems, and see whether their settings suit the job.",
    no_args_is_help=True,
)


@app.command("discover")
@explained
def discover_command(config: ConfigPath, as_json: JsonFlag = False) -> None:
    """Ask every configured address which subsystems it offers to this host.

    Exit code 1 if an address does not answer, or a configured subsystem is not offered there.

    [bold]JSON fields:[/] addresses: transport, address, error (null), offered: subsystem_nqn,
    transport, address, configured.
    """
    settings = _nvme_section(load(config))
    found = asyncio.run(discover(settings, NvmeCli()))
    wanted = {each.subsystem_nqn for each in settings.subsystems}
    if as_json:
        print_json({"addresses": [describe_discovery(each, wanted) for each in found]})
    for each in found if not as_json else ():
        show_discovery(each, wanted)
    if any(each.error or each.missing for each in found):
        raise typer.Exit(EXIT_FAILED)


@app.command("connect")
@explained
def connect_command(config: ConfigPath, dry_run: DryRun = False, wait_s: Wait = 0) -> None:
    """Connect what is not connected, and set the time-outs of what is. Twice changes nothing.

    Then wait until the volume's namespaces are there: with `--wait` as long as that says, and
    paths are tried again. Exit code 1 if a subsystem, a path or a namespace is missing.
    """
    settings = load(config)
    section = _nvme_section(settings)
    host = asyncio.run(host_identity(section.host_nqn, section.host_id))
    cli, sysfs = NvmeCli(), Sysfs()

    def connect(wanted: NvmeSubsystem) -> Awaitable[ConnectReport]:
        return connect_subsystem(wanted, host, cli, sysfs, dry_run)

    failed = _for_each_subsystem(section, connect, dry_run)
    if wait_s and not dry_run:
        wait_for_members(
            settings,
            wait_s,
            say,
            missing=lambda: missing_paths(section) + missing_members(settings),
            connect=True,
        )
        failed = failed and _for_each_subsystem(section, connect, dry_run)
    if not failed and not dry_run:
        asyncio.run(_wait_for_members(settings, sysfs))
    if failed:
        raise typer.Exit(EXIT_FAILED)


@app.command("disconnect")
@explained
def disconnect_command(
    config: ConfigPath,
    dry_run: DryRun = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if a running server uses the volume.")
    ] = False,
) -> None:
    """Disconnect the configured subsystems; all their namespaces go, also those of others.

    Refused while a process of this host uses the volume, or `--force`: then its lookups miss
    until the subsystems are connected again, which it does itself where `nvme.reconnect` is on.
    """
    section = _nvme_section(load(config))
    if not force and not dry_run:
        _refuse_in_use(config)
    cli, sysfs = NvmeCli(), Sysfs()

    def disconnect(wanted: NvmeSubsystem) -> Awaitable[ConnectReport]:
        return disconnect_subsystem(wanted.subsystem_nqn, cli, sysfs, dry_run)

    if _for_each_subsystem(section, disconnect, dry_run):
        raise typer.Exit(EXIT_FAILED)


@app.command("list")
@explained
def list_command(config: ConfigPath, as_json: JsonFlag = False) -> None:
    """List this host's NVMe-oF namespaces, and which members of the volume they are.

    Exit code 1 if a member's namespace is not there.

    [bold]JSON fields:[/] namespaces: device, member (position in volume.members, or null),
    subsystem_nqn, nsid, nguid, eui64, uuid, size_bytes, lba_bytes, paths: controller, transport,
    address, state, ana_state; missing: member, problem.
    """
    settings = load(config)
    snapshot = asyncio.run(Sysfs().snapshot())
    members, missing = _members_in(settings, snapshot)
    rows = [
        describe(snapshot, namespace, members.get(namespace.device))
        for subsystem in _fabric(snapshot)
        for namespace in subsystem.namespaces
    ]
    if as_json:
        problems = [{"member": at, "problem": str(why)} for at, why in missing.items()]
        print_json({"namespaces": rows, "missing": problems})
    else:
        for row in rows:
            show_namespace(row)
        if not rows:
            human().print("no NVMe-oF namespaces on this host")
        for position, why in missing.items():
            human().print(f"[bold red]missing:[/] volume.members[{position}]")
            human().print(str(why), markup=False)
    if missing:
        raise typer.Exit(EXIT_FAILED)


@app.command("check")
@explained
def check_command(config: ConfigPath, as_json: JsonFlag = False) -> None:
    """Explain the volume's controllers and namespaces: is it well, why it matters, what to type.

    What else is connected on this host is listed, but not judged. Exit code 1 if there is a
    problem; warnings and notes do not count.

    [bold]JSON fields[/] (only ever added to): worst ("ok", "note", "warning", "problem");
    findings: severity, subject, what, why, do, member; others (not judged): subsystem,
    subsystem_nqn, controllers, namespaces (device nodes).
    """
    settings = load(config)
    snapshot = asyncio.run(Sysfs().snapshot())
    configured = settings.nvme.subsystems if settings.nvme else ()
    wanted = asyncio.run(with_numbers(configured, snapshot))
    members, missing = _members_in(settings, snapshot)
    ours = part_of_volume(snapshot, members, subsystems_named(settings))
    others = describe_others(rest_of_host(snapshot, ours))
    findings = check(ours, wanted, os.cpu_count() or 1)
    findings += [_missing(at, why) for at, why in missing.items()]
    gravest = worst(findings)
    if as_json:
        found = [dataclasses.asdict(each) for each in findings]
        print_json({"worst": gravest, "findings": found, "others": others})
    else:
        show_check(findings, others)
    if gravest is Severity.PROBLEM:
        raise typer.Exit(EXIT_FAILED)


def _nvme_section(config: Config) -> NvmeConfig:
    if config.nvme is None:
        raise NvmeError(
            "the configuration has no section nvme, so there is nothing to connect",
            remedy="list the subsystems under nvme.subsystems (see configs/nvmeof.yaml)",
        )
    return config.nvme


def _for_each_subsystem(
    section: NvmeConfig, act: Callable[[NvmeSubsystem], Awaitable[ConnectReport]], dry_run: bool
) -> bool:
    """Go through all subsystems, also after one failed; return whether one did."""
    failed = False
    for wanted in section.subsystems:
        human().print(f"[bold]{escape(wanted.subsystem_nqn)}[/]")

        async def go(wanted: NvmeSubsystem = wanted) -> ConnectReport:
            return await act(wanted)

        try:
            report = asyncio.run(go())
        except NvmeError as error:
            print_error(error)
            failed = True
            continue
        show_report(report, dry_run)
        failed = failed or bool(report.failures)
    return failed


async def _wait_for_members(config: Config, sysfs: Sysfs) -> None:
    for member in config.volume.members:
        if member.nvme is not None:
            found = await resolve(identity_of(member.nvme), sysfs, timeout_s=APPEAR_S)
            human().print(f"{found.device} is {found.identity}", markup=False)


def _refuse_in_use(config: Path) -> None:
    for shard in inspect(config).shards:
        if shard.state == "in use":
            raise ClaimError(
                f"shard {shard.shard} of the volume is in use: {shard.holder}",
                remedy="stop that process first, or give --force: it then misses until the "
                "subsystems are back",
            )


def _members_in(config: Config, snapshot: Snapshot) -> tuple[dict[str, int], dict[int, NvmeError]]:
    """Return the members' positions by device, and why the others are missing."""
    there: dict[str, int] = {}
    missing: dict[int, NvmeError] = {}
    for position, member in enumerate(config.volume.members):
        try:
            if member.nvme is not None:
                there[find(snapshot, identity_of(member.nvme)).device] = position
            elif member.path is not None:
                there[os.path.realpath(member.path)] = position
        except NvmeError as error:
            missing[position] = error
    return there, missing


def _fabric(snapshot: Snapshot) -> Iterable[Subsystem]:
    """Yield the subsystems that are reached over a fabric."""
    for subsystem in snapshot.subsystems:
        if any(controller.transport in FABRICS for controller in subsystem.controllers):
            yield subsystem


def _missing(position: int, why: NvmeError) -> Finding:
    return Finding(
        Severity.PROBLEM,
        f"volume.members[{position}]",
        why.what,
        "its share of every object cannot be read or written",
        why.remedy or "fx100 nvme connect",
    )
