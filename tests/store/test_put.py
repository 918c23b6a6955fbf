"""Put, remove and clear: what is visible when, and what failures leave behind."""

import errno
import threading

import pytest

from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout
from fx100_lmcache.testing.harness import META, SCOPE, Rig, digest_of
from fx100_lmcache.testing.memory import Fault
from support.store import (
    CHUNK,
    OTHER_META,
    chunk,
    counts,
    data_from,
    expire,
    has,
    inode_writes,
    no_faults,
    put_all,
    rig,
    stall_data_writes,
)


def writes(store: Rig) -> int:
    return sum(call[0] == "write" for member in store.members for call in member.calls)


def test_put_and_get() -> None:
    store = rig()
    for length in (1, 511, 4096, 4097, CHUNK, 3 * CHUNK + 5):
        name = f"object of {length}"
        result = store.put(name, chunk(name, length=length))
        assert (result.stored, result.written) == (True, length)
        assert store.get(name) == chunk(name, length=length)
        store.check_space()
    assert len(store.store) == 6


@pytest.mark.parametrize(
    "shape", [(5,), (2, 3), (2, 3, 4), (1, 2, 3, 4), (1, 1, 2, 3, 4), ()], ids=len
)
@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "made-up"])
def test_shapes_and_dtypes_are_opaque(shape: tuple[int, ...], dtype: str) -> None:
    """Any rank of shape, any name of a dtype."""
    store = rig()
    meta = ChunkMeta(SCOPE, Layout("any", ((dtype, shape),)))
    store.put("object", b"bytes", meta=meta.pack())
    store.reopen()
    assert store.get("object") == b"bytes"
    [(_, _, _, number)] = store.store.entries()
    assert store.store.meta(number) == meta


def test_a_present_object_is_not_written_again() -> None:
    """Rewrites of a present key write 0 bytes."""
    store = rig()
    store.put("a", chunk("a"))
    before = writes(store)
    result = store.put("a", chunk("a"))
    assert (result.stored, result.written) == (True, 0)
    assert writes(store) == before
    assert counts(store)["puts_present"] == 1


def test_another_layout_replaces() -> None:
    """It could never be loaded again: the key says less than the layout."""
    store = rig()
    store.put("a", chunk("a"))
    result = store.put("a", chunk("a", 1, 5000), meta=OTHER_META)
    assert (result.stored, result.written) == (True, 5000)
    assert store.get("a") == chunk("a", 1, 5000)
    assert store.evicted == [digest_of("a")]  # listeners hear of the old one
    assert len(store.store) == 1
    store.check_space()
    store.reopen()
    assert store.get("a") == chunk("a", 1, 5000)


def test_two_puts_of_one_object_write_it_once() -> None:
    store = rig()
    stall_data_writes(store)
    first, second = store.start_put("a", chunk("a")), store.start_put("a", chunk("a"))
    assert (first, second) == ([], [])
    no_faults(store)
    store.lanes.release()
    assert [(r.stored, r.written) for r in first + second] == [(True, CHUNK), (True, 0)]
    assert counts(store)["puts_stored"] == 1
    assert store.get("a") == chunk("a")


def test_one_batch_may_name_an_object_twice() -> None:
    store = rig()
    results = put_all(store, ["a", "b", "a"])
    assert [r.stored for r in results] == [True] * 3
    assert sum(r.written for r in results) == 2 * CHUNK


def test_a_second_layout_does_not_share_the_fate_of_the_first() -> None:
    """Who puts another layout must not hear that it was stored."""
    store = rig()
    stall_data_writes(store)
    first = store.start_put("a", chunk("a"))
    [second] = store.start_put("a", chunk("a"), meta=OTHER_META)
    assert (second.stored, second.reason) == (False, "conflict")
    no_faults(store)
    store.lanes.release()
    assert first[0].stored


