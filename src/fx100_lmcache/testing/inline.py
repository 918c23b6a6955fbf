"""Lanes without threads: transfers are made at once, in the order submitted.

With these the product's own engine (:class:`~fx100_lmcache.engine.engine.LaneEngine`) is
deterministic: deadlines pass when :meth:`InlineLanes.expire` is called, and a stalled transfer
stays in the kernel until :meth:`InlineLanes.release`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.engine.lane import Finish
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.engine.mover import Mover, outcome_of
from fx100_lmcache.engine.stripe import Probe
from fx100_lmcache.members.base import Member
from fx100_lmcache.testing.clock import SimulatedClock


class Stalled(Exception):  # noqa: N818 - a state, not an error
    """Raised by a test member: the kernel keeps this transfer for now."""


class InlineLane:
    """Moves one member's transfers at once."""

    def __init__(self, member: Member, max_io_bytes: int, finish: Finish) -> None:
        self._mover = Mover(member, lambda: max_io_bytes)
        self._finish = finish
        self._closed = False
        self.stalled: list[Transfer] = []

    def submit(self, transfers: Iterable[Transfer]) -> None:
        """Make transfers, in order; none after close."""
        for transfer in transfers:
            with transfer.job.lock:
                transfer.started = transfer.status is Status.PENDING and not self._closed
                mine = transfer.started
            if mine:
                self._make(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        """Refuse what has been started."""
        return not transfer.started

    @property
    def open_transfers(self) -> int:
        """How many transfers the simulated kernel keeps."""
        return len(self.stalled)

    @property
    def idle(self) -> bool:
        """Whether the simulated kernel keeps nothing."""
        return not self.stalled

    def close(self) -> None:
        """Make no more transfers."""
        self._closed = True

    def release(self) -> None:
        """Let the kernel finish what it kept."""
        kept, self.stalled = self.stalled, []
        for transfer in kept:
            self._make(transfer)

    def _make(self, transfer: Transfer) -> None:
        try:
            checksum = self._mover.move(transfer)
            outcome = outcome_of(transfer, checksum)
        except Stalled:
            self.stalled.append(transfer)
        except Exception as problem:  # noqa: BLE001 - told to the engine, as by the lanes of threads
            self._finish(transfer, Status.ERROR, 0, problem)
        else:
            self._finish(transfer, outcome, checksum, None)


class InlineLanes:
    """Factory of in-line lanes for an engine, and the handle on what they keep."""

    kind = "inline"

    def __init__(self) -> None:
        self._made: list[InlineLane] = []

    def make(self, what: str, slot: object, finish: Finish) -> InlineLane:
        """Make a lane."""
        lane = InlineLane(slot.member, slot.max_io_bytes, finish)  # type: ignore[attr-defined]
        self._made.append(lane)
        return lane

    def close(self) -> None:
        """Nothing is shared."""

    @property
    def stalled(self) -> int:
        """How many transfers the simulated kernel keeps."""
        return sum(len(lane.stalled) for lane in self._made)

    def kept_writes(self) -> list[tuple[int, int, bytes]]:
        """Member, offset and bytes of the writes that the simulated kernel keeps."""
        return [
            (t.member, t.offset, bytes(t.buffer.view[t.start : t.start + t.length]))
            for lane in self._made
            for t in lane.stalled
            if t.job.write
        ]

    def release(self) -> None:
        """Let the simulated kernel finish everything it kept."""
        for lane in self._made:
            lane.release()


class RaisingDefects(Defects):
    """Has exceptions of handlers come out where the engine was called: a test must see them."""

    def caught(self, what: str, cause: BaseException) -> bool:
        """Count an exception, and let it go on."""
        super().caught(what, cause)
        return False


def inline_engine(
    members: Sequence[Member],
    *,
    clock: SimulatedClock | None = None,
    probe: Probe | None = None,
    max_io_bytes: int = 1024 * 1024,
    defects: Defects | None = None,
) -> tuple[LaneEngine, InlineLanes, SimulatedClock]:
    """Make a deterministic engine; return it with its lanes and its clock."""
    lanes, clock = InlineLanes(), clock or SimulatedClock()
    options = EngineOptions(max_io_bytes=max_io_bytes)
    engine = LaneEngine(
        members, options, probe, lanes=lanes, clock=clock, defects=defects or RaisingDefects()
    )
    return engine, lanes, clock
