"""From a configuration to an open store, and to a newly formatted volume."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fx100_lmcache.config import Config
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.engine.native_lane import native_available
from fx100_lmcache.errors import FX100Error, MemberOpenError, SectorSizeError, VolumeError
from fx100_lmcache.members.allocation import Allocation, allocation_of
from fx100_lmcache.members.base import Member
from fx100_lmcache.members.device import DeviceMember, create_file, open_member, write_through
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.nvmf.reconnect import PathWatch
from fx100_lmcache.ondisk.geometry import Geometry, plan_geometry
from fx100_lmcache.store import Store, StoreOptions
from fx100_lmcache.volume.claim import ClaimTiming
from fx100_lmcache.volume.opening import (
    device_name,
    hold_label,
    locate,
    member_paths,
    name_of,
    open_members,
    open_to_format,
    refuse_dev,
    silent_devices,
    silent_error,
    watch_paths,
)
from fx100_lmcache.volume.volume import (
    Contents,
    Volume,
    assemble,
    check_formattable,
    contents_of,
    format_volume,
    read_label,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Mounted:
    """An open store with everything under it.

    Attributes
    ----------
    paths : PathWatch or None
        What connects lost paths again, where that is wanted.
    """

    config: Config
    volume: Volume
    engine: LaneEngine
    store: Store
    paths: PathWatch | None = None

    def close(self) -> int:
        """Close within the configured deadline; return transfers left in the kernel.

        In a forked child it returns at once, and leaves the parent's store alone.
        """
        if self.store.forked:
            return 0
        left = self.store.close(self.config.deadlines.close_s)
        if self.paths is not None:
            self.paths.stop()
        if not left:  # a descriptor that the kernel still uses must not be reused
            for index in range(len(self.volume.members)):
                self.engine.member(index).close()
        return left


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """What `format` is about to do.

    Attributes
    ----------
    create : tuple of (path, bytes)
        Files that do not exist yet.
    members : tuple of (name, bytes, logical block size)
        In stripe order, including those to be created.
    contents : tuple of Contents
        What each member holds now.
    allocations : tuple of Allocation
        What the storage below really has of each; a file to be created will be all there.
    """

    create: tuple[tuple[Path, int], ...]
    members: tuple[tuple[str, int, int], ...]
    geometry: Geometry
    contents: tuple[Contents, ...]
    allocations: tuple[Allocation, ...]


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


def mount(
    config: Config, *, shards: Sequence[int] | None = None, take_over: bool = False
) -> Mounted:
    """Open the store that a configuration describes.

    Parameters
    ----------
    shards : sequence of int or None
        Shards to own; None opens all of them, and block devices exclusively.

    Raises
    ------
    FX100Error
        A subclass that says which device is wrong, and what to do.
    """
    if config.io.engine == "native" and not native_available():
        raise FX100Error(
            "io.engine is native, but the native engine cannot be used here; `fx100 doctor` says "
            "why. With io.engine: auto Python threads do its work"
        )
    volume = open_volume(config, exclusive=shards is None)
    with contextlib.ExitStack() as undo:
        stuck: list[int] = []
        undo.callback(_close_members, volume, stuck)
        probe = _Probe(config, volume, exclusive=shards is None)
        engine = LaneEngine(volume.members, engine_options(config), probe)
        undo.callback(lambda: stuck.append(engine.close(0.0)))
        try:
            store = Store(
                volume, engine, shards=shards, options=store_options(config), take_over=take_over
            )
        except OSError as problem:
            raise VolumeError(f"the volume cannot be read: {problem}") from problem
        undo.callback(store.close)
        probe.store = store
        for member in volume.members:
            if member.io_mode != "direct" and config.io.direct != "off":
                log.warning("%s: direct I/O does not work here, using the page cache", member.name)
        probe.paths = watch_paths(config.nvme, store.count, lambda: store.closing)
        mounted = Mounted(config, volume, engine, store, probe.paths)
        undo.pop_all()
    return mounted


def _close_members(volume: Volume, stuck: Sequence[int]) -> None:
    if not any(stuck):  # a descriptor that the kernel still uses must not be reused
        for member in volume.members:
            member.close()


def engine_options(config: Config) -> EngineOptions:
    """Engine settings of a configuration."""
    return EngineOptions(
        reader_threads=config.io.reader_threads,
        writer_threads=config.io.writer_threads,
        read_in_flight_bytes=config.io.read_in_flight_bytes,
        max_io_bytes=config.io.max_io_bytes,
        native=config.io.engine != "python",
        probe_interval_s=config.deadlines.probe_interval_s,
    )


def claim_timing(config: Config) -> ClaimTiming:
    """Return the timing of claims of a configuration."""
    return ClaimTiming(heartbeat_s=config.claim.heartbeat_s, watch_s=config.claim.watch_s)


def store_options(config: Config) -> StoreOptions:
    """Store settings of a configuration."""
    width = config.stripe.width
    return StoreOptions(
        load_s=config.deadlines.load_s,
        store_s=config.deadlines.store_s,
        pin_ttl_s=config.deadlines.pin_ttl_s,
        claim_check_s=config.deadlines.claim_check_s,
        claim_timing=claim_timing(config),
        max_write_bytes=config.io.max_write_bytes,
        reserve_fraction=config.space.reserve_fraction,
        evict_batch_fraction=config.space.evict_batch_fraction,
        width=0 if width == "all" else width,
    )


class _Probe:
    """Finds a member that is not up, under whatever name it has now. Blocks while it hangs."""

    def __init__(self, config: Config, volume: Volume, *, exclusive: bool) -> None:
        self._config = config
        self._label = volume.label
        self._exclusive = exclusive
        self._in_use: list[Member] = list(volume.members)
        self._said: dict[int, str] = {}
        self.store: Store | None = None
        self.paths: PathWatch | None = None

    def __call__(self, index: int, member: Member) -> Member | None:
        """Return the member if its label can be read, else one opened anew, else None."""
        if self._in_use[index].fileno() is None:  # what was found last did not come into use
            self._in_use[index] = member
        if self._is_ours(index, member):
            return member
        if self.paths is not None:
            self.paths.look_now()
        open_fds = (each.fileno() for each in self._in_use)
        in_use = {name_of(os.fstat(fd)) for fd in open_fds if fd is not None}
        for path in locate(self._config.volume.members):
            # what is in use is another member, which may hang, or this one, which does not work
            if isinstance(path, NvmeError) or device_name(path) in in_use:
                continue
            try:
                opened = self._reopened(index, path)
            except (FX100Error, OSError) as problem:
                if self._said.get(index) != str(problem):  # not again with every look
                    self._said[index] = str(problem)
                    log.warning("member %d is not back yet: %s", index, problem)
                continue
            if opened is not None:
                self._in_use[index] = opened
                return opened
        return None

    def _reopened(self, index: int, path: Path) -> Member | None:
        with contextlib.ExitStack() as undo:
            opened = open_member(path, direct=self._config.io.direct)
            undo.callback(opened.close)
            if not self._is_ours(index, opened):
                return None
            if self._exclusive:  # only now, since O_EXCL would refuse members that are in use
                opened.close()
                opened = open_member(path, direct=self._config.io.direct, exclusive=True)
                undo.callback(opened.close)
            hold_label(opened)
            if self.store is not None and not self.store.adopt_member(opened):
                return None
            undo.pop_all()
            return opened

    def _is_ours(self, index: int, member: Member) -> bool:
        try:
            label, _ = read_label(member)
        except (FX100Error, OSError):
            return False
        return label.volume == self._label.volume and label.index == index


def plan_format(config: Config, *, allocate: bool = False) -> FormatPlan:
    """Work out a new volume without writing anything.

    Parameters
    ----------
    allocate : bool
        All of every member is to be written, so there must be room for it.

    Raises
    ------
    VolumeError
        If a member is too small, or cannot be opened.
    MemberOpenError
        If a file system has no room for what is to be written.
    ClaimError
        If a member is in use.
    """
    create, described, contents, allocations = [], [], [], []
    room: list[tuple[Path, int]] = []
    paths = member_paths(config)
    for path in silent_devices(paths):
        raise silent_error(path)
    with contextlib.ExitStack() as opened:
        for path, member in zip(paths, config.volume.members, strict=True):
            if not path.exists() and member.size_bytes is not None:
                refuse_dev(path)
                create.append((path, member.size_bytes))
                described.append((str(path), member.size_bytes, 512))
                contents.append(Contents("nothing"))
                allocations.append(Allocation(member.size_bytes, thin=False))
                room.append((path, member.size_bytes))
                continue
            device = open_to_format(config, path)
            opened.callback(device.close)
            described.append(_describe(device))
            contents.append(contents_of(device))
            allocations.append(allocation_of(device))
            there = allocations[-1].allocated_bytes
            if allocate and path.is_file() and there is not None:
                room.append((path, device.size_bytes - there))
    _check_room(room)
    return FormatPlan(
        tuple(create),
        tuple(described),
        _geometry(config, described),
        tuple(contents),
        tuple(allocations),
    )


def _describe(member: DeviceMember) -> tuple[str, int, int]:
    return member.name, member.size_bytes, member.logical_block_bytes


def _geometry(config: Config, described: Sequence[tuple[str, int, int]]) -> Geometry:
    align = max(block for _, _, block in described)
    if align > 4096:
        raise SectorSizeError(
            f"logical blocks of {align} bytes; at most 4096 are supported",
            remedy="format the namespaces with an LBA format of 4096 bytes or less",
        )
    return plan_geometry(
        [size for _, size, _ in described],
        object_bytes=config.volume.object_bytes,
        shards=config.volume.shards,
        inode_bytes=config.volume.inode_bytes,
        bytes_per_inode=config.volume.bytes_per_inode,
        io_align_bytes=align,
        names=[name for name, _, _ in described],
    )


def _check_room(room: Sequence[tuple[Path, int]]) -> None:
    """Raise if the file systems of some files lack the bytes that each still needs."""
    wanted: dict[int, tuple[Path, int]] = {}
    for path, size in room:
        home = path.parent
        while not home.exists():
            home = home.parent
        device = home.stat().st_dev
        wanted[device] = (home, wanted.get(device, (home, 0))[1] + size)
    for home, size in wanted.values():
        stat = os.statvfs(home)
        free = stat.f_bavail * stat.f_frsize
        if size > free:
            raise MemberOpenError(
                f"{home} has {free} bytes free, the members need {size}; nothing was "
                "created or written",
                remedy="free some space or make `volume.members[].size` smaller",
            )


def format_members(
    config: Config,
    plan: FormatPlan,
    *,
    force: bool = False,
    allocate: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Volume:
    """Create missing files and write the volume; the caller closes the members.

    Parameters
    ----------
    allocate : bool
        Write zeros over all of what is there already, before anything else.
    progress : callable or None
        Called with the number of zeros just written.

    Raises
    ------
    ForeignDataError
        If a member holds something else; nothing was written then.
    ClaimError
        If the volume that is there is in use.
    """
    paths = member_paths(config)
    new = dict(plan.create)
    with contextlib.ExitStack() as undo:
        opened = {}
        for path in paths:
            if path not in new:
                opened[path] = open_to_format(config, path)
                undo.callback(opened[path].close)
                check_formattable(opened[path], force=force)
        for path, size in plan.create:
            create_file(path, size, progress)
            undo.callback(path.unlink, missing_ok=True)
            opened[path] = open_to_format(config, path)
            undo.callback(opened[path].close)
        for path in paths if allocate else ():
            if path not in new:
                write_through(opened[path], progress)
        members = [opened[path] for path in paths]
        # anew, since a new file may need larger blocks than were planned for
        geometry = _geometry(config, [_describe(member) for member in members])
        format_volume(members, geometry, unix_s=int(time.time()))
        volume = assemble(members)  # read back: two names of one device show now at the latest
        undo.pop_all()
    return volume