@pytest.mark.parametrize("what", ["data", "inode"])
def test_a_failed_write_leaves_no_object(what: str) -> None:
    """Absent at once, after reopening, and whole after a put that worked."""
    store = rig()
    free = store.store.space().free
    if what == "data":
        for number, member in enumerate(store.members):
            member.faults = [Fault("error", "write", first_byte=data_from(store, number))]
    else:
        inode_writes(store, "torn", value=256)
    result = store.put("a", chunk("a"))
    assert (result.stored, result.reason) == (False, "error")
    no_faults(store)
    assert has(store, "a") == [False]
    assert store.get("a") is None
    assert store.store.space().free == free
    store.check_space()
    assert counts(store)["put_drop_error"] == 1
    store.reopen()
    assert has(store, "a") == [False]
    assert store.put("a", chunk("a", 1)).stored
    assert store.get("a") == chunk("a", 1)


def test_a_full_device_drops_the_put_and_reads_go_on() -> None:
    """ENOSPC from the device is no dead end."""
    store = rig()
    store.put("a", chunk("a"))
    for member in store.members:
        member.faults = [Fault("error", "write", value=errno.ENOSPC)]
    assert not store.put("b", chunk("b")).stored
    no_faults(store)
    assert store.get("a") == chunk("a")
    assert store.put("b", chunk("b")).stored


def test_an_object_being_written_is_invisible() -> None:
    """Neither part of it nor a promise of it."""
    store = rig()
    stall_data_writes(store)
    results = store.start_put("a", chunk("a"))
    assert (results, has(store, "a"), store.get("a")) == ([], [False], None)
    store.lanes.release()
    inode_writes(store, "stall")
    no_faults(store)
    assert results[0].stored
    assert store.get("a") == chunk("a")


def test_an_object_without_its_inode_is_invisible() -> None:
    store = rig()
    inode_writes(store, "stall")
    results = store.start_put("a", chunk("a"))
    assert (results, has(store, "a")) == ([], [False])
    store.reopen()
    assert has(store, "a") == [False]


def test_completed_puts_are_the_prefix_that_is_found() -> None:
    """Of 60 queued puts as many are found as were completed."""
    store = rig(size_bytes=1 << 20)
    names = [f"chunk{n}" for n in range(60)]
    for number, name in enumerate(names):
        if number == 25:
            stall_data_writes(store, times=1000)
        store.start_put(name, chunk(name))
    assert store.store.lookup([digest_of(n) for n in names], prefix=True).sum() == 25
    store.reopen()
    assert store.store.lookup([digest_of(n) for n in names], prefix=True).sum() == 25


@pytest.mark.parametrize("what", ["data", "inode"])
def test_a_stalled_put_has_a_deadline_and_its_space_is_quarantined(what: str) -> None:
    """The key is a miss, other keys are unaffected, a late write lands nowhere in use."""
    store = rig(store_s=60.0)
    store.put("b", chunk("b"))
    free = store.store.space().free
    if what == "data":
        stall_data_writes(store)
    else:
        inode_writes(store, "stall")
    results = store.start_put("a", chunk("a"))
    no_faults(store)
    expire(store, 59.0)
    assert results == []
    expire(store, 1.0)
    assert [(r.stored, r.reason) for r in results] == [(False, "deadline")]
    assert counts(store)["deadline_misses"] == 1
    space = store.store.space()
    assert (space.quarantined, space.free) == (4, free - 4)
    assert has(store, "a", "b") == [False, True]  # they lie on different members
    assert len(store.store.problems()) == 1
    store.lanes.release()  # the kernel is done with it at last
    assert has(store, "a", "b") == [False, True]
    assert (store.store.space().quarantined, store.store.space().free) == (0, free)
    assert not store.store.problems()
    assert store.get("b") == chunk("b")
    assert store.put("a", chunk("a", 1)).stored
    store.reopen()
    assert store.get("a") == chunk("a", 1)


