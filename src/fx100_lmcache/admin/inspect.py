"""Look at a volume without owning it: labels, claims, inode tables. Read-only."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fx100_lmcache.admin.advice import (
    SUBJECT,
    damaged_label,
    few_inodes,
    lost_path,
    problem_of,
    shape_warnings,
    thin_member,
)
from fx100_lmcache.config import Config, load
from fx100_lmcache.config.model import MemberConfig
from fx100_lmcache.errors import FX100Error, MissingMemberError, RecordError
from fx100_lmcache.findings import Finding, Severity, problem
from fx100_lmcache.members.allocation import allocation_of
from fx100_lmcache.members.device import DeviceMember, open_member
from fx100_lmcache.ondisk.geometry import BLOCK_BYTES, CLAIM_BYTES, LABEL_BYTES, Geometry
from fx100_lmcache.ondisk.label import Label, unpack_label
from fx100_lmcache.space.scarcity import Stock, Stocks
from fx100_lmcache.volume.claim import decided_by_locks, newest_claim, read_claims, same_kernel
from fx100_lmcache.volume.machine import this_machine
from fx100_lmcache.volume.opening import (
    hold_label,
    locate,
    nvme_snapshot,
    silent_devices,
    silent_error,
)
from fx100_lmcache.volume.recovery import Recovered, recover
from fx100_lmcache.volume.volume import Volume, assemble, read_at, read_label

INODES_SCARCE = 0.5
"""Share of the inodes in use from which it matters that they run out first."""
_LOOK_S = 0.5  # from one look of a watch to the next


@dataclass(slots=True)
class MemberReport:
    """One member as it was found.

    Attributes
    ----------
    path : str or None
        Device node or file; None if the namespace was not found.
    identity : dict
        The names that the configuration gives a namespace; empty for a path.
    index : int or None
        Place in the stripe order, by its label.
    label : str
        ``good``, ``damaged copy``, or ``unreadable``.
    io_mode : str or None
        ``direct`` (proven by a read) or ``buffered``; None if it could not be opened.
    formatted_bytes : int or None
        Its size when it was formatted.
    allocated_bytes : int or None
        What the storage below really has of it; None where nobody says.
    paths : list of str
        Of a namespace: controller, transport, address and states of each path.
    """

    path: str | None
    identity: dict[str, Any]
    index: int | None = None
    label: str = "unreadable"
    io_mode: str | None = None
    logical_block_bytes: int | None = None
    size_bytes: int | None = None
    formatted_bytes: int | None = None
    allocated_bytes: int | None = None
    paths: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ShardReport:
    """Who owns a shard.

    Attributes
    ----------
    state : str
        ``in use`` (a live process holds the kernel lock), ``free``, ``left behind`` (the owner
        died; the next to open takes it) or ``claimed by another host``.
    holder : str
        The owner's own words; empty when free.
    same_boot : bool
        Whether the holder runs, or ran, under this kernel, so that its locks tell if it lives.
    renews : bool
        Whether the holder renews its claim while it lives: one of an older version does not.
    still_s : float or None
        How long the claim stood still at the end of a watch; None if it was not watched.
    """

    shard: int
    state: str
    holder: str
    generation: int
    epoch: int
    same_boot: bool = False
    renews: bool = False
    still_s: float | None = None


@dataclass(slots=True)
class Usage:
    """What the inode tables say. Bytes are of whole blocks, but ``live_bytes`` of data.

    Attributes
    ----------
    used_share : float
        The larger of the shares of blocks and of inodes in use.
    limit : str
        Which of the two that is: ``blocks`` or ``inodes``.
    """

    entries: int
    live_bytes: int
    used_bytes: int
    free_bytes: int
    capacity_bytes: int
    inode_slots: int
    torn_inodes: int
    dropped_inodes: dict[str, int]
    used_share: float
    limit: str


@dataclass(slots=True)
class Report:
    """Everything about a volume that can be seen from outside."""

    config: str
    volume: str | None = None
    formatted_unix_s: int | None = None
    members: list[MemberReport] = field(default_factory=list)
    shards: list[ShardReport] = field(default_factory=list)
    usage: Usage | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        """Why the volume would not open or not work."""
        return [each for each in self.findings if each.severity is Severity.PROBLEM]

    @property
    def warnings(self) -> list[Finding]:
        """What works, but not as well or as surely as it could."""
        return [each for each in self.findings if each.severity is Severity.WARNING]

    @property
    def healthy(self) -> bool:
        """Whether the volume would open and work."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        fields = dataclasses.asdict(self)
        del fields["findings"]
        for name in ("problems", "warnings"):
            fields[name] = [dataclasses.asdict(each) for each in getattr(self, name)]
        return {"healthy": self.healthy, **fields}


