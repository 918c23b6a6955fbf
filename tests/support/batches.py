"""Batches of reads whose outcome can be waited for."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fx100_lmcache.buffers import IoBuffer
from fx100_lmcache.engine.jobs import Job, ReadBatch, Status, Transfer
from support.engine import PATIENCE_S

Piece = tuple[int, int, int, int]  # member, offset, length, what it must hash to


@dataclass
class BatchOutcome:
    """What became of each object, and how often it was reported."""

    objects: int
    good: list[int] = field(default_factory=list)
    jobs: dict[int, list[Status]] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)
    in_kernel: set[int] = field(default_factory=set)
    late: list[int] = field(default_factory=list)
    reports: Counter[int] = field(default_factory=Counter)
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: list[int] = field(default_factory=list)

    def report(self, number: int) -> None:
        with self.lock:
            self.reports[number] += 1
            if len(self.reports) == self.objects:
                self.done.set()

    def on_good(self, numbers: Sequence[int]) -> None:
        self.good.extend(numbers)
        for number in numbers:
            self.report(number)

    def on_failed(self, numbers: Sequence[int]) -> None:
        self.failed.extend(numbers)
        for number in numbers:
            self.report(number)

    def on_done(self, number: int, job: Job) -> None:
        self.jobs[number] = [t.status for t in job.transfers]
        if any(t.in_kernel for t in job.transfers):
            self.in_kernel.add(number)
        self.report(number)

    def wait(self) -> "BatchOutcome":
        assert self.done.wait(PATIENCE_S), f"reported: {sorted(self.reports)} of {self.objects}"
        assert set(self.reports.values()) == {1}
        return self

    @property
    def ok(self) -> set[int]:
        """Objects that were read well, whichever way that was reported."""
        whole = {n for n, statuses in self.jobs.items() if set(statuses) == {Status.OK}}
        return whole | set(self.good)


def read_batch(
    objects: Sequence[tuple[IoBuffer, Sequence[Piece]]], deadline: float, *, hold: bool = True
) -> tuple[ReadBatch, BatchOutcome]:
    """Describe the reads of objects whose pieces lie one after the other in their buffers."""
    outcome = BatchOutcome(len(objects))
    rows = []
    starts: list[list[int]] = []
    for buffer, pieces in objects:
        at = 0
        starts.append([])
        for member, offset, length, checksum in pieces:
            room = len(buffer.view) - at
            rows.append((member, offset, length, buffer.address + at, room, checksum))
            starts[-1].append(at)
            at += length

    def job_of(number: int) -> Job:
        outcome.made.append(number)
        buffer, pieces = objects[number]
        transfers = [
            Transfer(member, offset, buffer, start, length, checksum)
            for (member, offset, length, checksum), start in zip(
                pieces, starts[number], strict=True
            )
        ]
        done: Callable[[Job], None] = lambda job: outcome.on_done(number, job)  # noqa: E731
        late: Callable[[Transfer], None] = lambda _: outcome.late.append(number)  # noqa: E731
        return Job(False, transfers, deadline, done, late, hold)

    columns = list(zip(*rows, strict=True))
    members, offsets, lengths, addresses, rooms = (np.array(c, np.int64) for c in columns[:5])
    counts = np.array([len(pieces) for _, pieces in objects], np.int64)
    checksums = np.array(columns[5], np.uint64)
    batch = ReadBatch(
        counts,
        members,
        offsets,
        lengths,
        addresses,
        rooms,
        checksums,
        deadline,
        job_of,
        outcome.on_good,
        outcome.on_failed,
    )
    return batch, outcome
