"""Find and open the members that a configuration names, and keep users and formats apart.

Everybody who opens a member holds a shared lock on its label; a format locks all of it. Owners of
shards hold the locks on their claims besides (see :mod:`fx100_lmcache.claim`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fx100_lmcache.claim import newest_claim, read_claims
from fx100_lmcache.config import Config
from fx100_lmcache.config.model import MemberConfig
from fx100_lmcache.errors import ClaimError, DuplicateMemberError, FX100Error, MemberOpenError
from fx100_lmcache.geometry import LABEL_BYTES
from fx100_lmcache.members.device import DeviceMember, open_member
from fx100_lmcache.nvmf.identity import NamespaceIdentity
from fx100_lmcache.nvmf.resolve import resolve
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.volume import read_label

_RESOLVE_S = 10.0  # sysfs answers in milliseconds


def member_path(member: MemberConfig) -> Path:
    """Find the device node or file of a configured member.

    Raises
    ------
    FX100Error
        If an NVMe namespace is not connected, or its identity is ambiguous.
    """
    if member.path is not None:
        return member.path
    assert member.nvme is not None
    names = member.nvme
    wanted = NamespaceIdentity(
        subsystem_nqn=names.subsystem_nqn,
        nsid=names.nsid,
        nguid=names.nguid,
        eui64=names.eui64,
        uuid=names.uuid,
    )
    # on a thread of its own: the caller may be inside an event loop
    with ThreadPoolExecutor(1, "fx100-resolve") as pool:
        found = pool.submit(asyncio.run, resolve(wanted, Sysfs())).result(_RESOLVE_S)
    return Path(found.device)


def member_paths(config: Config) -> list[Path]:
    """Find all members' device nodes or files.

    Raises
    ------
    FX100Error
        As :func:`member_path`.
    DuplicateMemberError
        If two paths lead to one device or file.
    """
    paths = [member_path(member) for member in config.volume.members]
    seen: dict[tuple[int, ...], Path] = {}
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            continue  # whoever opens it says why
        device = stat.S_ISBLK(found.st_mode)
        name = (found.st_rdev,) if device else (found.st_dev, found.st_ino)
        if name in seen:
            raise DuplicateMemberError(
                f"{path} and {seen[name]} are the same {'device' if device else 'file'}; list "
                "each member once in `volume.members`. Nothing was written"
            )
        seen[name] = path
    return paths


def open_members(
    config: Config, *, exclusive: bool = False, read_only: bool = False
) -> list[DeviceMember]:
    """Open all configured members, in the order given; none stays open if one fails."""
    with contextlib.ExitStack() as undo:
        members = []
        for path in member_paths(config):
            opened = _open(config, path, exclusive=exclusive, read_only=read_only)
            undo.callback(opened.close)
            hold_label(opened)
            members.append(opened)
        undo.pop_all()
    return members


def hold_label(member: DeviceMember) -> None:
    """Keep `fx100 format` away from a member for as long as it is open.

    Raises
    ------
    ClaimError
        If it is being formatted right now.
    """
    if not _lock(member, LABEL_BYTES, shared=True):
        raise ClaimError(f"{member.name} is being formatted; wait until that has finished")


def _lock(member: DeviceMember, length: int, *, shared: bool) -> bool:
    try:
        return member.try_lock(0, length, shared=shared)
    except OSError as problem:
        raise MemberOpenError(
            f"{member.name}: the file system has no locks ({problem.strerror}); use a local one"
        ) from problem


def refuse_dev(path: Path) -> None:
    """Raise for a device that is not there: it must not become a file in memory."""
    if path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm"):  # noqa: S108
        raise MemberOpenError(
            f"{path} is not there, and no file is created in /dev; connect the device (`nvme list` "
            "shows what is there) or correct `volume.members`"
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
            f"{path} does not exist; correct `volume.members`, or give the member a `size` to "
            "have a file created"
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
        f"{member.name} is in use ({who}); nothing was written. Stop that process first"
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
