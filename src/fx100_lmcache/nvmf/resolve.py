"""Identity -> device node. The answer holds until the next reconnect: ask again at every open."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import aiofiles.os

from fx100_lmcache.config.nvme import NvmeNamespace
from fx100_lmcache.nvmf.errors import (
    AmbiguousNamespaceError,
    NamespaceNotFoundError,
    NvmeError,
    StaleNodeError,
)
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.snapshot import Namespace, Snapshot
from fx100_lmcache.nvmf.sysfs import Sysfs

POLL_S = 0.2
"""The kernel scans namespaces in the background after a connect; it takes 10 to 500 ms."""
MAX_SEEN = 16
"""Lines in an error's list of what is there."""


def identity_of(names: NvmeNamespace) -> NamespaceIdentity:
    """Return the identity that a configuration gives a member."""
    return NamespaceIdentity(**names.model_dump())


def find(snapshot: Snapshot, wanted: NamespaceIdentity) -> Namespace:
    """Return the one namespace of the snapshot that `wanted` names.

    Raises
    ------
    NamespaceNotFoundError
        If none fits; its text lists what is there, the likeliest first, with the difference.
    AmbiguousNamespaceError
        If several fit.
    """
    differences = {each: wanted.disagreement(each.identity) for each in snapshot.namespaces()}
    fitting = [namespace for namespace, difference in differences.items() if difference is None]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise AmbiguousNamespaceError(str(wanted), [str(namespace) for namespace in fitting])
    near = sorted(differences, key=lambda each: wanted.likeness(each.identity), reverse=True)
    seen = [f"{namespace}: {differences[namespace]}" for namespace in near[:MAX_SEEN]]
    if len(near) > MAX_SEEN:
        seen.append(f"and {len(near) - MAX_SEEN} more")
    raise NamespaceNotFoundError(str(wanted), seen)


async def resolve_all(
    wanted: Sequence[NamespaceIdentity], sysfs: Sysfs, dev_root: Path = Path("/dev")
) -> list[Namespace | NvmeError]:
    """Find several namespaces in one look; each as `resolve` does, with its error as a value."""
    snapshot = await sysfs.snapshot()
    found: list[Namespace | NvmeError] = []
    for each in wanted:
        try:
            namespace = find(snapshot, each)
            await _check_node(namespace, dev_root)
            found.append(namespace)
        except NvmeError as error:
            found.append(error)
    return found


async def resolve(
    wanted: NamespaceIdentity, sysfs: Sysfs, dev_root: Path = Path("/dev"), timeout_s: float = 0.0
) -> Namespace:
    """Find the namespace and make sure that its node in `dev_root` is that device.

    Parameters
    ----------
    wanted : NamespaceIdentity
        What to look for.
    sysfs : Sysfs
        Where to look.
    dev_root : Path
        Directory of the device nodes; the returned `device` lies in it.
    timeout_s : float
        How long to wait for a namespace that is not there yet, e.g. right after a connect.

    Raises
    ------
    NamespaceNotFoundError, AmbiguousNamespaceError
        As `find`.
    StaleNodeError
        If the node is missing or is another device, as happens in containers with an old /dev.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        [found] = await resolve_all([wanted], sysfs, dev_root)
        if isinstance(found, Namespace):
            return found
        may_come = isinstance(found, NamespaceNotFoundError | StaleNodeError)
        if not may_come or time.monotonic() >= deadline:
            raise found
        await asyncio.sleep(POLL_S)


async def _check_node(namespace: Namespace, dev_root: Path) -> None:
    node = dev_root / Path(namespace.device).name
    remedy = "in a container, mount the host's /dev; else: udevadm trigger --subsystem-match=block"
    try:
        status = await aiofiles.os.stat(node)
    except OSError as error:
        raise StaleNodeError(
            f"{node} is missing ({error.strerror}) although the kernel has {namespace}",
            remedy=remedy,
        ) from error
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if number != namespace.device_number:
        raise StaleNodeError(
            f"{node} is device {number}, but {namespace} is {namespace.device_number}",
            remedy=remedy,
        )