def test_quarantined_space_is_not_given_to_anyone() -> None:
    """A late write must not land in an object that came later."""
    store = rig(members=3)
    stall_data_writes(store)
    late = store.start_put("late", chunk("late"))
    no_faults(store)
    expire(store, 60.0)
    assert late[0].reason == "deadline"
    names = [f"n{n}" for n in range(40)]
    stored = [name for name in names if store.put(name, chunk(name)).stored]
    assert len(stored) == 40
    kept = [name for name in stored if store.get(name) is not None]
    store.lanes.release()
    for name in kept:
        assert store.get(name) == chunk(name)
    store.check_space()


def test_puts_beyond_the_backlog_are_dropped_and_counted() -> None:
    """They never wait: what is not stored is computed again."""
    store = rig(max_write_bytes=2 * CHUNK)
    stall_data_writes(store)
    first, second = store.start_put("a", chunk("a")), store.start_put("b", chunk("b"))
    [third] = store.start_put("c", chunk("c"))
    assert (third.stored, third.reason) == (False, "backlog")
    no_faults(store)
    store.lanes.release()
    assert first[0].stored
    assert second[0].stored
    assert store.put("c", chunk("c")).stored
    assert counts(store)["put_drop_backlog"] == 1


def test_an_object_that_never_fits_evicts_nothing() -> None:
    store = rig(size_bytes=128 * 1024)
    store.put("a", chunk("a"))
    result = store.put("huge", chunk("huge", length=1 << 20))
    assert (result.stored, result.reason) == (False, "impossible")
    assert store.put("nothing", b"").reason == "impossible"
    assert store.get("a") == chunk("a")
    assert store.evicted == []


def test_hashing_after_the_deadline_does_not_publish() -> None:
    """The owner may have reused the buffer: a valid checksum of wrong data."""
    store = rig(store_s=60.0)
    stall_data_writes(store)
    results = store.start_put("a", chunk("a"))
    no_faults(store)
    store.clock.advance(61.0)  # the engine's watch has not run yet
    store.lanes.release()
    assert [(r.stored, r.reason) for r in results] == [(False, "deadline")]
    assert has(store, "a") == [False]
    store.check_space()


# Closing


def test_nothing_is_put_after_close() -> None:
    store = rig()
    store.put("a", chunk("a"))
    assert store.store.close() == 0
    assert store.put("b", chunk("b")).reason == "closing"
    assert store.store.close() == 0
    store.reopen()
    assert has(store, "a", "b") == [True, False]


def test_close_with_a_stalled_put_is_over_in_time() -> None:
    store = rig()
    stall_data_writes(store)
    results = store.start_put("a", chunk("a"))
    assert store.store.close(deadline_s=0.2) == 1
    assert results[0].reason == "deadline"


def test_many_formats_of_one_object_stay_apart() -> None:
    """What was stored as bf16 is not what a load of fp8 gets."""
    store = rig()
    store.put("a", chunk("a"), meta=META)
    wanted = ChunkMeta.unpack(OTHER_META).layout
    found = store.store.lookup([digest_of("a")], accept=lambda meta: meta.layout == wanted)
    assert found.tolist() == [False]
    assert counts(store)["lookup_layout_mismatches"] == 1


@pytest.mark.parametrize("fails_at", range(1, 6))
def test_running_out_of_space_in_the_middle_leaves_no_lock_behind(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever allocation finds nothing, the rest goes on, also from another thread."""
    store = rig()
    space = store.store._core.space
    allocate, calls = space.allocate, [0]

    def sometimes(blocks: int, down_mask: int, max_pieces: int) -> object:
        calls[0] += 1
        return None if calls[0] >= fails_at else allocate(blocks, down_mask, max_pieces)

    monkeypatch.setattr(space, "allocate", sometimes)
    results = put_all(store, [f"n{n}" for n in range(6)])
    assert [r.stored for r in results] == [n < fails_at - 1 for n in range(6)]
    monkeypatch.undo()
    outcome: list[bool] = []
    other = threading.Thread(target=lambda: outcome.append(store.put("a", chunk("a")).stored))
    other.start()
    other.join(20)
    assert outcome == [True]
    store.check_space()
