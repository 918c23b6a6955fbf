"""What the store hands to an engine: transfers, grouped into jobs with a deadline.

A *transfer* moves one piece. A *job* is the set of transfers whose fate is reported together
(all pieces of one object). A *read batch* is many jobs at once.

Whatever happens, the engine answers exactly once: ``submit`` raises with nothing queued, or every
job is reported; ``read`` never raises. What handlers raise is logged and counted, and costs nobody
else an answer.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fx100_lmcache.buffers import IoBuffer
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.members.base import Member

I64 = npt.NDArray[np.int64]


class Status(enum.Enum):
    """Fate of a transfer."""

    PENDING = "pending"
    OK = "ok"
    MISMATCH = "mismatch"
    """The bytes read do not hash to what was written."""
    ERROR = "error"
    """The kernel or the member refused; see ``Transfer.error``."""
    TIMED_OUT = "timed out"
    """Not finished at the job's deadline: still queued, or still in the kernel."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One piece on its way.

    Attributes
    ----------
    member, offset
        Where on the media, in bytes.
    buffer, start, length
        The bytes of the caller's buffer that are moved and hashed.
    expected : int or None
        What a read must hash to; None if the caller checks for himself.
    checksum : int
        xxh3-64 of the bytes moved, once the status is OK (or MISMATCH).
    in_kernel : bool
        Set when the job's deadline found it there: it will be reported to ``Job.on_late``.
    first_failure : bool
        It failed, and was the first to do so since the member last worked: no sign of a lost path.
    over : bool
        No lane and no kernel touches its buffer any more. Set once.
    started, stuck, ticket, max_io_bytes, slot, refusals
        The engine's own: taken by a thread; counted as stuck; handle in a native pool (0: in
        none); call size of a retry (0: the member's); the member that it was queued for; large
        calls that this member had refused before.
    """

    member: int
    offset: int
    buffer: IoBuffer
    start: int
    length: int
    expected: int | None = None
    checksum: int = 0
    status: Status = Status.PENDING
    error: OSError | None = None
    in_kernel: bool = False
    first_failure: bool = False
    over: bool = False
    started: bool = False
    stuck: bool = False
    ticket: int = 0
    max_io_bytes: int = 0
    slot: object = field(init=False, default=None, repr=False)
    refusals: int = 0
    job: Job = field(init=False, repr=False)


@dataclass(slots=True, eq=False)
class Job:
    """Transfers that are reported together.

    Attributes
    ----------
    deadline : float
        On the engine's clock. Queued transfers are cancelled then, and the job is reported,
        unless ``hold`` says otherwise.
    on_done : callable
        Called once.
    on_late : callable or None
        Called for each transfer that was in the kernel at the deadline, when it comes back, but
        not before ``on_done`` has returned.
    hold : bool
        For reads straight into memory that is not ours to keep: the job is not reported while
        the kernel may still write there.
    urgent : bool
        Not behind other I/O: on a lane of its own, for what is small and rare.
    """

    write: bool
    transfers: Sequence[Transfer]
    deadline: float
    on_done: Callable[[Job], None]
    on_late: Callable[[Transfer], None] | None = None
    hold: bool = False
    urgent: bool = False
    remaining: int = field(init=False)
    finished_at: float = 0.0
    reported: bool = field(init=False, default=False)
    returned: list[Transfer] = field(init=False, default_factory=list, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.remaining = len(self.transfers)
        for transfer in self.transfers:
            transfer.job = self

    @property
    def ok(self) -> bool:
        """Whether every transfer succeeded."""
        return all(t.status is Status.OK for t in self.transfers)

    def end(
        self, transfer: Transfer, status: Status, checksum: int = 0, error: OSError | None = None
    ) -> bool:
        """Note the fate of a transfer that is over, once; ``lock`` is held.

        Returns
        -------
        bool
            Whether the job is to be reported now.
        """
        if transfer.over:
            return False
        transfer.over = True
        transfer.checksum, transfer.error = checksum, error
        if transfer.in_kernel:  # the job was told that it timed out
            return False
        transfer.status = status
        self.remaining -= 1
        return self.remaining == 0


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """Many objects to read, as columns: the engine decides whether it needs a job for each.

    Attributes
    ----------
    piece_counts : int64 array
        Pieces of each object. The other columns have one value for each piece, in that order.
    members, offsets, lengths : int64 arrays
        Where on the media, in bytes.
    addresses, rooms : int64 arrays
        Where each piece goes in memory, and how many bytes of the caller's are there.
    checksums : uint64 array
        What each piece must hash to.
    deadline : float
        On the engine's clock.
    job_of : callable
        Makes the job of one object, given its number, when that is needed. Once for each, unless
        it raises.
    on_good : callable
        Told, at most once, the numbers of the objects that were read without a job of their own.
    on_failed : callable
        Told the numbers of objects of which nothing could be queued. Their buffers are untouched.
    """

    piece_counts: I64
    members: I64
    offsets: I64
    lengths: I64
    addresses: I64
    rooms: I64
    checksums: npt.NDArray[np.uint64]
    deadline: float
    job_of: Callable[[int], Job]
    on_good: Callable[[Sequence[int]], None]
    on_failed: Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class MemberState:
    """Health of a member, as an operator sees it."""

    name: str
    state: str
    """``up``, ``suspect`` (something is stuck or failed just now) or ``down``."""
    io_mode: str
    max_io_bytes: int
    stuck: int
    """Transfers past their deadline that the kernel has not given back."""
    errors: int
    last_error: str


class Engine(Protocol):
    """Moves pieces. Implementations: threads (the product), in-line (tests).

    Attributes
    ----------
    bounced_transfers : int
        Transfers so far that needed a buffer of the engine's own.
    defects : Defects
        Counts what failed, or was refused, that is nobody's fault but ours.
    on_look : callable
        Told the place of each member that was looked at and is up: every ``probe_interval_s``,
        and at once after a write found no space. On a thread that may block for a moment.
    """

    kind: str
    bounced_transfers: int
    on_look: Callable[[int], None]
    defects: Defects

    @property
    def open_jobs(self) -> int:
        """Return how many jobs, and batches of reads, are not reported."""
        ...

    def now(self) -> float:
        """Return the clock that deadlines are measured on, in seconds."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; return at once. Raises with nothing queued, or reports each job once."""
        ...

    def read(self, batches: Sequence[ReadBatch]) -> None:
        """Queue the reads of many objects; return at once. Never raises."""
        ...

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call something once, on the engine's clock: not before ``when``, unless it closes."""
        ...

    def member(self, index: int) -> Member:
        """Return the member in use at a place of the stripe."""
        ...

    def down_mask(self) -> int:
        """Bit map of the members that cannot be read at present."""
        ...

    def states(self) -> list[MemberState]:
        """Report every member's health."""
        ...

    def flush(self) -> None:
        """Flush all members that are up. May block."""
        ...

    def close(self, deadline_s: float) -> int:
        """Stop; return how many transfers had to be left in the kernel."""
        ...