def inspect(path: Path, watch_s: float = 0.0) -> Report:
    """Look at the volume of a configuration file; never raises for what is wrong with it.

    Parameters
    ----------
    watch_s : float
        Watch for so long whether claims are renewed.
    """
    report = Report(str(path))
    try:
        config = load(path)
    except FX100Error as error:
        report.findings.append(problem_of(error, path))
        return report
    with contextlib.ExitStack() as opened:
        found = []
        paths = locate(config.volume.members)
        silent = silent_devices([path for path in paths if isinstance(path, Path)])
        for wanted, found_at in zip(config.volume.members, paths, strict=True):
            where = silent_error(found_at) if found_at in silent else found_at
            member = _look_at_member(config, wanted, where, report, opened)
            if member is not None:
                found.append(member)
        _look_at_volume(report, config, found, watch_s)
    _look_at_paths(report)
    return report


def _look_at_paths(report: Report) -> None:
    snapshot = nvme_snapshot()
    for about in report.members:
        for controller, path in snapshot.paths(about.path or ""):
            where = f"{controller.name} ({controller.transport} {controller.address})"
            state = " ".join(filter(None, (controller.state, path.ana_state)))
            about.paths.append(f"{where} {state}")
            if controller.state != "live":
                report.findings.append(lost_path(about.path, where, state, Path(report.config)))


def _look_at_member(
    config: Config,
    wanted: MemberConfig,
    path: Path | FX100Error,
    report: Report,
    opened: contextlib.ExitStack,
) -> DeviceMember | None:
    """Open one member and read its label; None if either fails."""
    identity = wanted.nvme.model_dump(mode="json", exclude_none=True) if wanted.nvme else {}
    about = MemberReport(None, identity)
    report.members.append(about)
    try:
        if isinstance(path, FX100Error):
            raise path
        about.path = str(path)
        member = open_member(path, direct=config.io.direct, read_only=True)
        opened.callback(member.close)
    except FX100Error as error:
        report.findings.append(problem_of(error, Path(report.config), about.path))
        return None
    about.io_mode, about.size_bytes = member.io_mode, member.size_bytes
    about.logical_block_bytes = member.logical_block_bytes
    allocation = allocation_of(member)
    about.allocated_bytes = allocation.allocated_bytes
    if not os.access(path, os.W_OK):
        report.findings.append(_not_writable(member))
    try:
        hold_label(member)
        label, damaged = read_label(member)
    except (FX100Error, OSError) as error:
        report.findings.append(problem_of(error, Path(report.config), about.path))
        return None
    _note_label(report, about, member, label, damaged)
    wanted_bytes = label.geometry.members[label.index].size_bytes
    there = allocation.allocated_bytes
    if allocation.thin and (there is None or there < wanted_bytes):
        report.findings.append(thin_member(member, there, wanted_bytes, Path(report.config)))
    report.findings += shape_warnings(member, wanted_bytes, config.io.direct, Path(report.config))
    return member


def _note_label(
    report: Report, about: MemberReport, member: DeviceMember, label: Label, damaged: bool
) -> None:
    about.index = label.index
    about.label = "damaged copy" if damaged else "good"
    about.formatted_bytes = label.geometry.members[label.index].size_bytes
    if damaged:
        try:
            unpack_label(read_at(member, 0, LABEL_BYTES))
            front_is_good = True
        except RecordError:
            front_is_good = False
        report.findings.append(damaged_label(member, about.formatted_bytes, front_is_good))


def _not_writable(member: DeviceMember) -> Finding:
    return problem(
        SUBJECT,
        f"{member.name} cannot be written by this user (uid {os.geteuid()})",
        "a server of this user could not open the volume",
        f"ls -lL {member.name}; run as its owner, or join its group",
        member.name,
    )


