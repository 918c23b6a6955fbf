"""What the engine tests share: jobs whose outcome can be waited for, members that misbehave."""

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash

from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.engine.native_lane import native_available
from fx100_lmcache.members.device import DeviceMember, open_member
from fx100_lmcache.testing.inline import InlineLanes, inline_engine
from fx100_lmcache.testing.memory import Fault, MemoryMember

PATIENCE_S = 30.0  # a test that waits longer has failed
KIB = 1024
MIB = 1024 * KIB

MakeEngine = Callable[..., LaneEngine]

needs_native = pytest.mark.skipif(
    not native_available(), reason="the native lane was not built (needs a C compiler)"
)


def file_member(path: Path, size_bytes: int = 8 * MIB) -> DeviceMember:
    with path.open("wb") as file:
        file.write(bytes(size_bytes))
    return open_member(path)


def pattern(length: int, seed: int = 1) -> bytes:
    return (xxhash.xxh3_128_digest(bytes([seed % 256])) * (length // 16 + 1))[:length]


def buffer_of(data: bytes, *, shift: int = 0, room: int = 4096) -> IoBuffer:
    """Memory that holds ``data``, ``shift`` bytes past a page boundary, with padding after it."""
    pages = zero_buffer(-(-(len(data) + shift + room) // 4096) * 4096)
    view = pages.view[shift : shift + len(data) + room]
    view[: len(data)] = data
    return IoBuffer(view, len(data), pages.address + shift)


@dataclass
class Outcome:
    """Counts the reports of one job, and keeps what its transfers came to."""

    reports: int = 0
    late: list[Transfer] = field(default_factory=list)
    statuses: list[Status] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    came_late: threading.Event = field(default_factory=threading.Event)

    def on_done(self, job: Job) -> None:
        self.reports += 1
        self.transfers = list(job.transfers)
        self.statuses = [t.status for t in job.transfers]
        self.done.set()

    def on_late(self, transfer: Transfer) -> None:
        self.late.append(transfer)
        self.came_late.set()

    def wait(self) -> "Outcome":
        assert self.done.wait(PATIENCE_S), "the job was never reported"
        return self


def start(
    engine: LaneEngine,
    transfers: Sequence[Transfer],
    *,
    write: bool = False,
    within_s: float = PATIENCE_S,
    hold: bool = False,
) -> Outcome:
    outcome = Outcome()
    deadline = engine.now() + within_s
    engine.submit([Job(write, transfers, deadline, outcome.on_done, outcome.on_late, hold)])
    return outcome


def write_at(engine: LaneEngine, offset: int, buffer: IoBuffer, member: int = 0) -> Outcome:
    transfer = Transfer(member, offset, buffer, 0, buffer.length)
    return start(engine, [transfer], write=True).wait()


def read_at(
    engine: LaneEngine,
    offset: int,
    buffer: IoBuffer,
    expected: int | None = None,
    member: int = 0,
) -> Outcome:
    transfer = Transfer(member, offset, buffer, 0, buffer.length, expected)
    return start(engine, [transfer]).wait()


class GatedMember(MemoryMember):
    """A memory member whose transfers block, in threads of the engine, until the gate opens."""

    def __init__(self, size_bytes: int = 8 * MIB, **how: Any) -> None:
        super().__init__(size_bytes, **how)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.in_flight = 0
        self.most_in_flight = 0
        self._count = threading.Lock()

    def _pass(self, call: Callable[[int, memoryview], int], offset: int, view: memoryview) -> int:
        with self._count:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.entered.release()
        try:
            assert self.gate.wait(PATIENCE_S)
            return call(offset, view)
        finally:
            with self._count:
                self.in_flight -= 1

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return self._pass(super().read_into, offset, buffer)

    def write_from(self, offset: int, buffer: memoryview) -> int:
        return self._pass(super().write_from, offset, buffer)

    def wait_entered(self, count: int) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=PATIENCE_S), "too few transfers reached the member"


class ReplacedMember(MemoryMember):
    """What an open descriptor becomes when its device is gone: reads of nothing."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return 0

    def write_from(self, offset: int, buffer: memoryview) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")


def eventually(condition: object) -> bool:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.005)
    return False


def state(engine: LaneEngine, member: int = 0) -> str:
    return engine.states()[member].state


def stalled_engine(
    reads: int = 1, shift: int = 0, **job: bool
) -> tuple[LaneEngine, InlineLanes, Outcome]:
    member = MemoryMember(MIB)
    member.faults = [Fault("stall", "write" if job.get("write") else "read", times=reads)]
    engine, lanes, _ = inline_engine([member])
    buffer = buffer_of(bytes(reads * 4096), shift=shift)
    transfers = [Transfer(0, n * 4096, buffer, n * 4096, 4096) for n in range(reads)]
    return engine, lanes, start(engine, transfers, within_s=5.0, **job)


def expire(engine: LaneEngine, seconds: float = 5.0) -> None:
    engine._clock.advance(seconds)  # type: ignore[attr-defined]
    engine.expire_due()
