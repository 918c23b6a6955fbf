"""One member with its lanes: what the engine holds for each place of the stripe."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from typing import Protocol

from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.health import MemberHealth
from fx100_lmcache.engine.jobs import Transfer
from fx100_lmcache.engine.lane import Finish, Lane, PythonLane
from fx100_lmcache.engine.native_lane import NativeLane, NativeReaper, native_available
from fx100_lmcache.members.base import Member

log = logging.getLogger(__name__)

LANES = ("reads", "writes", "bounced", "urgent")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes of an engine.

    Attributes
    ----------
    reader_threads, writer_threads : int
        Per member. Writers are fewer, so that reads overtake writes.
    read_in_flight_bytes : int
        Per member, what the kernel has of reads at a time, in native lanes.
    max_io_bytes : int
        Cap of one call. Some NVMe/TCP targets fail on calls of more than 1 MiB, see
        :meth:`MemberSlot.learn_limit`; where they do not, 2 MiB are up to a tenth faster.
    native : bool
        Move aligned pieces without the GIL where the extension was built.
    probe_interval_s : float
        How often a member that is not up is looked at.
    """

    reader_threads: int = 16
    writer_threads: int = 4
    read_in_flight_bytes: int = 8 * 1024 * 1024
    max_io_bytes: int = 2 * 1024 * 1024
    native: bool = True
    probe_interval_s: float = 1.0


@dataclass(slots=True, eq=False)
class MemberSlot:
    """One member with its lanes; replaced as a whole when the member comes back.

    Attributes
    ----------
    retired_at : float
        When it was replaced, on the engine's clock.
    closed : bool
        Its threads were sent home.
    """

    index: int
    member: Member
    max_io_bytes: int
    refusals: int = 0
    """Times that a large call failed and smaller ones worked, since a large one last worked."""
    health: MemberHealth = field(default_factory=MemberHealth)
    retired_at: float = 0.0
    closed: bool = False
    troubles: BurstLog = field(init=False)
    reads: Lane = field(init=False)
    writes: Lane = field(init=False)
    bounced: Lane = field(init=False)
    urgent: Lane = field(init=False)

    def __post_init__(self) -> None:
        self.troubles = BurstLog(log, self.member.name)

    @property
    def lanes(self) -> list[Lane]:
        """Its lanes, as far as they have been made."""
        return [getattr(self, kind) for kind in LANES if hasattr(self, kind)]

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in the kernel."""
        return all(lane.idle for lane in self.lanes)

    @property
    def only_stuck(self) -> bool:
        """Whether nothing is left but what the kernel keeps past its deadline."""
        return sum(lane.open_transfers for lane in self.lanes) <= self.health.stuck

    def equip(self, lanes: LaneFactory, finish: Finish) -> None:
        """Make its lanes: all of them or, if it raises, none.

        Raises
        ------
        RuntimeError, OSError, MemoryError
            If there are no threads or no memory.
        """
        try:
            for kind in LANES:
                setattr(self, kind, lanes.make(kind, self, finish))
        except BaseException:
            self.close()
            raise

    def succeed(self, other: MemberSlot) -> None:
        """Go on with the counters of another slot and, for the same device, what it has learnt."""
        self.health.errors, self.health.last_error = other.health.errors, other.health.last_error
        if self.member is other.member:
            self.max_io_bytes, self.refusals = other.max_io_bytes, other.refusals

    def learn_limit(self, transfer: Transfer) -> None:
        """Note what a success says about the size of calls that the member takes.

        EINVAL for a large call proves a limit. EIO does so only if it happens again after
        smaller calls worked: all that was in flight when a path was lost fails once, too.
        """
        if not transfer.max_io_bytes:
            if transfer.length > self.max_io_bytes // 2:  # more than would be learnt
                self.refusals = 0
            return
        cause = transfer.error
        if transfer.refusals or (cause is not None and cause.errno == errno.EINVAL):
            self.max_io_bytes = min(self.max_io_bytes, transfer.max_io_bytes)
        self.refusals += 1

    def close(self) -> None:
        """Send the threads of all lanes home."""
        if not self.closed:
            self.closed = True
            for lane in self.lanes:
                lane.close()


class LaneFactory(Protocol):
    """Makes the lanes of a member."""

    kind: str

    def make(self, what: str, slot: MemberSlot, finish: Finish) -> Lane:
        """Make a lane: ``what`` is one of `LANES`; ``bounced`` is for unaligned memory."""
        ...

    def close(self) -> None:
        """Stop what the lanes share."""
        ...


class ThreadedLanes:
    """Lanes with threads: native where the extension was built and the member has a descriptor."""

    def __init__(self, options: EngineOptions, defects: Defects) -> None:
        native = options.native and native_available()
        self._defects = defects
        self._reaper = NativeReaper(defects) if native else None
        self.kind = "python" if self._reaper is None else "native"
        readers, writers = options.reader_threads, options.writer_threads
        self._in_flight_bytes = {
            "reads": options.read_in_flight_bytes,
            "writes": writers * options.max_io_bytes,
        }
        self._threads = {
            "reads": readers,
            "writes": writers,
            "bounced": max(2, readers // 4),
            "urgent": 1,
        }

    def make(self, what: str, slot: MemberSlot, finish: Finish) -> Lane:
        """Make a lane."""
        threads, member = self._threads[what], slot.member

        def limit() -> int:
            return slot.max_io_bytes

        if (
            self._reaper is not None
            and member.fileno() is not None
            and what in self._in_flight_bytes
        ):
            in_flight_bytes = self._in_flight_bytes[what]
            return NativeLane(
                member, threads, in_flight_bytes, limit, finish, self._reaper, self._defects
            )
        return PythonLane(member, threads, limit, finish, f"fx100-m{slot.index}-{what}")

    def close(self) -> None:
        """Stop the thread that native lanes share."""
        if self._reaper is not None:
            self._reaper.close()
