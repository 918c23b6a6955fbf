"""Find and open the members that a configuration names, and keep users and formats apart.

Everybody who opens a member holds a shared lock on its label; a format locks all of it. Owners of
shards hold the locks on their claims besides (see :mod:`fx100_lmcache.volume.claim`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from fx100_lmcache.config import Config
from fx100_lmcache.config.model import MemberConfig
from fx100_lmcache.config.nvme import NvmeConfig
from fx100_lmcache.errors import (
    ClaimError,
    DuplicateMemberError,
    FX100Error,
    MemberOpenError,
    VolumeError,
)
from fx100_lmcache.findings import Finding
from fx100_lmcache.members.device import DeviceMember, open_member
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.preflight import obstacles
from fx100_lmcache.nvmf.reconnect import (
    LONGEST_PAUSE_S,
    LOOK_S,
    PathWatch,
    Reconnector,
    connect_as_configured,
    missing_paths,
)
from fx100_lmcache.nvmf.resolve import identity_of, resolve_all
from fx100_lmcache.nvmf.snapshot import Namespace, Snapshot
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.ondisk.geometry import LABEL_BYTES
from fx100_lmcache.volume.claim import newest_claim, read_claims
from fx100_lmcache.volume.volume import Volume, assemble, read_label

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 10.0
"""Wait for the first block of a device; a lost path is noticed after keep-alive and time-outs."""


def locate(members: Sequence[MemberConfig]) -> list[Path | NvmeError]:
    """Find the device nodes or files of configured members, or say why one cannot be found."""
    wanted = [identity_of(member.nvme) for member in members if member.nvme is not None]
    found = iter(_resolved(wanted) if wanted else ())
    return [member.path if member.path is not None else next(found) for member in members]


def _resolved(wanted: Sequence[NamespaceIdentity]) -> list[Path | NvmeError]:
    found = _off_loop(resolve_all(wanted, Sysfs()))
    return [Path(each.device) if isinstance(each, Namespace) else each for each in found]


def watch_paths(
    nvme: NvmeConfig | None, count: Callable[[str], None], stopped: Callable[[], bool]
) -> PathWatch | None:
    """Begin to connect lost paths of the configured subsystems again, where that is wanted.

    Parameters
    ----------
    count : callable
        Told what to count, see `Reconnector`.
    stopped : callable
        Whether nothing is to be connected any more.
    """
    if nvme is None or not nvme.reconnect:
        return None
    for obstacle in reconnect_obstacles(nvme):
        log.warning(obstacle.line)
    watch = PathWatch(reconnector(nvme, count, stopped).attempt, LOOK_S)
    watch.start()
    return watch


def reconnector(
    nvme: NvmeConfig,
    count: Callable[[str], None],
    stopped: Callable[[], bool],
    *,
    longest_pause_s: float = LONGEST_PAUSE_S,
    at_start: bool = False,
) -> Reconnector:
    """Return what connects missing paths of the configured subsystems; see `Reconnector`."""
    return Reconnector(
        nvme,
        look=lambda: paths_without_controller(nvme),
        connect=lambda wanted: _off_loop(connect_as_configured(nvme, wanted)),
        count=count,
        stopped=stopped,
        longest_pause_s=longest_pause_s,
        at_start=at_start,
    )


def paths_without_controller(nvme: NvmeConfig) -> dict[str, list[FabricAddress]]:
    """Return the configured paths that nobody has connected, by the NQN of their subsystem."""
    return _off_loop(missing_paths(nvme, Sysfs()))


def reconnect_obstacles(nvme: NvmeConfig) -> list[Finding]:
    """Return why this process could not connect; empty if it could."""
    return _off_loop(obstacles(nvme))


def nvme_snapshot() -> Snapshot:
    """Return what the kernel knows of NVMe now."""
    return _off_loop(Sysfs().snapshot())


def _off_loop(coroutine: Coroutine[object, object, T]) -> T:
    # on a thread of its own: the caller may be inside an event loop; and not one of a pool, for
    # which a process that ends would wait
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(coroutine))
        except BaseException as problem:  # noqa: BLE001 - handed to the caller
            future.set_exception(problem)

    try:
        threading.Thread(target=run, name="fx100-sysfs", daemon=True).start()
    except BaseException:
        coroutine.close()
        raise
    return future.result()


def member_paths(config: Config) -> list[Path]:
    """Find all members' device nodes or files.

    Raises
    ------
    NvmeError
        If an NVMe namespace is not connected, or its identity is ambiguous.
    DuplicateMemberError
        If two paths lead to one device or file.
    """
    paths: list[Path] = []
    seen: dict[tuple[int, ...], Path] = {}
    for path in locate(config.volume.members):
        if isinstance(path, NvmeError):
            raise path
        paths.append(path)
        name = device_name(path)
        if name is None:
            continue  # whoever opens it says why
        if name in seen:
            raise DuplicateMemberError(
                f"{path} and {seen[name]} are the same {'device' if len(name) == 1 else 'file'}; "
                "nothing was written",
                remedy="list each member once in `volume.members`",
            )
        seen[name] = path
    return paths


def device_name(path: Path) -> tuple[int, ...] | None:
    """Return what a device or file is, whatever its path; None if it is not there."""
    try:
        return name_of(path.stat())
    except OSError:
        return None


def name_of(found: os.stat_result) -> tuple[int, ...]:
    """Return the name of a device or file: one number for a device, two for a file."""
    is_device = stat.S_ISBLK(found.st_mode)
    return (found.st_rdev,) if is_device else (found.st_dev, found.st_ino)


def silent_devices(paths: Sequence[Path], within_s: float | None = None) -> list[Path]:
    """Return the block devices that do not give their first block in time, nor an error.

    The reads are made by child processes: whoever reads from a device whose path is lost can
    neither be interrupted nor killed before the kernel gives up. None is left running, also when
    the wait is interrupted.

    Parameters
    ----------
    within_s : float or None
        How long to wait; by default `ANSWER_S`.
    """
    until = time.monotonic() + (ANSWER_S if within_s is None else within_s)
    silent = []
    with contextlib.ExitStack() as undo:
        reads = []
        for path in filter(_is_block_device, paths):
            reads.append((path, _start_read(path)))
            undo.callback(_give_up, reads[-1][1])
        for path, read in reads:
            try:
                read.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                silent.append(path)
    return silent


def _is_block_device(path: Path) -> bool:
    try:
        return path.is_block_device()
    except OSError:  # whoever opens it says why
        return False


def _give_up(read: subprocess.Popen[bytes]) -> None:
    if read.poll() is None:
        read.kill()
        threading.Thread(target=read.wait, name="fx100-reap", daemon=True).start()


def _start_read(path: Path) -> subprocess.Popen[bytes]:
    command = ["dd", f"if={path}", "of=/dev/null", "bs=4096", "count=1", "iflag=direct"]
    quiet = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError as problem:
        raise MemberOpenError(
            f"{path}: whether it answers cannot be tried, as dd does not start "
            f"({problem.strerror})",
            remedy="install dd (coreutils), or free memory and processes",
        ) from problem


def silent_error(path: Path) -> MemberOpenError:
    """Describe a device that does not answer."""
    return MemberOpenError(
        f"{path}: a read did not come back within {ANSWER_S:g} s; its path is lost or stalled",
        remedy="fx100 nvme check CONFIG; look at the array's ports",
    )


def open_members(
    config: Config, *, exclusive: bool = False, read_only: bool = False
) -> list[DeviceMember]:
    """Open all configured members, in the order given; none stays open if one fails."""
    with contextlib.ExitStack() as undo:
        members = []
        paths = member_paths(config)
        for path in silent_devices(paths):
            raise silent_error(path)
        for path in paths:
            opened = _open(config, path, exclusive=exclusive, read_only=read_only)
            undo.callback(opened.close)
            hold_label(opened)
            members.append(opened)
        undo.pop_all()
    return members


def open_volume(config: Config, *, exclusive: bool = False, read_only: bool = False) -> Volume:
    """Open the members and assemble the volume by their labels."""
    members = open_members(config, exclusive=exclusive, read_only=read_only)
    try:
        return assemble(members)
    except BaseException as problem:
        for member in members:
            member.close()
        if isinstance(problem, OSError):
            raise VolumeError(f"the volume cannot be read: {problem}") from problem
        raise


def hold_label(member: DeviceMember) -> None:
    """Keep `fx100 format` away from a member for as long as it is open.

    Raises
    ------
    ClaimError
        If it is being formatted right now.
    """
    if not _lock(member, LABEL_BYTES, shared=True):
        raise ClaimError(f"{member.name} is being formatted", remedy="wait until that has finished")


def _lock(member: DeviceMember, length: int, *, shared: bool) -> bool:
    try:
        return member.try_lock(0, length, shared=shared)
    except OSError as problem:
        raise MemberOpenError(
            f"{member.name}: the file system has no locks ({problem.strerror})",
            remedy="use a local file system",
        ) from problem


def refuse_dev(path: Path) -> None:
    """Raise for a device that is not there: it must not become a file in memory."""
    if path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm"):  # noqa: S108
        raise MemberOpenError(
            f"{path} is not there, and no file is created in /dev",
            remedy="connect the device (`nvme list` shows what is there) or correct "
            "`volume.members`",
        )


def open_to_format(config: Config, path: Path) -> DeviceMember:
    """Open a member for ourselves alone, with the kernel locks that its users take.

    Raises
    ------
    ClaimError
        If somebody uses it; with the holder's own words, as far as they can be read.
    """
    if not path.exists():
        raise MemberOpenError(
            f"{path} does not exist",
            remedy="correct `volume.members`, or give the member a `size` to have a file created",
        )
    member = _open(config, path, exclusive=True, read_only=False)
    try:
        if not _lock(member, 0, shared=False):
            raise _in_use(member)
    except BaseException:
        member.close()
        raise
    return member


def _open(config: Config, path: Path, *, exclusive: bool, read_only: bool) -> DeviceMember:
    """Open a member; if another process of ours has it, say which."""
    direct = config.io.direct
    try:
        return open_member(path, direct=direct, exclusive=exclusive, read_only=read_only)
    except MemberOpenError as problem:
        cause = problem.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EBUSY:
            with contextlib.closing(open_member(path, direct=direct, read_only=True)) as member:
                if _holders(member):
                    raise _in_use(member) from problem
        raise


def _in_use(member: DeviceMember) -> ClaimError:
    who = _holders(member) or "by another process"
    return ClaimError(
        f"{member.name} is in use ({who}); nothing was written", remedy="stop that process first"
    )


def _holders(member: DeviceMember) -> str:
    """Say who claims the shards of a member; empty if nobody does."""
    holders = []
    with contextlib.suppress(FX100Error, OSError):
        label, _ = read_label(member)
        for shard in range(label.geometry.shards):
            blocks = read_claims([member], label.geometry, shard)
            claim = newest_claim(blocks, label.volume.bytes, shard)
            if claim is not None and claim.holder:
                holders.append(claim.holder)
    return "; ".join(dict.fromkeys(holders))
