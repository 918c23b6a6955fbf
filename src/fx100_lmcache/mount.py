"""From a configuration to an open store."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fx100_lmcache.config import Config
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.engine.native_lane import native_available
from fx100_lmcache.errors import FX100Error, VolumeError
from fx100_lmcache.members.base import Member
from fx100_lmcache.members.device import open_member
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.nvmf.reconnect import PathWatch
from fx100_lmcache.store import Store, StoreOptions
from fx100_lmcache.volume.claim import ClaimTiming
from fx100_lmcache.volume.opening import (
    device_name,
    hold_label,
    locate,
    name_of,
    open_volume,
    watch_paths,
)
from fx100_lmcache.volume.volume import Volume, read_label

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

    @property
    def remote(self) -> bool:
        """Whether bytes lie off this host: on a namespace that is named by its NVMe identity."""
        return any(member.nvme is not None for member in self.config.volume.members)

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
