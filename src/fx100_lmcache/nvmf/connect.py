"""Being connected as wanted. Doing it twice changes nothing the second time."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiofiles

from fx100_lmcache.config.nvme import NvmeAddress, NvmeSubsystem
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.errors import (
    AddressError,
    HostIdentityError,
    NvmeError,
)
from fx100_lmcache.nvmf.fabrics import connect_with_secret
from fx100_lmcache.nvmf.plan import (
    GOING_STATES,
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
BEING_MADE = "new"
"""State of a controller whose first connect has not succeeded yet."""


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
        Paths that were missing before and are there now.
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
    tried = [(step, await _connect(wanted, step, cli)) for step in plan.connects]
    failed = {step.address for step, error in tried if error is not None}
    snapshot = await _settled(wanted, addresses, failed, sysfs)
    for step, error in tried:
        _judge(step, error, _is_there(wanted, step.address, host, snapshot), report)
    if report.failures and len(report.failures) == len(addresses):
        raise report.failures[0][1]
    for address, failure in report.failures:
        logger.info("connect %s: no path to %s: %s", wanted.subsystem_nqn, address, failure)
    left = plan_connect(wanted, addresses, host, snapshot)
    report.notes = list(left.notes)
    await _tune(left, sysfs, report)
    return report


async def disconnect_subsystem(
    subsystem_nqn: str, cli: NvmeCli, sysfs: Sysfs, dry_run: bool = False
) -> ConnectReport:
    """Remove all controllers of a subsystem and wait until they are gone.

    Raises
    ------
    NvmeError
        If one is still there afterwards, and not even about to go.
    """
    there = list((await sysfs.snapshot()).controllers(subsystem_nqn))
    if not there:
        return ConnectReport(subsystem_nqn, ["nothing to do: not connected"])
    step = f"nvme disconnect -n {subsystem_nqn}  ({', '.join(each.name for each in there)})"
    report = ConnectReport(subsystem_nqn, [step])
    if dry_run:
        return report
    error: NvmeError | None = None
    try:
        await cli.disconnect(subsystem_nqn)
    except NvmeError as problem:  # whoever was faster, or an odd version: the next look decides
        error = problem
    deadline = time.monotonic() + SETTLE_S
    while left := list((await sysfs.snapshot()).controllers(subsystem_nqn)):
        staying = [each.name for each in left if each.state not in GOING_STATES]
        late = time.monotonic() >= deadline
        if staying and (error or late):
            raise error or _still_there(subsystem_nqn, staying)
        if late:
            logger.warning("%s: controllers are still going after disconnect", subsystem_nqn)
            break
        await asyncio.sleep(POLL_S)
    report.done.append(step)
    return report


def _still_there(subsystem_nqn: str, names: Sequence[str]) -> NvmeError:
    return NvmeError(
        f"{subsystem_nqn}: {', '.join(names)} still there {SETTLE_S:g} s after nvme disconnect",
        remedy="look with nvme list-subsys; somebody may connect it again (nvme.reconnect of a "
        "running server does)",
    )


async def _connect(wanted: NvmeSubsystem, step: ConnectStep, cli: NvmeCli) -> NvmeError | None:
    """Try one step; return what the command complained of."""
    logger.info("connect %s: %s", wanted.subsystem_nqn, step)
    try:
        if step.secret_file is not None:
            await connect_with_secret(step.options, step.secret_file, cli.timeout_s)
        else:
            await cli.run(*step.arguments)
    except NvmeError as error:
        return error
    return None


async def _settled(
    wanted: NvmeSubsystem,
    addresses: Sequence[FabricAddress],
    failed: Collection[FabricAddress],
    sysfs: Sysfs,
) -> Snapshot:
    """Wait until the paths are live, those too that nobody said to have `failed`; return a look."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        snapshot = await sysfs.snapshot()
        there = {at: present_at(wanted, at, snapshot) for at in addresses}
        settled = all(
            all(each.state == "live" for each in present) and (present or at in failed)
            for at, present in there.items()
        )
        if settled or time.monotonic() >= deadline:
            return snapshot
        await asyncio.sleep(POLL_S)


def _is_there(
    wanted: NvmeSubsystem, address: FabricAddress, host: HostIdentity, snapshot: Snapshot
) -> bool:
    """Whether a path is connected, as this host; one that is still being made is not."""
    return any(
        each.state != BEING_MADE and each.host_nqn in (None, host.nqn)
        for each in present_at(wanted, address, snapshot)
    )


def _judge(step: ConnectStep, error: NvmeError | None, there: bool, report: ConnectReport) -> None:
    """Note how a step ended: by what is there now, not by what the command said of it."""
    if not there:
        nothing = NvmeError(
            f"{step}: ended without an error, but there is no controller for {step.address}",
            remedy="look with nvme list-subsys; dmesg says why the kernel dropped it",
        )
        report.failures.append((step.address, error or nothing))
        return
    report.connected.append(step.address)
    if error is None:
        report.done.append(str(step))
    else:  # somebody else was faster, or it fell over something after the connect
        logger.info("%s is connected, although the command failed: %s", step.address, error)


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
    except (OSError, UnicodeError) as error:  # the latter for a label that is too long or empty
        raise AddressError(
            f"resolve {address.traddr}",
            f"the name has no address ({getattr(error, 'strerror', None) or error})",
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
