"""What the members are: files, or namespaces with their controllers, as the kernel shows them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

from fx100_lmcache.accept.bench import Bench, judge_findings
from fx100_lmcache.accept.steps import (
    CannotRunError,
    Outcome,
    Table,
    does_not_apply,
)
from fx100_lmcache.config import subsystems_named
from fx100_lmcache.nvmf.scope import part_of_volume
from fx100_lmcache.nvmf.snapshot import FABRICS, Controller, Snapshot
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.volume.opening import member_paths

_TOOL_S = 30.0
FILES = "the members are files"
_KELVIN = 273


def member_files(bench: Bench) -> list[Path]:
    """Return the members' device nodes or files, in the configuration's order."""
    return member_paths(bench.config)


def are_files(bench: Bench) -> bool:
    """Whether no member is a block device."""
    return not any(stat.S_ISBLK(path.stat().st_mode) for path in member_files(bench))


def snapshot_of(bench: Bench) -> Snapshot:
    """Return the subsystems of the volume, as they are now."""
    whole = asyncio.run(Sysfs(bench.sysfs).snapshot())
    devices = {os.path.realpath(path) for path in member_files(bench)}
    return part_of_volume(whole, devices, subsystems_named(bench.config))


def fabric_controllers(snapshot: Snapshot) -> list[Controller]:
    """Return the controllers that are reached over a fabric."""
    return [each for each in snapshot.controllers() if each.transport in FABRICS]


def identity(bench: Bench) -> Outcome:
    """Say what each member is; controllers must be alike in model and firmware."""
    outcome = Outcome()
    rows = []
    for path in member_files(bench):
        found = path.stat()
        device = stat.S_ISBLK(found.st_mode)
        rows.append((str(path), "block device" if device else "file", _size(path)))
    outcome.tables.append(Table("members", ("path", "kind", "bytes"), tuple(rows)))
    snapshot = snapshot_of(bench)
    if not snapshot.subsystems:
        kind = FILES if are_files(bench) else "the members are no NVMe namespaces"
        outcome.note("identity", f"{kind}: no firmware and no features to compare")
        return outcome
    _namespaces(snapshot, outcome)
    _firmware(bench, snapshot, outcome)
    return outcome


def _size(path: Path) -> int:
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _namespaces(snapshot: Snapshot, outcome: Outcome) -> None:
    rows = tuple(
        (each.device, str(each.identity), each.size_bytes, each.lba_bytes, each.max_hw_sectors_kb)
        for subsystem in snapshot.subsystems
        for each in subsystem.namespaces
    )
    columns = ("device", "identity", "bytes", "LBA bytes", "largest transfer KiB")
    outcome.tables.append(Table("namespaces", columns, rows))
    for at, what in ((2, "sizes"), (3, "LBA sizes")):
        kinds = sorted({str(row[at]) for row in rows})
        if kinds:
            outcome.judge(what, ", ".join(kinds), "all the same", len(kinds) == 1)


def _firmware(bench: Bench, snapshot: Snapshot, outcome: Outcome) -> None:
    rows = []
    for controller in snapshot.controllers():
        about = bench_json(bench, "id-ctrl", f"/dev/{controller.name}")
        words = (str(about.get(key, "")).strip() for key in ("mn", "sn", "fr"))
        rows.append((controller.name, controller.transport, *words, about.get("mdts", ""),
                     about.get("oncs", ""), about.get("cmic", "")))  # fmt: skip
    columns = ("controller", "transport", "model", "serial", "firmware", "MDTS", "ONCS", "CMIC")
    outcome.tables.append(Table("controllers", columns, tuple(rows)))
    wanted = bench.criteria.g1.firmware
    found = sorted({row[4] for row in rows})
    good = len(found) == 1 and wanted in (None, found[0])
    outcome.judge("firmware", ", ".join(found), wanted or "all the same", good)
    models = sorted({row[2] for row in rows})
    outcome.judge("model", ", ".join(models), "all the same", len(models) == 1)


def bench_json(bench: Bench, command: str, device: str) -> dict[str, Any]:
    """Ask nvme-cli about a device.

    Raises
    ------
    CannotRunError
        If it is not there, refuses, or prints no JSON.
    """
    argv = ["nvme", command, device, "--output-format=json"]
    ended = bench.run(argv, f"nvme-{command}-{Path(device).name}", _TOOL_S)
    if ended.code:
        said = ended.stderr.decode(errors="replace").strip() or ended.stdout.decode(
            errors="replace"
        )
        raise CannotRunError(f"nvme {command} {device}: {said.strip()[:300]}")
    try:
        answer = json.loads(ended.stdout)
    except ValueError as problem:
        raise CannotRunError(f"nvme {command} {device} printed no JSON: {problem}") from problem
    return answer if isinstance(answer, dict) else {}


def smart(bench: Bench) -> Outcome:
    """Look at the health that each namespace's controller reports."""
    devices = [
        each.device for subsystem in snapshot_of(bench).subsystems for each in subsystem.namespaces
    ]
    if not devices:
        return does_not_apply(f"{FILES}, or no NVMe namespaces")
    outcome, rows = Outcome(), []
    limit = bench.criteria.g1.max_percent_used
    for device in devices:
        log = bench_json(bench, "smart-log", device)
        used = int(log.get("percent_used", log.get("percentage_used", 0)))
        warning = _warning(log.get("critical_warning", 0))
        errors = int(log.get("media_errors", 0))
        rows.append((device, warning, errors, used, int(log.get("temperature", 0)) - _KELVIN))
        outcome.judge(f"{device} critical warning", str(warning), "0", warning == 0)
        outcome.judge(f"{device} media errors", str(errors), "0", errors == 0)
        outcome.judge(f"{device} percentage used", str(used), f"at most {limit}", used <= limit)
    columns = ("device", "critical warning", "media errors", "percentage used", "degrees C")
    outcome.tables.append(Table("SMART", columns, tuple(rows)))
    return outcome


