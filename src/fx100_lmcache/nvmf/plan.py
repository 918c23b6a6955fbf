"""What has to be done to be connected as wanted. Pure: it only compares."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fx100_lmcache.config.nvme import NvmeSubsystem
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.errors import HostIdentityError
from fx100_lmcache.nvmf.snapshot import Controller, Snapshot
from fx100_lmcache.nvmf.sysfs import Setting

GOING_STATES = ("deleting", "deleting (no IO)", "dead")
"""States of controllers that will not come back."""


@dataclass(frozen=True)
class HostIdentity:
    """The host's two names. The kernel wants them as a pair, one to one.

    Attributes
    ----------
    nqn, id : str
        Host NQN, and host ID (a UUID).
    source : str
        Where they come from, for messages.
    """

    nqn: str
    id: str
    source: str = "the configuration"


@dataclass(frozen=True)
class ConnectStep:
    """Connect one controller.

    Attributes
    ----------
    arguments : tuple of str
        For the ``nvme`` program; they hold no secret.
    options : str
        The same for ``/dev/nvme-fabrics``, used when there is a secret.
    """

    address: FabricAddress
    arguments: tuple[str, ...]
    options: str
    secret_file: Path | None = None

    def __str__(self) -> str:
        if self.secret_file is not None:
            secret = f"dhchap_secret=(from {self.secret_file})"
            return f"write to /dev/nvme-fabrics: {self.options},{secret}"
        return f"nvme {shlex.join(self.arguments)}"


@dataclass(frozen=True)
class TuneStep:
    """Write one time-out of a connected controller to sysfs; seconds."""

    controller: str
    setting: Setting
    value: int
    was: int

    def __str__(self) -> str:
        path = f"/sys/class/nvme/{self.controller}/{self.setting}"
        return f"echo {self.value} > {path}  (is {'off' if self.was < 0 else self.was})"


@dataclass(frozen=True)
class ConnectPlan:
    """Steps in order, and what was found that no step changes."""

    subsystem_nqn: str
    connects: tuple[ConnectStep, ...]
    tunes: tuple[TuneStep, ...]
    notes: tuple[str, ...]
    fast_io_fail_s: int

    def lines(self) -> list[str]:
        """Return the plan as text, one line per step or note."""
        after = [
            f"then, for each new controller: echo {self.fast_io_fail_s} > "
            "/sys/class/nvme/(controller)/fast_io_fail_tmo"
        ]
        steps = [*map(str, self.connects), *(after if self.connects else []), *map(str, self.tunes)]
        return [*(steps or ["nothing to do"]), *(f"note: {note}" for note in self.notes)]


def plan_connect(
    wanted: NvmeSubsystem,
    addresses: Sequence[FabricAddress],
    host: HostIdentity,
    snapshot: Snapshot,
) -> ConnectPlan:
    """Compare what is wanted with what is there.

    Parameters
    ----------
    wanted : NvmeSubsystem
        The subsystem as configured.
    addresses : sequence of FabricAddress
        Its paths with host names resolved; one empty address for transport loop.
    host : HostIdentity
        Names to connect with.
    snapshot : Snapshot
        What the kernel has now.

    Raises
    ------
    HostIdentityError
        If the kernel would refuse the pair of host names.
    """
    check_pair(host, snapshot)
    connects: list[ConnectStep] = []
    tunes: list[TuneStep] = []
    notes: list[str] = []
    for address in addresses:
        present = present_at(wanted, address, snapshot)
        if not present:
            connects.append(_connect_step(wanted, address, host))
        for controller in present:
            tunes += _tune_steps(wanted, controller)
            notes += _notes(wanted, controller, host)
    return ConnectPlan(
        wanted.subsystem_nqn, tuple(connects), tuple(tunes), tuple(notes), wanted.fast_io_fail_s
    )


def wanted_addresses(wanted: NvmeSubsystem) -> list[FabricAddress]:
    """Return the configured paths; transport loop has one without an address."""
    if wanted.transport == "loop":
        return [FabricAddress()]
    return [
        FabricAddress(
            traddr=each.traddr,
            trsvcid=str(each.trsvcid),
            host_traddr=each.host_traddr or "",
            host_iface=each.host_iface or "",
        )
        for each in wanted.addresses
    ]


def present_at(
    wanted: NvmeSubsystem, address: FabricAddress, snapshot: Snapshot
) -> list[Controller]:
    """Return the controllers that are this path already, connected or reconnecting."""
    return [
        controller
        for controller in snapshot.controllers(wanted.subsystem_nqn)
        if controller.transport == wanted.transport
        and controller.state not in GOING_STATES
        and (wanted.transport == "loop" or controller.address.reaches(address))
    ]


def check_pair(host: HostIdentity, snapshot: Snapshot) -> None:
    """Refuse a host NQN that the kernel uses with another host ID, or the other way round.

    Raises
    ------
    HostIdentityError
        Naming the controller that uses the other partner.
    """
    for controller in snapshot.controllers():
        if controller.host_nqn is None or controller.host_id is None:
            continue
        same_nqn, same_id = controller.host_nqn == host.nqn, controller.host_id == host.id
        if same_nqn != same_id:
            raise HostIdentityError(
                f"host NQN {host.nqn} and host ID {host.id} (from {host.source}) cannot be used: "
                f"{controller.name} to {controller.subsystem_nqn} has host NQN "
                f"{controller.host_nqn} with host ID {controller.host_id}, and the kernel wants "
                "them one to one",
                remedy="use that pair, or disconnect that controller first",
            )


def _connect_step(wanted: NvmeSubsystem, address: FabricAddress, host: HostIdentity) -> ConnectStep:
    # Name for nvme-cli, name for the kernel, value: the kernel's differ by underscores and more.
    rows: list[tuple[str, str, object]] = [
        ("transport", "transport", wanted.transport),
        ("nqn", "nqn", wanted.subsystem_nqn),
        ("traddr", "traddr", address.traddr),
        ("trsvcid", "trsvcid", address.trsvcid),
        ("host-traddr", "host_traddr", address.host_traddr),
        ("host-iface", "host_iface", address.host_iface),
        ("hostnqn", "hostnqn", host.nqn),
        ("hostid", "hostid", host.id),
        ("nr-io-queues", "nr_io_queues", wanted.nr_io_queues),
        ("queue-size", "queue_size", wanted.queue_size),
        ("keep-alive-tmo", "keep_alive_tmo", wanted.keep_alive_s),
    ]
    if wanted.transport != "loop":  # which refuses them at connect, but has them in sysfs
        rows += [
            ("reconnect-delay", "reconnect_delay", wanted.reconnect_delay_s),
            ("ctrl-loss-tmo", "ctrl_loss_tmo", wanted.ctrl_loss_timeout_s),
        ]
    given = [row for row in rows if row[2] not in (None, "")]
    return ConnectStep(
        address,
        ("connect", *(f"--{cli_name}={value}" for cli_name, _, value in given)),
        ",".join(f"{kernel_name}={value}" for _, kernel_name, value in given),
        wanted.dhchap_secret_file,
    )


def _tune_steps(wanted: NvmeSubsystem, controller: Controller) -> list[TuneStep]:
    steps: list[TuneStep] = []

    def want(setting: Setting, value: int, now: int | None, again: bool = False) -> None:
        if now is not None and (now != value or again):
            steps.append(TuneStep(controller.name, setting, value, now))

    delay_s, loss_s = wanted.reconnect_delay_s, wanted.ctrl_loss_timeout_s
    want("reconnect_delay", delay_s, controller.reconnect_delay_s)
    # The kernel keeps the loss time-out as a number of attempts: it shows a multiple of the delay,
    # and it changes with the delay, so it is set after that.
    now_s = controller.ctrl_loss_timeout_s
    if steps or now_s != math.ceil(loss_s / delay_s) * delay_s:
        want("ctrl_loss_tmo", loss_s, now_s, again=True)
    want("fast_io_fail_tmo", wanted.fast_io_fail_s, controller.fast_io_fail_s)
    return steps


def _notes(wanted: NvmeSubsystem, controller: Controller, host: HostIdentity) -> list[str]:
    notes = []
    where = f"{controller.name} ({controller.address})"
    if controller.state != "live":
        notes.append(f"{where} is {controller.state}; the kernel keeps trying to reconnect")
    if controller.host_nqn not in (None, host.nqn):
        notes.append(f"{where} is connected under host NQN {controller.host_nqn}, not {host.nqn}")
    fixed = (
        ("I/O queues", wanted.nr_io_queues, controller.io_queues),
        ("commands per queue", wanted.queue_size, controller.queue_size),
        ("s keep-alive", wanted.keep_alive_s, controller.keep_alive_s),
    )
    for what, value, now in fixed:
        if None not in (value, now) and value != now:
            notes.append(
                f"{where} has {now} {what}, not {value}: fixed at connect, and target and CPUs may "
                "allow less"
            )
    if controller.fast_io_fail_s is None:
        notes.append(f"{where} has no fast_io_fail_tmo: kernel too old, stalled I/O is not bounded")
    return notes
