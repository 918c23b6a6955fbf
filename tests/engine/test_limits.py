"""Sizes of calls: the cap, what is learned from refusals, short transfers."""

import errno

import pytest

from fx100_lmcache.engine.jobs import Status, Transfer
from fx100_lmcache.testing.inline import inline_engine
from fx100_lmcache.testing.memory import Fault, MemoryMember
from support.engine import KIB, MIB, MakeEngine, buffer_of, pattern, read_at, start, write_at


def lengths(member: MemoryMember, what: str = "read") -> list[int]:
    return [length for kind, _, length in member.calls if kind == what]


def test_no_call_is_larger_than_the_cap(make_engine: MakeEngine) -> None:
    """B66: our own cap, whatever the device advertises."""
    member = MemoryMember(16 * MIB)
    engine = make_engine([member], max_io_bytes=512 * KIB)
    write_at(engine, 0, buffer_of(pattern(5 * MIB)))
    read_at(engine, 0, buffer_of(bytes(5 * MIB), shift=64))
    assert max(lengths(member)) == max(lengths(member, "write")) == 512 * KIB


def test_a_cap_that_is_no_multiple_of_a_block_is_rounded_down(make_engine: MakeEngine) -> None:
    member = MemoryMember(16 * MIB, block=4096)
    engine = make_engine([member], max_io_bytes=1_000_000)
    assert write_at(engine, 0, buffer_of(pattern(2 * MIB))).statuses == [Status.OK]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO, errno.EREMOTEIO])
@pytest.mark.parametrize("shift", [0, 64])
def test_refused_large_calls_teach_the_limit(
    make_engine: MakeEngine, code: int, shift: int
) -> None:
    """B67: a device that refuses more than 512 KiB is used in calls of 512 KiB."""
    member = MemoryMember(16 * MIB, max_io_bytes=512 * KIB, too_large_errno=code)
    engine = make_engine([member])
    data = pattern(4 * MIB + 3)
    for _ in range(3):
        assert write_at(engine, 0, buffer_of(data, shift=shift)).statuses == [Status.OK]
    assert engine.states()[0].max_io_bytes == 512 * KIB
    member.calls.clear()
    target = buffer_of(bytes(len(data)), shift=shift)
    assert read_at(engine, 0, target).statuses == [Status.OK]
    assert bytes(target.view[: len(data)]) == data
    assert max(lengths(member)) == 512 * KIB  # no large call is tried any more
    assert engine.states()[0].errors == 0


def test_pieces_just_under_the_cap_teach_a_round_limit(make_engine: MakeEngine) -> None:
    """A quarter of a chunk of 8,126,464 bytes, where the target takes 1 MiB."""
    member = MemoryMember(16 * MIB, max_io_bytes=MIB, too_large_errno=errno.EIO)
    engine = make_engine([member], max_io_bytes=2 * MIB)
    for _ in range(3):
        assert write_at(engine, 0, buffer_of(pattern(2_031_616))).statuses == [Status.OK]
    assert engine.states()[0].max_io_bytes == MIB


def test_invalid_is_halved_until_it_fits(make_engine: MakeEngine) -> None:
    member = MemoryMember(16 * MIB, max_io_bytes=128 * KIB)
    engine = make_engine([member], max_io_bytes=4 * MIB)
    assert write_at(engine, 0, buffer_of(pattern(4 * MIB))).statuses == [Status.OK]
    assert engine.states()[0].max_io_bytes == 128 * KIB


def test_one_io_error_does_not_shrink_the_limit(make_engine: MakeEngine) -> None:
    """A path that is lost for a moment fails once, too."""
    member = MemoryMember(16 * MIB)
    engine = make_engine([member], max_io_bytes=MIB)
    for _ in range(3):
        member.faults = [Fault("error", "read", value=errno.EIO)]
        assert read_at(engine, 0, buffer_of(bytes(2 * MIB))).statuses == [Status.OK]
        assert engine.states()[0].max_io_bytes == MIB
        read_at(engine, 0, buffer_of(bytes(2 * MIB)))


def test_io_errors_of_all_in_flight_do_not_shrink_the_limit() -> None:
    member = MemoryMember(64 * MIB)
    engine, _, _ = inline_engine([member])
    buffer = buffer_of(bytes(MIB))
    member.faults = [Fault("error", "read", after=2 * n, value=errno.EIO) for n in range(8)]
    start(engine, [Transfer(0, n * MIB, buffer, 0, MIB) for n in range(8)])
    assert engine.states()[0].max_io_bytes == MIB


def test_a_member_that_stays_broken_is_not_retried_for_ever() -> None:
    member = MemoryMember(16 * MIB)
    engine, _, _ = inline_engine([member])
    member.faults = [Fault("error", "read", times=100, value=errno.EIO)]
    assert read_at(engine, 0, buffer_of(bytes(MIB))).statuses == [Status.ERROR]
    assert len(member.calls) == 2  # whole, then the first half
    assert engine.states()[0].max_io_bytes == MIB
    assert engine.states()[0].errors == 1


def test_small_calls_are_not_split() -> None:
    member = MemoryMember(MIB)
    engine, _, _ = inline_engine([member])
    member.faults = [Fault("error", "read", value=errno.EIO)]
    assert read_at(engine, 0, buffer_of(bytes(64 * KIB))).statuses == [Status.ERROR]
    assert len(member.calls) == 1


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("moved", [4096, 5000, 512 * KIB + 1])
def test_short_transfers_are_resumed_on_a_block(
    make_engine: MakeEngine, moved: int, shift: int, write: bool
) -> None:
    """B39: a short count is neither success nor the end."""
    member = MemoryMember(16 * MIB, block=4096)
    engine = make_engine([member])
    data = pattern(MIB + 100)
    if not write:
        write_at(engine, 0, buffer_of(data))
        member.calls.clear()
    member.faults = [Fault("short", "write" if write else "read", times=2, value=moved)]
    target = buffer_of(data if write else b"\xee" * len(data), shift=shift)
    found = write_at(engine, 0, target) if write else read_at(engine, 0, target)
    assert found.statuses == [Status.OK]
    assert all(offset % 4096 == 0 for _, offset, _ in member.calls)
    back = buffer_of(bytes(len(data)))
    read_at(engine, 0, back)
    assert bytes(back.view[: len(data)]) == data == bytes(target.view[: len(data)])


@pytest.mark.parametrize("moved", [0, 511])
def test_moving_nothing_is_an_error(make_engine: MakeEngine, moved: int) -> None:
    """After `nvme disconnect` an open descriptor reads 0 bytes; that is no data."""
    member = MemoryMember(MIB)
    engine = make_engine([member])
    member.faults = [Fault("short", "read", value=moved)]
    found = read_at(engine, 0, buffer_of(bytes(8192)))
    assert found.statuses == [Status.ERROR]
    assert found.transfers[0].error is not None
    assert found.transfers[0].error.errno == errno.ENODEV
    assert member.name in str(found.transfers[0].error)


def test_a_short_write_is_never_success(make_engine: MakeEngine) -> None:
    """B38: the full device returns a count below what was asked, again and again."""
    member = MemoryMember(MIB)
    engine = make_engine([member])
    member.faults = [Fault("short", "write", times=100, value=0)]
    assert write_at(engine, 0, buffer_of(bytes(8192))).statuses == [Status.ERROR]
    assert len(member.calls) == 1  # and no loop at one offset
