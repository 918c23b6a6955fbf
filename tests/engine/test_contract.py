"""What every lane promises: inline, Python threads, native threads."""

import random
from collections.abc import Callable

import pytest
import xxhash

from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from support.engine import KIB, MIB, Outcome, buffer_of, pattern, read_at, start, write_at

Setup = Callable[..., LaneEngine]


@pytest.mark.parametrize("length", [1, 511, 512, 513, 4095, 4096, 65_537, MIB, MIB + 1, 3_000_001])
@pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "at+64 (B61)"])
def test_round_trip(setup: Setup, length: int, shift: int) -> None:
    engine = setup()
    data = pattern(length)
    written = write_at(engine, 4096, buffer_of(data, shift=shift))
    assert written.statuses == [Status.OK]
    assert written.transfers[0].checksum == xxhash.xxh3_64_intdigest(data)
    target = buffer_of(b"\xee" * length, shift=shift)
    back = read_at(engine, 4096, target, written.transfers[0].checksum)
    assert back.statuses == [Status.OK]
    assert bytes(target.view[:length]) == data


def test_padding_is_zero_on_the_media(setup: Setup) -> None:
    """The tail of the last logical block never holds what was in memory before."""
    engine = setup()
    write_at(engine, 0, buffer_of(b"\xff" * 4096))
    source = buffer_of(b"\xaa" * 1000)
    source.view[1000:] = b"\xbb" * (len(source.view) - 1000)
    write_at(engine, 0, source)
    target = buffer_of(bytes(4096))
    read_at(engine, 0, target)
    assert bytes(target.view[:1000]) == b"\xaa" * 1000
    assert bytes(target.view[1000:1024]) == bytes(24)
    assert bytes(target.view[1024:4096]) == b"\xff" * 3072


def test_bytes_past_the_object_are_left_alone_when_bounced(setup: Setup) -> None:
    engine = setup()
    write_at(engine, 0, buffer_of(pattern(1000)))
    target = buffer_of(b"\xee" * 1000, shift=64)
    target.view[1000:] = b"\xcc" * (len(target.view) - 1000)
    read_at(engine, 0, target)
    assert bytes(target.view[1000:]) == b"\xcc" * (len(target.view) - 1000)


@pytest.mark.parametrize("shift", [0, 64])
def test_other_bytes_on_the_media_are_a_mismatch(setup: Setup, shift: int) -> None:
    engine = setup()
    data = bytearray(pattern(2 * MIB))
    checksum = write_at(engine, 0, buffer_of(data)).transfers[0].checksum
    data[MIB + 17] ^= 4
    write_at(engine, 0, buffer_of(data))
    found = read_at(engine, 0, buffer_of(bytes(2 * MIB), shift=shift), checksum)
    assert found.statuses == [Status.MISMATCH]
    assert found.transfers[0].error is None


def test_pieces_of_one_buffer_on_several_members(setup: Setup) -> None:
    engine = setup(members=3)
    data = pattern(300 * KIB + 5)
    source = buffer_of(data)
    cuts = [(0, 0, 128 * KIB), (1, 128 * KIB, 128 * KIB), (2, 256 * KIB, len(data) - 256 * KIB)]
    transfers = [Transfer(m, 8192, source, at, length) for m, at, length in cuts]
    outcome = start(engine, transfers, write=True).wait()
    assert outcome.statuses == [Status.OK] * 3
    target = buffer_of(bytes(len(data)))
    reads = [
        Transfer(m, 8192, target, at, length, t.checksum)
        for (m, at, length), t in zip(cuts, outcome.transfers, strict=True)
    ]
    assert start(engine, reads).wait().statuses == [Status.OK] * 3
    assert bytes(target.view[: len(data)]) == data


def test_reading_past_the_end_is_an_error_and_no_data(setup: Setup) -> None:
    """Neither a short file nor a device that vanished may pass for zeros (B39)."""
    engine = setup(size_bytes=MIB)
    found = read_at(engine, 2 * MIB, buffer_of(bytes(4096)))
    assert found.statuses == [Status.ERROR]
    assert found.transfers[0].error is not None


def test_reading_over_the_end_is_an_error(setup: Setup) -> None:
    engine = setup(size_bytes=MIB)
    assert read_at(engine, MIB - 4096, buffer_of(bytes(8192))).statuses == [Status.ERROR]


def test_a_job_without_transfers_is_reported(setup: Setup) -> None:
    outcome = start(setup(), []).wait()
    assert (outcome.reports, outcome.statuses) == (1, [])


def test_a_job_past_its_deadline_touches_nothing(setup: Setup) -> None:
    engine = setup()
    before = buffer_of(bytes(4096))
    outcome = start(
        engine, [Transfer(0, 0, buffer_of(pattern(4096)), 0, 4096)], write=True, within_s=-1.0
    ).wait()
    assert outcome.statuses == [Status.TIMED_OUT]
    assert not outcome.transfers[0].in_kernel
    read_at(engine, 0, before)
    assert bytes(before.view[:4096]) == bytes(4096)
    assert engine.states()[0].state == "up"


def test_many_jobs_at_once_are_each_reported_once(setup: Setup) -> None:
    engine = setup(members=2)
    rng = random.Random(7)
    outcomes, jobs, wanted = [], [], []
    for number in range(64):
        data = pattern(rng.randrange(1, 100_000), seed=number)
        source = buffer_of(data, shift=rng.choice((0, 64)))
        outcome = Outcome()
        transfers = [Transfer(number % 2, number // 2 * 128 * KIB, source, 0, len(data))]
        jobs.append(Job(True, transfers, engine.now() + 30, outcome.on_done, outcome.on_late))
        outcomes.append(outcome)
        wanted.append(data)
    engine.submit(jobs)
    for outcome in outcomes:
        outcome.wait()
    for number, data in enumerate(wanted):
        target = buffer_of(bytes(len(data)))
        checksum = outcomes[number].transfers[0].checksum
        found = read_at(engine, number // 2 * 128 * KIB, target, checksum, member=number % 2)
        assert found.statuses == [Status.OK]
        assert bytes(target.view[: len(data)]) == data
    assert [(o.reports, o.late) for o in outcomes] == [(1, [])] * 64


def test_closed_engine_refuses_and_reports(setup: Setup) -> None:
    engine = setup()
    assert engine.close(1.0) == 0
    outcome = start(engine, [Transfer(0, 0, buffer_of(bytes(512)), 0, 512)]).wait()
    assert outcome.statuses == [Status.ERROR]
