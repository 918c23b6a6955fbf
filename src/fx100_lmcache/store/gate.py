"""The one way from the store to its engine: nothing is written unless the shards are ours.

Every write that the pipelines ask for passes here, whatever it is for. Only claim blocks go another
way (see :mod:`fx100_lmcache.store.ownership`), after a look of their own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.jobs import Engine, Job, MemberState, ReadBatch, Status
from fx100_lmcache.members.base import Member


class GatedEngine:
    """An engine that refuses writes while a condition does not hold.

    Attributes
    ----------
    open_to_writes : callable
        The condition, asked for each job as it is submitted. At first nothing may be written.
    refused : int
        Jobs that were not made.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.kind = engine.kind
        self.open_to_writes: Callable[[], bool] = lambda: False
        self.refused = 0

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; those that may not be made are reported at once."""
        allowed = [job for job in jobs if not job.write or self.open_to_writes()]
        self._engine.submit(allowed)
        if len(allowed) < len(jobs):
            passed = set(map(id, allowed))
            for job in jobs:
                if id(job) not in passed:
                    self._refuse(job)

    def _refuse(self, job: Job) -> None:
        self.refused += 1
        problem = OSError(errno.ESTALE, "not written: the claim on the shard is not known to hold")
        with job.lock:
            for transfer in job.transfers:
                job.end(transfer, Status.ERROR, 0, problem)
        job.finished_at = self._engine.now()
        with self.defects.guard("a completion handler failed"):
            job.on_done(job)
        job.reported = True

    def read(self, batches: Sequence[ReadBatch]) -> None:
        """Queue reads, which need no claim."""
        self._engine.read(batches)

    @property
    def bounced_transfers(self) -> int:
        """As the engine counts them."""
        return self._engine.bounced_transfers

    @property
    def defects(self) -> Defects:
        """The engine's."""
        return self._engine.defects

    @property
    def open_jobs(self) -> int:
        """As the engine counts them."""
        return self._engine.open_jobs

    def now(self) -> float:
        """Return the engine's clock."""
        return self._engine.now()

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call something once: at this time, or when the engine closes."""
        self._engine.call_at(when, call)

    def member(self, index: int) -> Member:
        """Return the member in use at a place of the stripe."""
        return self._engine.member(index)

    def down_mask(self) -> int:
        """Bit map of the members that cannot be read at present."""
        return self._engine.down_mask()

    def states(self) -> list[MemberState]:
        """Report every member's health."""
        return self._engine.states()

    def flush(self) -> None:
        """Flush all members that are up. May block."""
        self._engine.flush()

    def close(self, deadline_s: float) -> int:
        """Stop; return how many transfers had to be left in the kernel."""
        return self._engine.close(deadline_s)
