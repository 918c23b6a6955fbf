"""Controllers and namespaces of this volume, of all that the host has."""

from __future__ import annotations

from collections.abc import Collection

from fx100_lmcache.nvmf.snapshot import Snapshot


def relevant(snapshot: Snapshot, devices: Collection[str], nqns: Collection[str]) -> Snapshot:
    """Leave out the subsystems that this volume has nothing on.

    Parameters
    ----------
    devices : collection of str
        Device nodes of the members, without symbolic links.
    nqns : collection of str
        Subsystems that the configuration names.
    """
    return Snapshot(
        tuple(
            subsystem
            for subsystem in snapshot.subsystems
            if subsystem.nqn in nqns
            or any(namespace.device in devices for namespace in subsystem.namespaces)
        )
    )
