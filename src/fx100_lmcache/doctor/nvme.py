"""Controllers and namespaces of this volume, of all that the host has; lost paths."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fx100_lmcache.config.nvme import NvmeConfig
from fx100_lmcache.doctor.findings import note, ok, warning
from fx100_lmcache.nvmf.check import Finding
from fx100_lmcache.nvmf.preflight import Obstacle
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


def check_reconnect(nvme: NvmeConfig, obstacles: Sequence[Obstacle]) -> Finding:
    """Say whether lost paths come back by themselves.

    Parameters
    ----------
    obstacles : sequence of Obstacle
        Why this process could not connect one.
    """
    subject, why = "nvme: reconnect", "a path that the kernel gives up stays lost until"
    if not nvme.reconnect:
        return note(
            subject,
            "nvme.reconnect is off",
            f"{why} somebody connects it",
            "after a loss: fx100 nvme connect CONFIG; or set nvme.reconnect: true",
        )
    if obstacles:
        return warning(
            subject,
            "; ".join(each.what for each in obstacles),
            f"{why} somebody connects it: nvme.reconnect is on, but this process could not",
            "; ".join(each.do for each in obstacles),
        )
    return ok(subject, "this process can connect lost paths again")
