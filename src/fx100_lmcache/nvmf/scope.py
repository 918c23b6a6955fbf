"""What of a host's NVMe-oF is the volume's, and what is somebody else's. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fx100_lmcache.nvmf.snapshot import FABRICS, Snapshot


def part_of_volume(snapshot: Snapshot, devices: Collection[str], nqns: Collection[str]) -> Snapshot:
    """Leave out what the configuration does not name.

    Parameters
    ----------
    devices : collection of str
        Device nodes of the members, without symbolic links.
    nqns : collection of str
        Subsystems that the configuration names.

    Returns
    -------
    Snapshot
        The subsystems named and those with a member, with all their controllers, since any of them
        may carry the members' I/O; of their namespaces the members alone.
    """
    return Snapshot(
        tuple(
            replace(subsystem, namespaces=members)
            for subsystem in snapshot.subsystems
            if (members := tuple(n for n in subsystem.namespaces if n.device in devices))
            or subsystem.nqn in nqns
        )
    )


def rest_of_host(snapshot: Snapshot, ours: Snapshot) -> Snapshot:
    """Return what else is connected over a fabric: other subsystems, and other namespaces of ours.

    Discovery controllers that stay connected are among them.

    Parameters
    ----------
    ours : Snapshot
        See `part_of_volume`.
    """
    mine = {subsystem.name: subsystem for subsystem in ours.subsystems}
    rest = []
    for subsystem in snapshot.subsystems:
        if not any(controller.transport in FABRICS for controller in subsystem.controllers):
            continue
        if (known := mine.get(subsystem.name)) is None:
            rest.append(subsystem)
        elif left := tuple(n for n in subsystem.namespaces if n not in known.namespaces):
            rest.append(replace(subsystem, controllers=(), namespaces=left))
    return Snapshot(tuple(rest))
