"""No byte outside of the memory and the member that an operation was given, whatever is asked."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from fx100_lmcache.buffers import IoBuffer
from fx100_lmcache.engine import native_batch as engine_batch
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Job, ReadBatch, Status, Transfer
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.engine.native_lane import NativeLane, _native, native_available
from fx100_lmcache.members.device import open_member
from support.native_tools import (
    ALIGNMENT,
    BLOCK,
    BUFFER,
    MEMBER,
    MEMBER_BYTES,
    PATIENCE_S,
    Bench,
    GuardedMemory,
    Operation,
    bench,
    content,
    table,
)

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native lane was not built (needs a C compiler)"
)
EBADF = 9
HUGE = (2**31, 2**32, 2**32 + 5000, 2**62, 2**63 - BLOCK, 2**63 - 1)


@pytest.fixture
def native(tmp_path: Path) -> Iterator[Bench]:
    module = _native()
    assert module is not None
    with bench(module, tmp_path / "member") as made:
        yield made


def wrong_ones(good: Operation) -> Iterator[tuple[Operation, int]]:
    """Operations that must not be made, each with why: one number of a good one is another."""
    size = good.padded
    for huge in HUGE:
        yield good.but(length=huge, padded=huge // BLOCK * BLOCK), BUFFER
        yield good.but(offset=huge // BLOCK * BLOCK), MEMBER
        yield good.but(padded=huge // BLOCK * BLOCK), ALIGNMENT
    for few in (-(2**63), -BLOCK, -1, 0):
        yield good.but(length=few), BUFFER
        yield good.but(room=few), BUFFER
        yield good.but(padded=few), ALIGNMENT
        yield good.but(max_io=few if few % BLOCK or not few else 1), ALIGNMENT
        yield good.but(align=few), ALIGNMENT
    for offset in (-(2**63), -BLOCK):
        yield good.but(offset=offset), MEMBER
    for block in (1, 2, 3):
        yield good.but(offset=MEMBER_BYTES - size + block * BLOCK), MEMBER
        yield good.but(room=size - block * BLOCK), BUFFER
    yield good.but(room=size - 1), BUFFER
    yield good.but(room=size - 1, length=size - 2), BUFFER
    yield good.but(room=2**63 - 1, length=2 * BLOCK, padded=BLOCK), ALIGNMENT
    yield good.but(room=2**63 - 1, length=2**62, padded=2**62), MEMBER
    yield good.but(length=size - BLOCK), ALIGNMENT
    for shift in (1, 8, 512):
        yield good.but(address=good.address + shift, room=size + BLOCK), ALIGNMENT
        yield good.but(offset=shift), ALIGNMENT
        yield good.but(max_io=BLOCK + shift), ALIGNMENT
        yield good.but(length=size - 1, padded=size - shift), ALIGNMENT
    for align in (3, 4097, 2 * 65536, 2**62):
        yield good.but(align=align), ALIGNMENT
    yield good.but(address=0), BUFFER
    yield good.but(address=-BLOCK), BUFFER
    yield good.but(fd=-1), EBADF
    yield good.but(fd=-(2**31)), EBADF


def test_an_operation_that_leaves_its_bounds_is_refused_and_the_next_one_is_made(
    native: Bench,
) -> None:
    memory = GuardedMemory(2 * BLOCK)
    pool = native.open()
    good = native.read(memory)
    wrong = list(wrong_ones(good))
    submitted = [
        one.but(ticket=n, write=w)
        for w in (False, True)
        for n, (one, _) in enumerate(wrong, 1 + w * len(wrong))
    ]
    native.native.submit(pool, [one.fields for one in submitted])
    found = native.wait(pool, len(submitted))
    assert [(ticket, error) for ticket, error, _ in found] == [
        (n, why) for n, (_, why) in enumerate(wrong + wrong, 1)
    ]
    assert memory.untouched
    assert native.path.read_bytes() == content(0, MEMBER_BYTES)
    native.native.submit(pool, [good.fields])
    assert native.wait(pool, 1)[0][:2] == (1, 0)
    assert memory[: 2 * BLOCK] == content(0, 2 * BLOCK)


def test_rows_of_a_batch_that_leave_their_bounds_are_refused_and_the_others_made(
    native: Bench,
) -> None:
    memories = [GuardedMemory(2 * BLOCK) for _ in range(2)]
    pools = [native.open(), native.open()]
    wrong = list(wrong_ones(native.read(memories[0])))
    good = native.read(memories[1], offset=BLOCK)
    rows = [one.row(n % 2) for n, (one, _) in enumerate(wrong)]
    batch = native.native.submit_batch(pools, 1 << 63, table([*rows, good.row(1)]))
    flags = native.native.watch_batch(batch)
    assert flags == bytes(len(rows) + 1)
    for number, pool in enumerate(pools):
        native.native.wake(pool)
        of_pool = [(n, why) for n, (_, why) in enumerate(wrong) if n % 2 == number]
        if number:
            of_pool.append((len(rows), 0))
        found = native.wait(pool, len(of_pool))
        assert [(ticket - (1 << 63), error) for ticket, error, _ in found] == of_pool
    assert memories[0].untouched
    assert memories[1][: 2 * BLOCK] == content(BLOCK, 2 * BLOCK)


def test_what_ends_at_the_very_end_is_made(native: Bench) -> None:
    memory = GuardedMemory(3 * BLOCK)
    pool = native.open()
    last = native.read(memory, offset=MEMBER_BYTES - 3 * BLOCK)
    native.native.submit(pool, [last.but(length=3 * BLOCK - 7).fields])
    assert native.wait(pool, 1)[0][:2] == (1, 0)
    assert memory[: 3 * BLOCK] == content(MEMBER_BYTES - 3 * BLOCK, 3 * BLOCK)


def test_random_operations_touch_only_what_they_may(native: Bench) -> None:
    """Against the rule written in numbers without a limit."""
    rng = random.Random(5)
    memory = GuardedMemory(4 * BLOCK)
    pool = native.open(4)
    numbers = [0, 1, 7, 512, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK, MEMBER_BYTES]
    numbers += [MEMBER_BYTES - BLOCK, *HUGE]
    numbers += [-n for n in numbers]

    def legal(one: Operation) -> bool:
        sizes = (one.address, one.padded, one.offset, one.max_io)
        return (
            one.align in (512, BLOCK)
            and not any(size % one.align for size in sizes)
            and one.max_io > 0
            and 0 < one.length <= one.padded < one.length + one.align
            and one.padded <= one.room
            and 0 <= one.offset <= MEMBER_BYTES - one.padded
        )

    made = 0
    for ticket in range(1, 4000):
        shift = rng.choice((0, 0, 0, BLOCK, 512, 8))
        one = Operation(
            ticket, native.fd, False, memory.address + shift, 4 * BLOCK - shift, 0, 0, 0,
            align=rng.choice((512, BLOCK, BLOCK)),
        )  # fmt: skip
        length = rng.choice(numbers) if rng.random() < 0.4 else rng.randrange(1, one.room)
        one = one.but(length=length, padded=-(-length // one.align) * one.align)
        one = one.but(offset=rng.randrange(64) * BLOCK)
        if rng.random() < 0.5:
            one = one.but(**{rng.choice(("padded", "offset", "max_io")): rng.choice(numbers)})
        if not all(-(2**63) <= value < 2**63 for value in one.fields):
            continue
        native.native.submit(pool, [one.fields])
        ((found, error, _),) = native.wait(pool, 1)
        assert found == ticket
        assert (error == 0) == legal(one), (one, error)
        assert (error < 0) != legal(one), (one, error)
        made += error == 0
        if made and ticket % 64 == 0:
            memory.fill()
    assert 200 < made < 3800


NO_TABLES = {
    "no rows": np.empty((0, 10), np.uint64),
    "a column too few": np.zeros((2, 9), np.uint64),
    "a column too many": np.zeros((2, 11), np.uint64),
    "one dimension": np.zeros(20, np.uint64),
    "three dimensions": np.zeros((2, 10, 1), np.uint64),
    "signed numbers": np.zeros((2, 10), np.int64),
    "small numbers": np.zeros((2, 10), np.uint32),
    "fractions": np.zeros((2, 10), np.float64),
    "bytes": bytes(160),
    "big-endian numbers": np.zeros((2, 10), ">u8"),
    "rows apart": np.zeros((4, 10), np.uint64)[::2],
    "rows turned": np.zeros((10, 2), np.uint64).T,
    "an odd address": np.frombuffer(bytes(168), np.uint8)[1:161].view(np.uint64).reshape(2, 10),
    "no memory": 5,
    "nothing": None,
    "a pool that is not there": np.full((1, 10), 1, np.uint64),
    "a pool of a huge number": np.full((1, 10), 2**64 - 1, np.uint64),
    "too many rows": np.broadcast_to(np.uint64(0), ((1 << 24) + 1, 10)),
}


@pytest.mark.parametrize("what", NO_TABLES)
def test_what_is_not_a_table_of_rows_is_refused_whole(native: Bench, what: str) -> None:
    pool = native.open()
    with pytest.raises((ValueError, TypeError, BufferError)):
        native.native.submit_batch([pool], 0, NO_TABLES[what])
    assert native.native.submit_batch([pool], 0, table([[0] * 10])) is not None  # still works


def test_tickets_that_would_begin_anew_are_refused(native: Bench) -> None:
    with pytest.raises(ValueError, match="rows"):
        native.native.submit_batch([native.open()], 2**64 - 1, table([[0] * 10]))


class Changing:
    """True; whoever asks has changed the list that it is in."""

    def __init__(self, victim: list[object]) -> None:
        self.victim = victim

    def __bool__(self) -> bool:
        self.victim.clear()
        return True


def test_handles_and_arguments_of_other_kinds_are_errors_and_nothing_worse(native: Bench) -> None:
    module, pool = native.native, native.open()
    batch = module.submit_batch([pool], 0, table([[0] * 10]))
    odd = (None, 0, -1, "pool", object(), batch, [pool], b"", 1.5)
    errors = (TypeError, ValueError, OverflowError, SystemError, OSError)
    for handle in odd:
        calls = [
            (module.submit, handle, []),
            (module.submit_batch, [handle], 0, table([[0] * 10])),
            (module.wake, handle),
            (module.cancel, handle, 1),
            (module.drain, handle, []),
            (module.close_pool, handle),
        ]
        for call, *arguments in calls:
            with pytest.raises(errors):
                call(*arguments)
    for handle in (*(one for one in odd if one is not batch), pool):
        with pytest.raises(errors):
            module.watch_batch(handle)
    memory = GuardedMemory(BLOCK)
    good = native.read(memory).fields
    wrong = [good[:n] for n in range(len(good))] + [(*good, 1), list(good), None]
    wrong += [(*good[:n], value, *good[n + 1 :]) for n in range(len(good)) if n != 2
              for value in (None, "1", 1.5)]  # fmt: skip
    wrong += [(*good[:n], 2**64, *good[n + 1 :]) for n in range(3, len(good))]
    for operation in wrong:
        with pytest.raises(errors):
            module.submit(pool, [good, operation])
    changing: list[object] = []
    changing += [(*good[:2], Changing(changing), *good[3:]), good]
    module.submit(pool, changing)
    found = [ticket for ticket, _, _ in native.wait(pool, 2)]
    assert found == [0, 1], "of the calls that raised nothing was queued"
    for arguments in ((0, 1, 3, 1), (-1, 1, 3, 1), (1025, 1, 3, 1), (1, -1, 3, 1), (1, 1, -1, 1),
                      (1, 1, 3, -1)):  # fmt: skip
        with pytest.raises(OSError, match="Invalid argument"):
            module.open_pool(*arguments)
    with pytest.raises(ValueError, match="address"):
        module.use_hasher(1, 2, 3, 4, 0)


def test_a_closed_pool_makes_no_call_and_gives_back_what_it_has(native: Bench) -> None:
    memory = GuardedMemory(BLOCK)
    pool = native.open()
    native.native.close_pool(pool)
    native.native.close_pool(pool)
    native.native.submit(
        pool, [native.read(memory).fields, native.read(memory).but(align=0).fields]
    )
    native.native.wake(pool)
    assert native.wait(pool, 1) == [(1, ALIGNMENT, 0)]
    assert native.native.cancel(pool, 1)
    assert not native.native.cancel(pool, 1)
    assert memory.untouched


# Through the lanes, as the engine uses them.


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LaneEngine]:
    (tmp_path / "member").write_bytes(content(0, MEMBER_BYTES))
    member = open_member(tmp_path / "member")
    made = LaneEngine([member], EngineOptions(reader_threads=2, writer_threads=2))
    yield made
    made.close(PATIENCE_S)
    member.close()


def job_with(transfer: Transfer, *, write: bool) -> list[Status]:
    done: list[Status] = []
    Job(write, [transfer], 1e18, lambda job: done.extend(t.status for t in job.transfers))
    return done


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("where", ["buffer", "member"])
def test_a_lane_refuses_what_leaves_its_bounds_as_an_error_of_ours(
    engine: LaneEngine, tmp_path: Path, write: bool, where: str
) -> None:
    """Past all that Python checks: the lane is asked itself."""
    arena = GuardedMemory(4 * BLOCK)
    view = memoryview(arena._map)[: 2 * BLOCK]
    buffer = IoBuffer(view, 2 * BLOCK, arena.address)
    length = 4 * BLOCK if where == "buffer" else 2 * BLOCK
    offset = 0 if where == "buffer" else MEMBER_BYTES
    transfer = Transfer(0, offset, buffer, 0, length)
    done = job_with(transfer, write=write)
    slot = engine._slots[0]
    transfer.slot = slot
    engine._expiry.begin()
    lane = slot.writes if write else slot.reads
    assert isinstance(lane, NativeLane)
    lane.submit([transfer])
    engine._expiry.wait_for_end(PATIENCE_S)
    assert done == [Status.ERROR]
    assert "internal error" in str(transfer.error)
    assert arena.untouched
    assert (tmp_path / "member").read_bytes() == content(0, MEMBER_BYTES)
    assert slot.health.errors == 0
    assert slot.health.state == "up"
    view.release()


def test_a_batch_past_the_end_of_its_member_is_refused_as_an_error_of_ours(
    engine: LaneEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past all that Python checks: the pools see the rows as they are."""
    monkeypatch.setattr(engine_batch, "all_within", lambda *_: True, raising=False)
    arena = GuardedMemory(4 * BLOCK)
    view = memoryview(arena._map)[: 4 * BLOCK]
    good: list[int] = []
    statuses: dict[int, list[Status]] = {}

    def job_of(number: int) -> Job:
        buffer = IoBuffer(view[2 * number * BLOCK :][: 2 * BLOCK], 2 * BLOCK, arena.address)
        transfer = Transfer(0, number * MEMBER_BYTES, buffer, 0, 2 * BLOCK)

        def done(job: Job) -> None:
            statuses[number] = [t.status for t in job.transfers]

        return Job(False, [transfer], 1e18, done)

    two = np.array([2 * BLOCK, 2 * BLOCK])
    columns = {
        "piece_counts": np.array([1, 1]),
        "members": np.array([0, 0]),
        "offsets": np.array([0, MEMBER_BYTES]),
        "lengths": two,
        "addresses": arena.address + np.array([0, 2 * BLOCK]),
        "rooms": two,
        "checksums": np.array([xxhash.xxh3_64_intdigest(content(0, 2 * BLOCK)), 0], np.uint64),
    }
    callbacks = {"job_of": job_of, "on_good": good.extend, "on_failed": good.extend}
    known = {k: v for k, v in callbacks.items() if k in ReadBatch.__dataclass_fields__}
    engine.read([ReadBatch(**columns, deadline=engine.now() + PATIENCE_S, **known)])
    engine._expiry.wait_for_end(PATIENCE_S)
    assert statuses.pop(1) == [Status.ERROR]
    assert good == [0] or statuses == {0: [Status.OK]}  # which depends on when the other one ended
    assert arena[: 2 * BLOCK] == content(0, 2 * BLOCK)
    assert arena[2 * BLOCK : 4 * BLOCK] == bytes([0xA5]) * 2 * BLOCK
    assert engine._slots[0].health.errors == 0
    view.release()


