"""``fx100 nvme``: connect the array's namespaces, and see whether they suit the job."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fx100_lmcache.cli.console import (
    EXIT_FAILED,
    ConfigPath,
    JsonFlag,
    explained,
    human,
    print_error,
    print_json,
    size_text,
)
from fx100_lmcache.cli.inspect import inspect
from fx100_lmcache.config import Config, load
from fx100_lmcache.config.nvme import NvmeConfig, NvmeSubsystem
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.check import FABRICS, Finding, Severity, check, worst
from fx100_lmcache.nvmf.connect import (
    ConnectReport,
    connect_subsystem,
    disconnect_subsystem,
    host_identity,
)
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.nvmf.parse import DiscoveryRecord
from fx100_lmcache.nvmf.plan import wanted_addresses
from fx100_lmcache.nvmf.resolve import find, identity_of, resolve
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.snapshot import Namespace, Snapshot, Subsystem
from fx100_lmcache.nvmf.sysfs import Sysfs

APPEAR_S = 5.0
"""Wait for the members after a connect: the kernel scans namespaces in the background."""

_COLOURS = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.PROBLEM: "bold red",
}

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
    found = asyncio.run(_discover(settings))
    wanted = {each.subsystem_nqn for each in settings.subsystems}
    if as_json:
        print_json({"addresses": [each.as_dict(wanted) for each in found]})
    for each in found if not as_json else ():
        _show_discovery(each, wanted)
    if any(each.error or not each.wanted <= each.names for each in found):
        raise typer.Exit(EXIT_FAILED)


@app.command("connect")
@explained
def connect_command(config: ConfigPath, dry_run: DryRun = False) -> None:
    """Connect what is not connected, and set the time-outs of what is. Twice changes nothing.

    Then wait until the volume's namespaces are there. Exit code 1 if a subsystem, a path or a
    namespace is missing.
    """
    settings = load(config)
    section = _nvme_section(settings)
    host = asyncio.run(host_identity(section.host_nqn, section.host_id))
    cli, sysfs = NvmeCli(), Sysfs()

    def connect(wanted: NvmeSubsystem) -> Awaitable[ConnectReport]:
        return connect_subsystem(wanted, host, cli, sysfs, dry_run)

    failed = _for_each_subsystem(section, connect, dry_run)
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
    until the subsystems are connected again.
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
        _describe(snapshot, namespace, members.get(namespace.device))
        for subsystem in _fabric(snapshot)
        for namespace in subsystem.namespaces
    ]
    if as_json:
        problems = [{"member": at, "problem": str(why)} for at, why in missing.items()]
        print_json({"namespaces": rows, "missing": problems})
    else:
        for row in rows:
            _show_namespace(row)
        for position, why in missing.items():
            human().print(f"[bold red]missing:[/] volume.members[{position}]")
            human().print(str(why), markup=False)
    if missing:
        raise typer.Exit(EXIT_FAILED)


@app.command("check")
@explained
def check_command(config: ConfigPath, as_json: JsonFlag = False) -> None:
    """Explain every controller and namespace: is it well, why it matters, what to type.

    Exit code 1 if there is a problem; warnings and notes do not count.

    [bold]JSON fields:[/] worst ("ok", "note", "warning", "problem"); findings: severity, subject,
    what, why, do.
    """
    settings = load(config)
    snapshot = asyncio.run(Sysfs().snapshot())
    wanted = settings.nvme.subsystems if settings.nvme else ()
    findings = check(snapshot, wanted, os.cpu_count() or 1)
    findings += [_missing(at, why) for at, why in _members_in(settings, snapshot)[1].items()]
    gravest = worst(findings)
    if as_json:
        found = [dataclasses.asdict(each) for each in findings]
        print_json({"worst": gravest, "findings": found})
    for each in findings if not as_json else ():
        _show_finding(each)
    if not findings and not as_json:
        human().print("no NVMe-oF controllers and none configured")
    if gravest is Severity.PROBLEM:
        raise typer.Exit(EXIT_FAILED)


def _nvme_section(config: Config) -> NvmeConfig:
    if config.nvme is None:
        raise NvmeError(
            "the configuration has no section nvme, so there is nothing to connect\n"
            "  do: list the subsystems under nvme.subsystems (see configs/nvmeof.yaml)"
        )
    return config.nvme


@dataclasses.dataclass
class _Discovery:
    """What one address said; `wanted` are the configured subsystems that should be there."""

    transport: str
    address: FabricAddress
    wanted: set[str]
    offered: list[DiscoveryRecord] = dataclasses.field(default_factory=list)
    error: NvmeError | None = None

    @property
    def names(self) -> set[str]:
        return {record.subsystem_nqn for record in self.offered}

    def as_dict(self, configured: set[str]) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "address": str(self.address),
            "error": str(self.error) if self.error else None,
            "offered": [
                {
                    "subsystem_nqn": record.subsystem_nqn,
                    "transport": record.transport,
                    "address": str(record.address),
                    "configured": record.subsystem_nqn in configured,
                }
                for record in self.offered
            ],
        }


async def _discover(section: NvmeConfig) -> list[_Discovery]:
    host = await host_identity(section.host_nqn, section.host_id)
    cli = NvmeCli()
    asked: dict[tuple[str, FabricAddress], _Discovery] = {}
    for subsystem in section.subsystems:
        for address in wanted_addresses(subsystem):
            key = (subsystem.transport, address)
            asked.setdefault(key, _Discovery(*key, set())).wanted.add(subsystem.subsystem_nqn)
    for each in asked.values():
        options = [f"--transport={each.transport}", f"--hostnqn={host.nqn}", f"--hostid={host.id}"]
        given = dataclasses.asdict(each.address)
        options += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value]
        try:
            records = await cli.discover(*options)
            each.offered = [record for record in records if not record.is_discovery]
        except NvmeError as error:
            each.error = error
    return list(asked.values())


def _show_discovery(found: _Discovery, configured: set[str]) -> None:
    console = human()
    console.print(f"[bold]{found.transport} {escape(str(found.address))}[/]")
    if found.error is not None:
        print_error(found.error)
        return
    for record in found.offered:
        mark = "configured" if record.subsystem_nqn in configured else "not configured"
        console.print(f"  {record.subsystem_nqn} at {record.address} ({mark})", markup=False)
    for nqn in sorted(found.wanted - found.names):
        console.print(f"  [bold red]not offered:[/] {escape(nqn)}")
        console.print("    do: allow this host's NQN on the array, or correct nvme.subsystems")


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
        _show_report(report, dry_run)
        failed = failed or bool(report.failures)
    return failed


def _show_report(report: ConnectReport, dry_run: bool) -> None:
    console = human()
    if dry_run:
        for line in report.planned:
            console.print(f"  would: {line}", markup=False)
        return
    for line in report.done or ["nothing to do"]:
        console.print(f"  {line}", markup=False)
    for note in report.notes:
        console.print(f"  [yellow]note:[/] {escape(note)}")
    for address, error in report.failures:
        console.print(f"  [bold red]no path to {escape(str(address))}[/]")
        print_error(error)


async def _wait_for_members(config: Config, sysfs: Sysfs) -> None:
    for member in config.volume.members:
        if member.nvme is not None:
            found = await resolve(identity_of(member.nvme), sysfs, timeout_s=APPEAR_S)
            human().print(f"{found.device} is {found.identity}", markup=False)


def _refuse_in_use(config: Path) -> None:
    for shard in inspect(config).shards:
        if shard.state == "in use":
            raise ClaimError(
                f"shard {shard.shard} of the volume is in use: {shard.holder}. Stop that process "
                "first, or give --force: it then misses until the subsystems are back"
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


def _describe(snapshot: Snapshot, namespace: Namespace, member: int | None) -> dict[str, Any]:
    return {
        "device": namespace.device,
        "member": member,
        **dataclasses.asdict(namespace.identity),
        "size_bytes": namespace.size_bytes,
        "lba_bytes": namespace.lba_bytes,
        "paths": [
            {
                "controller": path.controller,
                "transport": controller.transport,
                "address": str(controller.address),
                "state": controller.state,
                "ana_state": path.ana_state,
            }
            for controller, path in snapshot.paths(namespace.device)
        ],
    }


def _show_namespace(row: dict[str, Any]) -> None:
    console = human()
    member = "no member" if row["member"] is None else f"volume.members[{row['member']}]"
    size = f"{size_text(row['size_bytes'])}, LBA {row['lba_bytes']} B"
    console.print(f"[bold]{row['device']}[/] {escape(member)}, {size}")
    for name in ("nguid", "eui64", "uuid"):
        if row[name]:
            console.print(f"  {name} {row[name]}")
    console.print(f"  nsid {row['nsid']} of {row['subsystem_nqn']}", markup=False)
    for path in row["paths"]:
        where = f"{path['controller']} {path['transport']} {path['address']}"
        state = " ".join(filter(None, (path["state"], path["ana_state"])))
        console.print(f"  path {where} {state}", markup=False)


def _missing(position: int, why: NvmeError) -> Finding:
    what, _, advice = str(why).partition("\n  do: ")
    return Finding(
        Severity.PROBLEM,
        f"volume.members[{position}]",
        what,
        "its share of every object cannot be read or written",
        advice or "fx100 nvme connect",
    )


def _show_finding(finding: Finding) -> None:
    console = human()
    console.print(
        f"[{_COLOURS[finding.severity]}]{finding.severity}:[/] {escape(finding.subject)}: "
        f"{escape(finding.what)}"
    )
    for name, text in (("why", finding.why), ("do", finding.do)):
        if text:
            console.print(f"  {name}: {text}", markup=False)
