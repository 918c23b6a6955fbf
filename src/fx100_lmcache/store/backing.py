"""Members whose storage below has no room: thin namespaces, sparse files, quotas.

Such a member goes on being read, and what was written before can be written again, since the
storage below has it. What was never written is withheld. Now and then a block of that, which
belongs to nobody, is written with zeros: when that works, all is given out again.

A device that is gone says "no space" too. So nothing is decided before the member's label was
read (see :meth:`~fx100_lmcache.engine.engine.LaneEngine.probe`); until then it is not
written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.burst_log import BurstLog
from fx100_lmcache.engine.jobs import Engine, Job, Status, Transfer
from fx100_lmcache.members.allocation import allocation_of
from fx100_lmcache.members.base import NO_SPACE_ERRORS
from fx100_lmcache.ondisk.geometry import Geometry
from fx100_lmcache.space.space import Space

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Until new space is tried again: thin pools that grow by themselves do so within seconds."""
LONGEST_PAUSE_S = 60.0
"""A trial costs a small write; but one that works may cost the puts that find no space next."""


@dataclass(slots=True)
class _Short:
    """A member without space below.

    Attributes
    ----------
    closed : bool
        Not to be written to before the next trial.
    trying : bool
        A trial is on its way.
    block : int
        The block that found no space last; -1 if it was something else.
    rows : list of int
        Inode slots that found none; they are held.
    """

    next_trial: float
    closed: bool = True
    trying: bool = False
    pause_s: float = FIRST_PAUSE_S
    block: int = -1
    rows: list[int] = field(default_factory=list)


def without_space(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Return the writes that found no space below."""
    return [t for t in transfers if t.error is not None and t.error.errno in NO_SPACE_ERRORS]


class Backing:
    """What is known of the space below the members. The core's lock is held by callers.

    Parameters
    ----------
    store_s : float
        Deadline of a trial.
    """

    def __init__(self, geometry: Geometry, engine: Engine, space: Space, store_s: float) -> None:
        self._geometry = geometry
        self._engine = engine
        self._space = space
        self._store_s = store_s
        self._short: dict[int, _Short] = {}
        self._zeros = zero_buffer(geometry.block_bytes)
        self._bursts = BurstLog(log, "no space below")

    @property
    def closed_mask(self) -> int:
        """Bit map of the members that are not to be written to at present."""
        return sum(1 << member for member, short in self._short.items() if short.closed)

    @property
    def is_short(self) -> bool:
        """Whether any member has no space below."""
        return bool(self._short)

    def short(self, member: int) -> bool:
        """Whether a member has no space below."""
        return member in self._short

    def note_failed(self, transfers: Iterable[Transfer]) -> None:
        """Note writes that found no space; the blocks of those that are over are free again."""
        for transfer in without_space(transfers):
            member = transfer.member
            short = self._short.get(member)
            if short is None:
                short = self._short[member] = _Short(next_trial=self._engine.now())
                self._bursts.note(
                    f"{self._engine.member(member).name}: {transfer.error}; "
                    "what is stored can be read, and its space is used again"
                )
            short.closed = True
            first = self._geometry.block_offset(member, 0)
            last = transfer.offset + transfer.length - 1  # it fails at its end, if not before
            short.block = (last - first) // self._geometry.block_bytes if last >= first else -1
            self._space.withhold(member)

    def hold_slot(self, row: int) -> None:
        """Keep a free inode slot that found no space from being given out again."""
        short = self._short.get(self._geometry.place(row)[0])
        if short is not None:
            self._space.hold_slot(row)
            short.rows.append(row)

    def due(self, member: int) -> bool:
        """Whether new space of a member is to be tried."""
        short = self._short.get(member)
        return short is not None and not short.trying and self._engine.now() >= short.next_trial

    def trial(self, member: int, conclude: Callable[[bool], None]) -> Job | None:
        """Make the job that tries new space of a member; None if there is none to try.

        Parameters
        ----------
        conclude : callable
            Told, without the lock, whether there is space.
        """
        short = self._short[member]
        self._space.withhold(member)  # what came back since
        offset, length = self._target(member, short)
        if not length:
            self._give_out(member)  # all of it was written before: the next put will tell
            return None
        short.trying = True
        transfer = Transfer(member, offset, self._zeros, 0, length)

        def done(job: Job) -> None:
            if not job.transfers[0].in_kernel:
                conclude(job.transfers[0].status is Status.OK)

        def late(transfer: Transfer) -> None:
            conclude(transfer.error is None)

        return Job(True, [transfer], self._engine.now() + self._store_s, done, late)

    def _target(self, member: int, short: _Short) -> tuple[int, int]:
        """Choose what nobody owns, if possible what failed: offset and length; length 0: none."""
        geometry = self._geometry
        if short.block < 0 and short.rows:
            place = geometry.place(short.rows[-1])
            return geometry.slot_offset(*place), geometry.inode_bytes
        block = self._space.withheld_block(member, short.block)
        if block is None:
            return 0, 0
        return geometry.block_offset(member, block), geometry.block_bytes

    def tried(self, member: int, works: bool) -> None:
        """Take the outcome of a trial."""
        short = self._short[member]
        short.trying = short.closed = False
        if works:
            self._give_out(member)
            log.warning("%s: there is space below again", self._engine.member(member).name)
        else:
            short.next_trial = self._engine.now() + short.pause_s
            short.pause_s = min(2 * short.pause_s, LONGEST_PAUSE_S)

    def _give_out(self, member: int) -> None:
        for row in self._short.pop(member).rows:
            self._space.free_slot(row)
        self._space.release(member)

    def problems(self, down_mask: int) -> list[str]:
        """Describe the members without space, in words for an operator; not those that are away."""
        return [self._problem(m) for m in sorted(self._short) if not down_mask >> m & 1]

    def _problem(self, number: int) -> str:
        member = self._engine.member(number)
        there = allocation_of(member).allocated_bytes
        known = f"{there} of its {member.size_bytes} bytes are there; " if there is not None else ""
        return (
            f"member {member.name} has no space below it: {known}what is stored can be read and "
            "its space is used again, the rest waits. Give its file system, pool or quota more "
            "space; `fx100 format --allocate` makes sure of it beforehand"
        )