def test_memory_that_is_not_mapped_is_no_fault_of_the_member(engine: LaneEngine) -> None:
    """The kernel says EFAULT: the guard page behind the buffer is not written to."""
    arena = GuardedMemory(BLOCK)
    view = memoryview(arena._map)[BLOCK : 2 * BLOCK]
    transfer = Transfer(0, 0, IoBuffer(view, BLOCK, arena.address + BLOCK), 0, BLOCK)
    done = job_with(transfer, write=False)
    slot = engine._slots[0]
    transfer.slot = slot
    engine._expiry.begin()
    slot.reads.submit([transfer])
    engine._expiry.wait_for_end(PATIENCE_S)
    assert done == [Status.ERROR]
    assert slot.health.errors == 0
    view.release()


def test_one_wrong_transfer_costs_no_other_its_result(engine: LaneEngine) -> None:
    arena = GuardedMemory(8 * BLOCK)
    view = memoryview(arena._map)[: 8 * BLOCK]
    transfers, outcomes = [], []
    for place in range(4):
        start = place * 2 * BLOCK
        one = IoBuffer(view[start : start + 2 * BLOCK], 2 * BLOCK, arena.address + start)
        transfer = Transfer(0, MEMBER_BYTES if place == 1 else 0, one, 0, 2 * BLOCK)
        outcomes.append(job_with(transfer, write=False))
        transfer.slot = engine._slots[0]
        transfers.append(transfer)
    engine._expiry.begin(len(transfers))
    engine._slots[0].reads.submit(transfers)
    engine._expiry.wait_for_end(PATIENCE_S)
    assert outcomes == [[Status.OK], [Status.ERROR], [Status.OK], [Status.OK]]
    view.release()
