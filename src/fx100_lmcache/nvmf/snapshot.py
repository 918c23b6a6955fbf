"""What the kernel knew of NVMe at one moment, as plain values without any I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity

NEVER = -1
"""A time-out of the kernel that is switched off: it waits for ever."""

FABRICS = ("tcp", "rdma", "loop", "fc")
"""Transports that are no local bus."""

USABLE_ANA_STATES = ("optimized", "non-optimized")


@dataclass(frozen=True)
class Controller:
    """One association between this host and a subsystem, e.g. ``nvme0``.

    Attributes
    ----------
    name : str
        The kernel's name. It says nothing about the names of namespaces.
    state : str
        ``live``, ``connecting``, ``resetting``, ``deleting``, ...
    io_queues, queue_size : int or None
        I/O queues without the admin queue; commands per queue.
    keep_alive_s, reconnect_delay_s : int or None
        Seconds; None where the kernel does not say (e.g. PCIe).
    ctrl_loss_timeout_s, fast_io_fail_s : int or None
        Seconds, `NEVER` where switched off, None where the kernel does not say.
    """

    name: str
    subsystem_nqn: str
    transport: str
    address: FabricAddress
    state: str
    host_nqn: str | None = None
    host_id: str | None = None
    io_queues: int | None = None
    queue_size: int | None = None
    keep_alive_s: int | None = None
    reconnect_delay_s: int | None = None
    ctrl_loss_timeout_s: int | None = None
    fast_io_fail_s: int | None = None


@dataclass(frozen=True)
class NamespacePath:
    """One controller's way to a namespace.

    With native multipath a path has a hidden node of its own (``nvme0c1n1``) that nobody may
    open; without it the path is the namespace's only node.

    Attributes
    ----------
    ana_state : str or None
        ``optimized``, ``non-optimized``, ``inaccessible``, ...; None without ANA.
    scheduler : str or None
        I/O scheduler in force; it works on paths, the head node has none.
    """

    name: str
    controller: str
    ana_state: str | None = None
    scheduler: str | None = None


@dataclass(frozen=True)
class Namespace:
    """One block device that may be opened: a head node, never a hidden path.

    Attributes
    ----------
    device : str
        The node, e.g. ``/dev/nvme0n1``. The digits are not the NSID.
    device_number : str
        ``major:minor`` as sysfs says, to compare with the node.
    size_bytes, lba_bytes : int
        Capacity and logical block size.
    max_hw_sectors_kb, max_sectors_kb : int or None
        Largest transfer that device and driver state, and the limit in force; KiB.
    wwid : str or None
        The kernel's own choice of a name, for people.
    """

    name: str
    device: str
    device_number: str
    identity: NamespaceIdentity
    size_bytes: int
    lba_bytes: int
    max_hw_sectors_kb: int | None = None
    max_sectors_kb: int | None = None
    wwid: str | None = None
    paths: tuple[NamespacePath, ...] = ()

    def __str__(self) -> str:
        return f"{self.device} ({self.identity}, {self.size_bytes} bytes, LBA {self.lba_bytes})"


@dataclass(frozen=True)
class Subsystem:
    """One NVMe subsystem with its controllers and namespaces."""

    name: str
    nqn: str
    iopolicy: str | None = None
    model: str | None = None
    serial: str | None = None
    controllers: tuple[Controller, ...] = ()
    namespaces: tuple[Namespace, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """Everything that sysfs showed, read piece by piece: a device may go meanwhile."""

    subsystems: tuple[Subsystem, ...] = field(default=())

    def controllers(self, subsystem_nqn: str | None = None) -> Iterator[Controller]:
        """Yield all controllers, or those of one subsystem."""
        for subsystem in self.subsystems:
            if subsystem_nqn in (None, subsystem.nqn):
                yield from subsystem.controllers

    def paths(self, device: str) -> Iterator[tuple[Controller, NamespacePath]]:
        """Yield the paths to a device node, each with its controller."""
        for subsystem in self.subsystems:
            controllers = {each.name: each for each in subsystem.controllers}
            for namespace in subsystem.namespaces:
                if namespace.device == device:
                    for path in namespace.paths:
                        if (controller := controllers.get(path.controller)) is not None:
                            yield controller, path

    def namespaces(self) -> Iterator[Namespace]:
        """Yield all namespaces that may be opened."""
        for subsystem in self.subsystems:
            yield from subsystem.namespaces
