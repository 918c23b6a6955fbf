"""What ``fx100 nvme`` prints, for people and as plain values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from fx100_lmcache.cli.console import human, print_error, size_text
from fx100_lmcache.findings import Finding, Severity
from fx100_lmcache.nvmf.connect import ConnectReport
from fx100_lmcache.nvmf.discover import Discovery
from fx100_lmcache.nvmf.snapshot import Namespace, Snapshot

_COLOURS = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.PROBLEM: "bold red",
}


def describe_discovery(found: Discovery, configured: set[str]) -> dict[str, Any]:
    """Return what an address said as plain values."""
    return {
        "transport": found.transport,
        "address": str(found.address),
        "error": str(found.error) if found.error else None,
        "offered": [
            {
                "subsystem_nqn": record.subsystem_nqn,
                "transport": record.transport,
                "address": str(record.address),
                "configured": record.subsystem_nqn in configured,
            }
            for record in found.offered
        ],
    }


def show_discovery(found: Discovery, configured: set[str]) -> None:
    """Print what an address offers, and what it should."""
    console = human()
    console.print(f"[bold]{found.transport} {escape(str(found.address))}[/]")
    if found.error is not None:
        print_error(found.error)
        return
    for record in found.offered:
        mark = "configured" if record.subsystem_nqn in configured else "not configured"
        console.print(f"  {record.subsystem_nqn} at {record.address} ({mark})", markup=False)
    for nqn in sorted(found.missing):
        console.print(f"  [bold red]not offered:[/] {escape(nqn)}")
        console.print("    do: allow this host's NQN on the array, or correct nvme.subsystems")


def show_report(report: ConnectReport, dry_run: bool) -> None:
    """Print what was done about a subsystem, or would be."""
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


def describe(snapshot: Snapshot, namespace: Namespace, member: int | None) -> dict[str, Any]:
    """Return a namespace and its paths as plain values."""
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


def show_namespace(row: dict[str, Any]) -> None:
    """Print what `describe` returned."""
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


def describe_others(others: Snapshot) -> list[dict[str, Any]]:
    """Return what is connected and not the volume's, as plain values."""
    return [
        {
            "subsystem": subsystem.name,
            "subsystem_nqn": subsystem.nqn,
            "controllers": [
                f"{each.name} {each.transport} {each.address} {each.state}"
                for each in subsystem.controllers
            ],
            "namespaces": [each.device for each in subsystem.namespaces],
        }
        for subsystem in others.subsystems
    ]


def show_check(findings: Sequence[Finding], others: Sequence[dict[str, Any]]) -> None:
    """Print what was judged, and what was not."""
    for each in findings:
        show_finding(each)
    if not findings:
        human().print("no NVMe-oF controllers of this volume, and none configured")
    for other in others:
        there = ", ".join(other["controllers"] + other["namespaces"]) or "nothing"
        name = f"{other['subsystem']} ({other['subsystem_nqn']})"
        human().print(f"not judged, as not of this volume: {name}: {there}", markup=False)


def show_finding(finding: Finding) -> None:
    """Print a finding as what, why and what to type."""
    console = human()
    console.print(
        f"[{_COLOURS[finding.severity]}]{finding.severity}:[/] {escape(finding.subject)}: "
        f"{escape(finding.what)}"
    )
    for name, text in (("why", finding.why), ("do", finding.do)):
        if text:
            console.print(f"  {name}: {text}", markup=False)
