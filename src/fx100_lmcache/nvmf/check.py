"""Whether what is there suits the job: what, why it matters, what to type. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fx100_lmcache.config.nvme import MAX_FAST_IO_FAIL_S, NvmeSubsystem
from fx100_lmcache.findings import Finding, Severity
from fx100_lmcache.nvmf.plan import present_at, wanted_addresses
from fx100_lmcache.nvmf.snapshot import (
    FABRICS,
    NEVER,
    USABLE_ANA_STATES,
    Controller,
    Namespace,
    NamespacePath,
    Snapshot,
    Subsystem,
)

LBA_BYTES = (512, 4096)
WANTED_TRANSFER_KB = 1024
"""One call of ours moves up to 1 MiB; below that the kernel cuts it into pieces."""
NO_LIMIT_KB = 1 << 20
"""A transfer limit of 1 GiB and more: the target states none (MDTS 0)."""
MAX_KEEP_ALIVE_S = 30
"""A path that drops packets silently is noticed only after the keep-alive time-out."""
MIN_IO_QUEUES = 4
"""Published on 10 GbE: one or few queues leave most of a port unused."""


def check(snapshot: Snapshot, wanted: Sequence[NvmeSubsystem] = (), cpus: int = 1) -> list[Finding]:
    """Judge every NVMe-oF controller and namespace of a snapshot.

    Parameters
    ----------
    snapshot : Snapshot
        What is there and of interest, see `scope`. Local (PCIe) subsystems are left out.
    wanted : sequence of NvmeSubsystem
        What the configuration asks for; may be empty.
    cpus : int
        CPUs of the host: more I/O queues than these are of no use.

    Returns
    -------
    list of Finding
        At least one for every controller and namespace, so that silence never means well.
    """
    found: list[Finding] = []
    for each in wanted:
        found += _missing_paths(each, snapshot)
    for subsystem in snapshot.subsystems:
        controllers = [each for each in subsystem.controllers if each.transport in FABRICS]
        if not controllers:
            continue
        found += _check_subsystem(subsystem, controllers)
        for controller in controllers:
            found += _check_controller(controller, _wanted_of(subsystem, wanted), cpus)
        for namespace in subsystem.namespaces:
            found += _check_namespace(namespace)
    return found


def _wanted_of(subsystem: Subsystem, wanted: Sequence[NvmeSubsystem]) -> NvmeSubsystem | None:
    return next((each for each in wanted if each.subsystem_nqn == subsystem.nqn), None)


def _missing_paths(wanted: NvmeSubsystem, snapshot: Snapshot) -> Iterator[Finding]:
    for address in wanted_addresses(wanted):
        if not present_at(wanted, address, snapshot):
            yield Finding(
                Severity.PROBLEM,
                wanted.subsystem_nqn,
                f"not connected over {wanted.transport} to {address}",
                "its namespaces are missing, or one path less carries the load",
                "fx100 nvme connect",
            )


def _check_subsystem(subsystem: Subsystem, controllers: list[Controller]) -> Iterator[Finding]:
    subject = f"{subsystem.name} ({subsystem.nqn})"
    live = sum(each.state == "live" for each in controllers)
    if live == 0:
        yield Finding(
            Severity.PROBLEM,
            subject,
            f"none of {len(controllers)} paths is live",
            "its namespaces cannot be read; lookups must not promise what lies on them",
            "check the array's ports and the network; the kernel reconnects by itself",
        )
    elif len(controllers) == 1:
        yield Finding(Severity.NOTE, subject, "one path", "when it is lost, everything on it is")
    elif subsystem.iopolicy == "numa":
        yield Finding(
            Severity.WARNING,
            subject,
            f"{live} paths live, I/O policy numa",
            "all I/O of this host takes one path; the others only wait for it to fail",
            f"echo round-robin > /sys/class/nvme-subsystem/{subsystem.name}/iopolicy "
            "(queue-depth on kernel 6.11 and newer)",
        )
    else:
        policy = subsystem.iopolicy or "unknown"
        yield Finding(Severity.OK, subject, f"{live} paths live, I/O policy {policy}")


def _check_controller(
    controller: Controller, wanted: NvmeSubsystem | None, cpus: int
) -> Iterator[Finding]:
    subject = f"{controller.name} ({controller.transport} {controller.address})"
    yield _state(controller, subject)
    yield _bounded(controller, subject)
    yield from _time_outs(controller, subject)
    yield _queues(controller, subject, wanted, cpus)
    if wanted and controller.queue_size not in (None, wanted.queue_size):
        yield Finding(
            Severity.NOTE,
            subject,
            f"{controller.queue_size} commands per queue, {wanted.queue_size} wanted",
            "fewer commands in flight; the target may allow no more",
            "fx100 nvme disconnect; fx100 nvme connect",
        )


def _state(controller: Controller, subject: str) -> Finding:
    if controller.state == "live":
        return Finding(Severity.OK, subject, "live")
    return Finding(
        Severity.PROBLEM,
        subject,
        controller.state,
        "this path carries no I/O",
        "check the array's port and the network; dmesg says why the kernel cannot reconnect",
    )


def _bounded(controller: Controller, subject: str) -> Finding:
    """Is a stalled I/O bounded? The answer is fast_io_fail_tmo and nothing else."""
    fail_s, loss_s = controller.fast_io_fail_s, controller.ctrl_loss_timeout_s
    if fail_s is not None and 0 <= fail_s <= MAX_FAST_IO_FAIL_S:
        return Finding(Severity.OK, subject, f"I/O on a lost path fails after {fail_s} s")
    why = (
        "a load that hangs in the kernel keeps LMCache's buffer, and its request waits; our own "
        "deadline frees the caller, not the buffer"
    )
    if fail_s is None:
        upgrade = "use kernel 5.11 or newer, which has fast_io_fail_tmo"
        return Finding(Severity.PROBLEM, subject, "stalled I/O is not bounded", why, upgrade)
    if fail_s == NEVER and loss_s is not None:
        until = "for ever" if loss_s == NEVER else f"until the controller is dropped ({loss_s} s)"
        what = f"I/O on a lost path waits {until}"
    else:
        what = f"I/O on a lost path waits {fail_s} s, more than {MAX_FAST_IO_FAIL_S} s"
    path = f"/sys/class/nvme/{controller.name}/fast_io_fail_tmo"
    return Finding(Severity.PROBLEM, subject, what, why, f"echo {MAX_FAST_IO_FAIL_S} > {path}")


def _time_outs(controller: Controller, subject: str) -> Iterator[Finding]:
    loss_s, delay_s = controller.ctrl_loss_timeout_s, controller.reconnect_delay_s
    if loss_s is not None and 0 <= loss_s < 60:
        yield Finding(
            Severity.WARNING,
            subject,
            f"the controller is dropped after {loss_s} s without its target",
            "the device node vanishes and comes back under another name only after a new connect",
            f"echo 600 > /sys/class/nvme/{controller.name}/ctrl_loss_tmo",
        )
    if delay_s is not None and delay_s > 10:
        yield Finding(
            Severity.NOTE,
            subject,
            f"{delay_s} s between attempts to reconnect",
            "a target that is back serves again only after the next attempt",
            f"echo 2 > /sys/class/nvme/{controller.name}/reconnect_delay",
        )
    alive_s = controller.keep_alive_s
    if alive_s is not None and not 0 < alive_s <= MAX_KEEP_ALIVE_S:
        yield Finding(
            Severity.WARNING,
            subject,
            "no keep-alive" if alive_s == 0 else f"keep-alive time-out {alive_s} s",
            "a dead path is noticed late, and the target keeps the queues of a dead host",
            "connect again with keep_alive: 5s",
        )


def _queues(
    controller: Controller, subject: str, wanted: NvmeSubsystem | None, cpus: int
) -> Finding:
    have = controller.io_queues
    asked = wanted.nr_io_queues if wanted else None
    enough = min(asked or MIN_IO_QUEUES, cpus)
    if have is None or have >= enough:
        return Finding(Severity.OK, subject, f"{'unknown' if have is None else have} I/O queues")
    return Finding(
        Severity.WARNING,
        subject,
        f"{have} I/O queues, {asked or enough} would be right",
        "each queue is one connection served by one CPU; too few leave the port idle",
        "set nr_io_queues, or raise the target's limit; then fx100 nvme disconnect and connect",
    )


def _check_namespace(namespace: Namespace) -> Iterator[Finding]:
    subject = f"{namespace.device} (nsid {namespace.identity.nsid})"
    yield _identified(namespace, subject)
    yield _lba(namespace, subject)
    yield _transfer(namespace, subject)
    yield from _paths(namespace, subject)


def _identified(namespace: Namespace, subject: str) -> Finding:
    if namespace.identity.unique_names():
        return Finding(Severity.OK, subject, f"is {namespace.identity.best_name()}")
    return Finding(
        Severity.WARNING,
        subject,
        "has no NGUID, EUI-64 or UUID",
        "only its number in the subsystem names it, and an array may give that to another one",
        "give the namespace an NGUID or UUID on the array",
    )


def _lba(namespace: Namespace, subject: str) -> Finding:
    what = f"logical blocks of {namespace.lba_bytes} B, {namespace.size_bytes} B in all"
    if namespace.size_bytes and namespace.lba_bytes in LBA_BYTES:
        return Finding(Severity.OK, subject, what)
    return Finding(
        Severity.PROBLEM,
        subject,
        what,
        "512 and 4096 B are supported, and an empty namespace is a disabled one",
        "format or enable the namespace on the array",
    )


def _transfer(namespace: Namespace, subject: str) -> Finding:
    limit_kb, device_kb = namespace.max_sectors_kb, namespace.max_hw_sectors_kb
    if limit_kb is None or device_kb is None:
        return Finding(Severity.NOTE, subject, "transfer limit unknown")
    no_limit = device_kb >= NO_LIMIT_KB
    what = f"transfers up to {limit_kb} KiB, device states " + (
        "no limit" if no_limit else f"{device_kb} KiB"
    )
    if limit_kb < WANTED_TRANSFER_KB <= device_kb:
        files = " ".join(_queue_files(namespace, "max_sectors_kb"))
        return Finding(
            Severity.WARNING,
            subject,
            what,
            f"the kernel cuts our calls of {WANTED_TRANSFER_KB} KiB into pieces",
            f"echo {WANTED_TRANSFER_KB} | tee {files}",
        )
    if no_limit:
        why = "some NVMe/TCP targets fail large requests they never limited; max_io caps ours"
        return Finding(Severity.NOTE, subject, what, why)
    return Finding(Severity.OK, subject, what)


def _paths(namespace: Namespace, subject: str) -> Iterator[Finding]:
    states = [path.ana_state for path in namespace.paths if path.ana_state is not None]
    if states and not any(state in USABLE_ANA_STATES for state in states):
        yield Finding(
            Severity.PROBLEM,
            subject,
            f"no usable path: {', '.join(sorted(set(states)))}",
            "I/O blocks until the array offers a path again",
            "look at the array: which of its controllers owns this namespace?",
        )
    elif states and "optimized" not in states:
        yield Finding(
            Severity.WARNING,
            subject,
            "only non-optimized paths",
            "the array forwards each request between its controllers, which is slower",
            "connect the owning controller's ports too, or move the namespace",
        )
    for path in namespace.paths:
        if path.scheduler not in (None, "none"):
            yield Finding(
                Severity.WARNING,
                subject,
                f"scheduler {path.scheduler} on path {path.name}",
                "it sorts for spinning disks, under one lock; it costs CPU and mixes reads with "
                "writes",
                f"echo none > {_path_queue(path)}/scheduler",
            )


def _path_queue(path: NamespacePath) -> str:
    return f"/sys/class/nvme/{path.controller}/{path.name}/queue"


def _queue_files(namespace: Namespace, attribute: str) -> list[str]:
    """Name the attribute's file of the namespace and of each of its paths: both cut requests."""
    queues = [f"/sys/block/{namespace.name}/queue"]
    queues += [_path_queue(path) for path in namespace.paths if path.name != namespace.name]
    return [f"{queue}/{attribute}" for queue in queues]