def _warning(value: Any) -> int:
    """Return the byte; newer nvme-cli splits it into its bits, with the byte as ``value``."""
    return int(value.get("value", 0)) if isinstance(value, dict) else int(value)


def paths(bench: Bench) -> Outcome:
    """Look at every path: its state, its queues, and the network interface that it uses."""
    snapshot = snapshot_of(bench)
    if not fabric_controllers(snapshot):
        return does_not_apply("no member is reached over a fabric")
    wanted, outcome, rows = bench.criteria.g1, Outcome(), []
    for subsystem in snapshot.subsystems:
        here = [each for each in subsystem.controllers if each.transport in FABRICS]
        live = sum(each.state == "live" for each in here)
        outcome.judge(
            f"{subsystem.nqn}: live paths",
            f"{live} of {len(here)}",
            f"all, and at least {wanted.min_paths or 1}",
            live == len(here) >= (wanted.min_paths or 1),
        )
        for each in here:
            port = _interface(bench, each)
            rows.append((each.name, each.transport, str(each.address), each.state,
                         each.io_queues or 0, each.queue_size or 0, *port))  # fmt: skip
            _judge_port(outcome, each, port, wanted.mtu_bytes, wanted.port_mbit_per_s)
    columns = ("controller", "transport", "address", "state", "I/O queues", "commands per queue",
               "interface", "MTU", "Mbit/s")  # fmt: skip
    outcome.tables.append(Table("paths", columns, tuple(rows)))
    return outcome


def _judge_port(
    outcome: Outcome,
    controller: Controller,
    port: tuple[str, int, int],
    mtu: int | None,
    speed: int | None,
) -> None:
    name, has_mtu, has_speed = port
    if not name:
        outcome.note(f"{controller.name}: interface", "not found")
        return
    for what, has, wanted in (("MTU", has_mtu, mtu), ("Mbit/s", has_speed, speed)):
        if wanted is not None:
            subject = f"{controller.name} over {name}: {what}"
            outcome.judge(subject, str(has), f"at least {wanted}", has >= wanted)


def _interface(bench: Bench, controller: Controller) -> tuple[str, int, int]:
    """Return name, MTU and Mbit/s of the interface towards a controller; -1 where unknown."""
    name = controller.address.host_iface or _route(bench, controller.address.traddr)
    if not name:
        return "", -1, -1
    folder = bench.sysfs / "class" / "net" / name
    return name, _number(folder / "mtu"), _number(folder / "speed")


def _route(bench: Bench, address: str) -> str:
    if not address:
        return ""
    try:
        ended = bench.run(["ip", "-j", "route", "get", address], f"route-{address}", _TOOL_S)
        return str(json.loads(ended.stdout)[0].get("dev", "")) if ended.code == 0 else ""
    except (CannotRunError, ValueError, LookupError):
        return ""


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # a virtual interface has no speed
        return -1


def nvme_check(bench: Bench) -> Outcome:
    """Have ``fx100 nvme check`` judge controllers and namespaces."""
    code, answer = bench.fx100("nvme", "check", str(bench.config_path))
    if not answer["findings"]:
        return does_not_apply(f"{FILES}, or reached over no fabric")
    outcome = Outcome(raw=answer)
    judge_findings(outcome, code, answer["findings"], ("warning", "note"))
    return outcome
