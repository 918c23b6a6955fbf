"""Being connected as wanted. Doing it twice changes nothing the second time."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiofiles

from fx100_lmcache.config.nvme import NvmeAddress, NvmeSubsystem
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.errors import (
    AddressError,
    AlreadyConnectedError,
    HostIdentityError,
    NvmeError,
)
from fx100_lmcache.nvmf.fabrics import connect_with_secret
from fx100_lmcache.nvmf.plan import (
    ConnectPlan,
    ConnectStep,
    HostIdentity,
    plan_connect,
    present_at,
    wanted_addresses,
)
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.snapshot import Snapshot
from fx100_lmcache.nvmf.sysfs import Sysfs

logger = logging.getLogger(__name__)

ETC_NVME = Path("/etc/nvme")
SETTLE_S = 5.0
"""Wait for new controllers to be live, and for removed ones to be gone."""
POLL_S = 0.1


@dataclass
class ConnectReport:
    """What was planned, what was done, and what failed.

    Attributes
    ----------
    planned : list of str
        The plan as text.
    done : list of str
        Steps that were made; empty for a dry run, or if everything was in place.
    connected : list of FabricAddress
        Paths that these steps connected.
    notes : list of str
        What is not as wanted and no step changes, at the end.
    failures : list of (address, error)
        Paths that could not be connected while another one could.
    """

    subsystem_nqn: str
    planned: list[str]
    done: list[str] = field(default_factory=list)
    connected: list[FabricAddress] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[tuple[FabricAddress, NvmeError]] = field(default_factory=list)


async def host_identity(
    nqn: str | None = None, host_id: str | None = None, etc: Path = ETC_NVME
) -> HostIdentity:
    """Return the host's pair of names: both as configured, or both from `etc`.

    Raises
    ------
    HostIdentityError
        If one of them is missing.
    """
    if nqn and host_id:
        return HostIdentity(nqn, host_id)
    if nqn or host_id:
        raise HostIdentityError(
            f"only {'host_nqn' if nqn else 'host_id'} is configured, but they go together",
            remedy="give both host_nqn and host_id, or neither",
        )
    found = {name: await _line(etc / name) for name in ("hostnqn", "hostid")}
    for name, value in found.items():
        if not value:
            raise HostIdentityError(
                f"{etc / name} is missing or empty, and the configuration has no host_nqn and "
                "host_id",
                remedy=f"nvme gen-hostnqn > {etc}/hostnqn; "
                f"sed 's/.*uuid://' {etc}/hostnqn > {etc}/hostid",
            )
        if not value.isprintable() or "," in value or " " in value:
            raise HostIdentityError(
                f"{etc / name} must hold one name on one line, not {value!r}",
                remedy="correct that file",
            )
    return HostIdentity(found["hostnqn"], found["hostid"], str(etc))


async def connect_subsystem(
    wanted: NvmeSubsystem,
    host: HostIdentity,
    cli: NvmeCli,
    sysfs: Sysfs,
    dry_run: bool = False,
) -> ConnectReport:
    """Connect all paths of a subsystem that are not connected, and set the time-outs of all.

    Parameters
    ----------
    wanted : NvmeSubsystem
        The subsystem as configured.
    host : HostIdentity
        See `host_identity`.
    cli, sysfs : NvmeCli, Sysfs
        How to act and where to look.
    dry_run : bool
        Only say what would be done.

    Raises
    ------
    NvmeError
        If no path at all is there afterwards (the first path's error), if the host's names cannot
        be used, or if a time-out cannot be set.
    """
    addresses = [(await resolve_host(each))[0] for each in wanted_addresses(wanted)]
    plan = plan_connect(wanted, addresses, host, await sysfs.snapshot())
    report = ConnectReport(wanted.subsystem_nqn, plan.lines(), notes=list(plan.notes))
    if dry_run:
        return report
    for step in plan.connects:
        logger.info("connect %s: %s", wanted.subsystem_nqn, step)
        try:
            await _connect(step, cli)
            report.done.append(str(step))
            report.connected.append(step.address)
        except AlreadyConnectedError as error:
            # Somebody else was faster, or is connected as another host: the next look decides.
            if not present_at(wanted, step.address, await sysfs.snapshot()):
                report.failures.append((step.address, error))
        except NvmeError as error:
            report.failures.append((step.address, error))
    if report.failures and len(report.failures) == len(addresses):
        raise report.failures[0][1]
    for address, failure in report.failures:
        logger.info("connect %s: no path to %s: %s", wanted.subsystem_nqn, address, failure)
    left = await _settled(wanted, addresses, host, sysfs)
    report.notes = list(left.notes)
    await _tune(left, sysfs, report)
    return report


async def disconnect_subsystem(
    subsystem_nqn: str, cli: NvmeCli, sysfs: Sysfs, dry_run: bool = False
) -> ConnectReport:
    """Remove all controllers of a subsystem and wait until they are gone.

    Raises
    ------
    CommandError
        If nvme-cli fails.
    """
    there = list((await sysfs.snapshot()).controllers(subsystem_nqn))
    if not there:
        return ConnectReport(subsystem_nqn, ["nothing to do: not connected"])
    step = f"nvme disconnect -n {subsystem_nqn}  ({', '.join(each.name for each in there)})"
    report = ConnectReport(subsystem_nqn, [step])
    if dry_run:
        return report
    await cli.disconnect(subsystem_nqn)
    report.done.append(step)
    deadline = time.monotonic() + SETTLE_S
    while list((await sysfs.snapshot()).controllers(subsystem_nqn)):
        if time.monotonic() >= deadline:
            logger.warning("%s: controllers are still there after disconnect", subsystem_nqn)
            break
        await asyncio.sleep(POLL_S)
    return report


async def _connect(step: ConnectStep, cli: NvmeCli) -> None:
    if step.secret_file is not None:
        await connect_with_secret(step.options, step.secret_file, cli.timeout_s)
    else:
        await cli.run(*step.arguments)


async def _settled(
    wanted: NvmeSubsystem, addresses: list[FabricAddress], host: HostIdentity, sysfs: Sysfs
) -> ConnectPlan:
    """Wait until the connected paths are live; return the plan of what is left to be set."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        snapshot = await sysfs.snapshot()
        present = [each for at in addresses for each in present_at(wanted, at, snapshot)]
        settled = all(each.state == "live" for each in present)
        if settled or time.monotonic() >= deadline:
            return plan_connect(wanted, addresses, host, snapshot)
        await asyncio.sleep(POLL_S)


async def _tune(plan: ConnectPlan, sysfs: Sysfs, report: ConnectReport) -> None:
    for step in plan.tunes:
        logger.info("%s", step)
        await sysfs.write(step.controller, step.setting, step.value)
        report.done.append(str(step))


async def resolve_host(address: FabricAddress) -> list[FabricAddress]:
    """Replace a host name by each of its addresses: sysfs and the kernel know only numbers.

    Raises
    ------
    AddressError
        If the name has none.
    """
    if not address.traddr:
        return [address]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.traddr, address.trsvcid, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(
            f"resolve {address.traddr}",
            f"the name has no address ({error.strerror})",
            "correct traddr, /etc/hosts or DNS; an IP address never needs a name server",
        ) from error
    return [replace(address, traddr=str(each[4][0])) for each in found]


async def with_numbers(
    subsystems: Sequence[NvmeSubsystem], snapshot: Snapshot
) -> list[NvmeSubsystem]:
    """Replace host names by addresses, to compare them with what the kernel has.

    Of a name's addresses it is one that is connected, else the first. A name that has none stays.
    """
    return [
        each.model_copy(
            update={
                "addresses": tuple([await _number(each, at, snapshot) for at in each.addresses])
            }
        )
        for each in subsystems
    ]


async def _number(wanted: NvmeSubsystem, at: NvmeAddress, snapshot: Snapshot) -> NvmeAddress:
    try:
        meant = await resolve_host(FabricAddress(at.traddr, str(at.trsvcid)))
    except AddressError:
        return at
    there = [each for each in meant if present_at(wanted, each, snapshot)]
    return at.model_copy(update={"traddr": (there or meant)[0].traddr})


async def _line(path: Path) -> str:
    try:
        async with aiofiles.open(path, encoding="utf-8", errors="replace") as file:
            return (await file.read(256)).strip()
    except OSError:
        return ""
