"""No transfer leaves its buffer or its member, whoever laid it out."""

import itertools
import logging
import mmap
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fx100_lmcache.buffers import IoBuffer, address_of
from fx100_lmcache.engine.bounds import all_within, out_of_bounds
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.health import ERRORS_IN_A_ROW
from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.testing.memory import MemoryMember
from support.batches import read_batch
from support.engine import MIB, PATIENCE_S, buffer_of, pattern, read_at, start, state, write_at

Setup = Callable[..., LaneEngine]
BLOCK = 4096
SIZE = 8 * MIB
HUGE = 1 << 62

WRONG = {  # start, length, offset
    "past the end of the buffer": (BLOCK, BLOCK + 1, 0),
    "before the buffer": (-BLOCK, BLOCK, 0),
    "a start beyond the buffer": (4 * BLOCK, 512, 0),
    "of the length of a record gone wrong": (0, (1 << 32) + 5000, 0),
    "of no length": (0, 0, 0),
    "of a negative length": (BLOCK, -BLOCK, 0),
    "of a length that overflows": (0, HUGE, HUGE),
    "past the end of the member": (0, 2 * BLOCK, SIZE - BLOCK),
    "padded past the end of the member": (0, 1, SIZE),
    "before the member": (0, BLOCK, -BLOCK),
    "at an offset that overflows": (0, BLOCK, (1 << 63) - 512),
}


class Fenced:
    """Two blocks of memory with a block before and after that nothing may change."""

    def __init__(self) -> None:
        self.pages = mmap.mmap(-1, 4 * BLOCK)
        self.pages[:] = b"\xee" * (4 * BLOCK)
        view = memoryview(self.pages)[BLOCK : 3 * BLOCK]
        self.buffer = IoBuffer(view, 2 * BLOCK, address_of(self.pages) + BLOCK)

    @property
    def untouched(self) -> bool:
        return self.pages[:BLOCK] == self.pages[3 * BLOCK :] == b"\xee" * BLOCK


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_transfer_out_of_bounds_is_refused(setup: Setup, wrong: str, write: bool) -> None:
    engine = setup(2)
    write_at(engine, 0, buffer_of(pattern(2 * BLOCK)))
    at, length, offset = WRONG[wrong]
    fenced = Fenced()
    for _ in range(2 * ERRORS_IN_A_ROW):
        bad = Transfer(0, offset, fenced.buffer, at, length)
        good = Transfer(1, 0, fenced.buffer, 0, BLOCK)
        outcome = start(engine, [bad, good], write=write).wait()
        assert outcome.statuses == [Status.ERROR, Status.OK]
        assert outcome.reports == 1
    assert fenced.untouched
    assert (state(engine), engine.states()[0].errors) == ("up", 0)
    assert engine.defects.count == 2 * ERRORS_IN_A_ROW
    back = read_at(engine, 0, buffer_of(bytes(2 * BLOCK))).transfers[0].buffer
    assert bytes(back.view[: 2 * BLOCK]) == pattern(2 * BLOCK)


@pytest.mark.parametrize("member", [-1, 2, HUGE])
def test_a_transfer_to_a_member_that_does_not_exist_is_refused(setup: Setup, member: int) -> None:
    engine = setup(2)
    outcome = start(engine, [Transfer(member, 0, buffer_of(bytes(BLOCK)), 0, BLOCK)]).wait()
    assert outcome.statuses == [Status.ERROR]
    assert engine.defects.count == 1


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *itertools.product(["lengths"], [-BLOCK, 0, 4 * BLOCK, HUGE, (1 << 63) - 1]),
        *itertools.product(["offsets"], [-BLOCK, SIZE, SIZE - 512, HUGE, (1 << 63) - 512]),
        *itertools.product(["members"], [-1, 2, HUGE]),
        *itertools.product(["rooms"], [0, -1, BLOCK - 1]),
    ],
)
def test_a_read_out_of_bounds_costs_the_others_of_its_batch_nothing(
    setup: Setup, column: str, value: int
) -> None:
    engine = setup(2)
    checksum = write_at(engine, 0, buffer_of(pattern(BLOCK))).transfers[0].checksum
    fenced = [Fenced() for _ in range(4)]
    pieces = [[(0, 0, BLOCK, checksum)] for _ in fenced]
    if column != "rooms":
        where = ["members", "offsets", "lengths"].index(column)
        piece = list(pieces[2][0])
        piece[where] = value
        pieces[2] = [tuple(piece)]  # type: ignore[list-item]
    else:
        view = fenced[2].buffer.view
        short = view[: max(value, 0)]
        fenced[2].buffer = IoBuffer(short, len(short), fenced[2].buffer.address)
    objects = [(each.buffer, piece) for each, piece in zip(fenced, pieces, strict=True)]
    batch, outcome = read_batch(objects, engine.now() + PATIENCE_S)
    engine.read([batch])
    assert outcome.wait().ok == {0, 1, 3}
    assert outcome.jobs[2] == [Status.ERROR]
    assert all(each.untouched for each in fenced)
    assert engine.defects.count == 1
    assert (state(engine), engine.states()[0].errors, engine.open_jobs) == ("up", 0, 0)


def test_a_burst_of_refusals_is_one_line(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    engine = setup()
    with caplog.at_level(logging.WARNING, "fx100_lmcache"):
        for _ in range(20):
            start(engine, [Transfer(0, -1, buffer_of(bytes(BLOCK)), 0, BLOCK)]).wait()
    assert caplog.text.count("internal error") == 1
    assert engine.defects.count == 20


def test_both_checks_agree() -> None:
    """The one for single transfers, and the one for columns, at every boundary."""
    members = [MemoryMember(64 * 512, block=512), MemoryMember(16 * 4096, block=4096)]
    ends = sorted({n + d for n in (0, 512, 4096, 64 * 512, 16 * 4096) for d in (-1, 0, 1)})
    extremes = [*ends, HUGE, -HUGE, (1 << 63) - 1]
    room = 8192
    buffer = buffer_of(bytes(room), room=0)
    (buffer_room,) = {len(buffer.view)}
    seen = set()
    objects = [(buffer, [(0, 0, 1, 0)])]
    batch, _ = read_batch(objects, 0.0)
    for member, offset, length in itertools.product((-1, 0, 1, 2), extremes, extremes):
        one = Transfer(member, offset, buffer, 0, length)
        known = members[member] if 0 <= member < 2 else None
        single = not out_of_bounds(one, known)
        columns = replace(
            batch,
            members=np.array([member]),
            offsets=np.array([offset]),
            lengths=np.array([length]),
            rooms=np.array([buffer_room]),
        )
        assert all_within(columns, members) == single, (member, offset, length)
        seen.add(single)
    assert seen == {False, True}