def _look_at_volume(
    report: Report, config: Config, members: list[DeviceMember], watch_s: float
) -> None:
    if not members:
        return
    whole: Volume | None = None
    try:
        whole = assemble(members)
    except MissingMemberError as error:
        if len(members) == len(config.volume.members):  # else the reason is reported already
            report.findings.append(problem_of(error, Path(report.config)))
    except (FX100Error, OSError) as error:
        report.findings.append(problem_of(error, Path(report.config)))
        return
    try:
        label, _ = read_label(members[0])
        report.volume = str(label.volume)
        report.formatted_unix_s = label.created_unix_s
        geometry, volume = label.geometry, label.volume.bytes
        report.shards = [
            _look_at_shard(members, geometry, volume, s) for s in range(geometry.shards)
        ]
        if watch_s > 0:
            _watch(members, geometry, report.shards, watch_s)
        if whole is not None:
            found = recover(
                whole.members,
                geometry,
                volume,
                generations_of(report.shards),
                claim_epoch=max(shard.epoch for shard in report.shards) or None,
            )
            report.usage = _usage(found, geometry)
            report.findings += inode_warnings(report.usage, config)
    except (FX100Error, OSError) as error:
        report.findings.append(problem_of(error, Path(report.config)))


def _look_at_shard(
    members: list[DeviceMember], geometry: Geometry, volume: bytes, shard: int
) -> ShardReport:
    claim = newest_claim(read_claims(members, geometry, shard), volume, shard)
    start = geometry.claim_offset(shard, 0)
    holder = claim.holder if claim else ""
    if any(member.is_locked(start, 2 * CLAIM_BYTES) for member in members):
        state = "in use"
    elif not holder:
        state = "free"
    elif claim and decided_by_locks(claim, this_machine(), members):
        state = "left behind"
    else:
        state = "claimed by another host"
    generation, epoch = (claim.generation, claim.epoch) if claim else (1, 0)
    same_boot = same_kernel(holder, this_machine())
    renews = claim is not None and bool(holder) and claim.renewed
    return ShardReport(shard, state, holder, generation, epoch, same_boot, renews)


def _watch(
    members: list[DeviceMember], geometry: Geometry, shards: list[ShardReport], watch_s: float
) -> None:
    """Note how long the claims stood still at the end of a watch of at most so long."""
    began = time.monotonic()
    seen = {s.shard: read_claims(members, geometry, s.shard) for s in shards if s.holder}
    changed: dict[int, float] = {}
    while seen and len(changed) < len(seen) and time.monotonic() - began < watch_s:
        time.sleep(min(_LOOK_S, watch_s))
        for shard, before in seen.items():
            if shard not in changed and read_claims(members, geometry, shard) != before:
                changed[shard] = time.monotonic()
    for each in shards:
        if each.shard in seen:
            each.still_s = round(time.monotonic() - changed.get(each.shard, began), 1)


def generations_of(shards: list[ShardReport]) -> dict[int, int]:
    """Return the generation in force of each shard, as recovery wants it."""
    return {shard.shard: shard.generation for shard in shards}


def _usage(found: Recovered, geometry: Geometry) -> Usage:
    capacity = geometry.total_blocks(range(geometry.shards)) * geometry.block_bytes
    used = int(found.blocks.sum()) * geometry.block_bytes
    blocks = Stock(capacity, capacity - used)
    stocks = Stocks(blocks, Stock(geometry.rows, geometry.rows - len(found)))
    return Usage(
        entries=len(found),
        live_bytes=int(found.length.sum()),
        used_bytes=used,
        free_bytes=capacity - used,
        capacity_bytes=capacity,
        inode_slots=geometry.rows,
        torn_inodes=found.torn,
        dropped_inodes=found.dropped_by_reason,
        used_share=round(stocks.used_share(0.0), 4),
        limit=stocks.limit,
    )


def inode_warnings(usage: Usage, config: Config) -> list[Finding]:
    """Say that inodes run out before the space does, once more than half of them are used."""
    if usage.limit != "inodes" or usage.used_share < INODES_SCARCE:
        return []
    free_share = usage.free_bytes / usage.capacity_bytes
    return [
        few_inodes(
            usage.entries,
            usage.inode_slots,
            free_share,
            usage.live_bytes // usage.entries,
            config.volume.object_bytes,
            max(1, usage.used_bytes // usage.entries // BLOCK_BYTES) * BLOCK_BYTES,
        )
    ]
