"""Load, lookup and pins: exactly the bytes that were put, or a miss with a reason."""

import random
import threading
from functools import partial
from typing import Any

import pytest

from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta
from fx100_lmcache.store import LoadItem, LoadResult, PutItem, PutResult, Store
from fx100_lmcache.testing.harness import META, Rig, digest_of
from fx100_lmcache.testing.memory import Fault
from support.store import (
    CHUNK,
    OTHER_META,
    chunk,
    counts,
    data_from,
    expire,
    has,
    no_faults,
    put_all,
    rig,
    start_load,
)


def load_into(store: Rig, name: str, buffer: IoBuffer, accept: bool = True) -> LoadResult:
    results: list[LoadResult] = []
    store.store.load([LoadItem(digest_of(name), buffer, lambda _m, _n: accept)], results.extend)
    return results[0]


def test_misses_have_reasons() -> None:
    store = rig()
    store.put("a", chunk("a"))
    reasons = [
        load_into(store, "x", zero_buffer(CHUNK)).reason,
        load_into(store, "a", zero_buffer(CHUNK - 4096)).reason,
        load_into(store, "a", zero_buffer(CHUNK), accept=False).reason,
    ]
    assert reasons == ["absent", "layout", "layout"]
    assert counts(store)["load_miss_layout"] == 2
    assert counts(store).get("load_hits", 0) == 0


def test_results_come_in_the_order_asked() -> None:
    store = rig()
    put_all(store, ["a", "b"])
    results: list[LoadResult] = []
    items = [
        LoadItem(digest_of(name), zero_buffer(CHUNK), lambda _m, _n: True)
        for name in ("x", "a", "y", "b", "a")
    ]
    store.store.load(items, results.extend)
    assert [r.length for r in results] == [0, CHUNK, 0, CHUNK, CHUNK]
    assert bytes(items[3].buffer.view) == chunk("b")
    store.store.load([], results.extend)
    assert store.store.lookup([]).tolist() == []
    assert (store.store.unpin([]), store.store.remove([])) == (0, [])


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_corrupt_data_of_the_same_length_is_a_miss_once(place: str) -> None:
    """Dropped, counted, told to listeners; the space is used again."""
    store = rig()
    free = store.store.space().free
    store.put("a", chunk("a"))
    start = store.members[0].media.find(chunk("a")[:4096])
    at = {"first": 0, "middle": CHUNK // 2, "last": CHUNK - 1}[place]
    store.members[0].media[start + at] ^= 1
    result, _ = store.get_with_reason("a")
    assert (result.length, result.reason) == (0, "checksum")
    assert counts(store)["checksum_failures"] == 1
    assert store.evicted == [digest_of("a")]
    assert has(store, "a") == [False]
    assert store.store.space().free == free
    assert store.put("a", chunk("a")).stored
    assert store.get("a") == chunk("a")


def test_swapped_contents_are_a_miss() -> None:
    """Whole, valid blocks of another object."""
    store = rig(members=1)
    put_all(store, ["a", "b"])
    media = store.members[0].media
    at = {name: media.find(chunk(name)[:4096]) for name in "ab"}
    media[at["a"] : at["a"] + CHUNK], media[at["b"] : at["b"] + CHUNK] = chunk("b"), chunk("a")
    assert store.get("a") is None
    assert store.get("b") is None
    assert counts(store)["checksum_failures"] == 2


@pytest.mark.parametrize("kind", ["lost", "misdirected"])
def test_a_write_that_did_not_arrive_is_a_miss(kind: str) -> None:
    store = rig(members=1)
    first = data_from(store)
    store.members[0].faults = [Fault(kind, "write", first_byte=first, value=64 * 1024)]
    assert store.put("a", chunk("a")).stored  # the device said so
    assert store.get("a") is None
    assert counts(store)["checksum_failures"] == 1


def test_stale_sectors_are_a_miss() -> None:
    store = rig(members=1)
    store.put("a", chunk("a"))
    store.store.remove([digest_of("a")])
    store.put("b", chunk("b"))  # in the same place
    store.members[0].faults = [Fault("stale", "read", first_byte=data_from(store))]
    assert store.get("b") is None


def test_one_read_error_is_a_miss_two_are_bad_media() -> None:
    """A path that is lost fails for all; an entry that fails twice while others work goes."""
    store = rig(members=1)
    put_all(store, ["a", "b"])
    for present in (True, False):
        store.members[0].faults = [Fault("error", "read")]
        assert store.get("a") is None
        assert has(store, "a") == [present]
        assert store.get("b") == chunk("b")
    store.check_space()
    assert counts(store)["load_miss_error"] == 2


def test_a_good_read_between_two_errors_keeps_the_entry() -> None:
    store = rig(members=1)
    store.put("a", chunk("a"))
    for _ in range(3):
        store.members[0].faults = [Fault("error", "read")]
        assert store.get("a") is None
        assert store.get("a") == chunk("a")


def test_nothing_is_promised_on_a_member_that_is_down() -> None:
    """What lies on it is a miss; it is there again when the member is."""
    store = rig(members=2)
    put_all(store, ["a", "b", "c", "d"])  # one frame each, in turn
    store.engine._probe = lambda _, member: member
    store.members[0].faults = [Fault("error", "read", times=3)]
    for name in ("a", "c"):
        store.get(name)
    store.get("a")
    found = has(store, "a", "b", "c", "d")
    assert found[1::2] == [True, True]
    assert found[::2] == [False, False]
    assert store.get("c") is None
    assert store.get("d") == chunk("d")
    assert store.put("e", chunk("e")).stored
    store.engine.probe(0)
    assert store.get("c") == chunk("c")


# Deadlines


@pytest.mark.parametrize("hold", [False, True])
def test_a_stalled_load(hold: bool) -> None:
    store = rig(load_s=10.0)
    put_all(store, ["a"])
    for member in store.members:
        member.faults = [Fault("stall", "read")]
    results, item = start_load(store, "a", hold=hold)
    no_faults(store)
    expire(store, 10.0)
    if hold:  # its memory is not ours: the kernel's word is awaited
        assert results == []
        store.lanes.release()
        assert [r.length for r in results] == [CHUNK]
        assert bytes(item.buffer.view) == chunk("a")
    else:
        assert [(r.reason, r.in_kernel) for r in results] == [("deadline", True)]
        assert counts(store)["deadline_misses"] == 1
        store.lanes.release()
    assert has(store, "a") == [True]
    assert store.store.remove([digest_of("a")]) != []
    assert store.store.space().free == store.store.space().total  # no reader is left over


def test_memory_is_given_back_after_the_kernel_let_go() -> None:
    store = rig(load_s=10.0)
    put_all(store, ["a"])
    for member in store.members:
        member.faults = [Fault("stall", "read")]
    released: list[int] = []
    item = LoadItem(
        digest_of("a"), zero_buffer(CHUNK), lambda _m, _n: True, lambda: released.append(1)
    )
    store.store.load([item], lambda _: None, hold=False)
    expire(store, 10.0)
    assert released == []
    store.lanes.release()
    assert released == [1]


def test_removed_during_a_load_past_its_deadline() -> None:
    """The blocks stay taken until the kernel has finished reading them."""
    store = rig(load_s=10.0)
    put_all(store, ["a"])
    for member in store.members:
        member.faults = [Fault("stall", "read")]
    start_load(store, "a", hold=False)
    no_faults(store)
    expire(store, 10.0)
    store.store.remove([digest_of("a")], force=True)
    assert store.store.space().free == store.store.space().total - 4
    store.check_space()
    store.lanes.release()
    assert store.store.space().free == store.store.space().total


# Pins


def test_what_lookup_promised_can_be_loaded_until_unpinned() -> None:
    """Under ten times the capacity of new objects."""
    store = rig(members=2, size_bytes=512 * 1024)
    capacity = store.store.space().total * 4096 // CHUNK
    names = [f"kept{n}" for n in range(capacity // 2)]
    put_all(store, names)
    assert all(store.store.lookup([digest_of(n) for n in names], pin=True))
    for number in range(10 * capacity):
        store.put(f"new{number}", chunk(f"new{number}"))
        store.check_space()
    for name in names:
        assert store.get(name) == chunk(name)
    assert store.store.unpin([digest_of(n) for n in names]) == len(names)
    for number in range(capacity):
        store.put(f"newer{number}", chunk(f"newer{number}"))
    assert not any(has(store, *names))


def test_pins_expire() -> None:
    store = rig(pin_ttl_s=300.0)
    put_all(store, ["a"])
    store.store.lookup([digest_of("a")], pin=True)
    store.clock.advance(299.0)
    assert store.store.remove([digest_of("a")]) == []
    store.clock.advance(2.0)
    assert store.store.remove([digest_of("a")]) != []


def test_unpinning_too_often_is_counted() -> None:
    store = rig()
    put_all(store, ["a"])
    store.store.lookup([digest_of("a"), digest_of("x")], pin=True)
    assert store.store.unpin([digest_of("a"), digest_of("a"), digest_of("x")]) == 1
    assert counts(store)["unpins_of_nothing"] == 2
    assert store.store.remove([digest_of("a")]) != []


def test_a_prefix_lookup_pins_nothing_beyond_the_first_miss() -> None:
    store = rig()
    put_all(store, ["a", "b", "d"])
    asked = [digest_of(n) for n in "abcd"]
    assert store.store.lookup(asked, pin=True, prefix=True).tolist() == [True, True, False, False]
    assert store.store.unpin(asked) == 2


def test_lookup_compares_descriptions_once_each() -> None:
    store = rig()
    put_all(store, ["a", "b"])
    store.put("c", chunk("c"), meta=OTHER_META)
    asked: list[ChunkMeta] = []

    def accept(meta: ChunkMeta) -> bool:
        asked.append(meta)
        return meta == ChunkMeta.unpack(META)

    found = store.store.lookup([digest_of(n) for n in "abcx"], accept=accept)
    assert found.tolist() == [True, True, False, False]
    assert len(asked) == 2


def test_the_tail_of_a_conversation_is_evicted_first() -> None:
    store = rig(members=1, size_bytes=256 * 1024)
    names = [f"chunk{n}" for n in range(6)]
    put_all(store, names)
    store.store.lookup([digest_of(n) for n in names])
    number = 0
    while all(has_quietly(store, names)):
        store.put(f"new{number}", chunk(f"new{number}"))
        number += 1
        assert number < 100
    kept = has_quietly(store, names)
    assert kept == sorted(kept, reverse=True)


def has_quietly(store: Rig, names: list[str]) -> list[bool]:
    """Look without counting as use."""
    live = {digest for _, digest, _, _ in store.store.entries()}
    return [digest_of(name) in live for name in names]


# Threads


def answered(results: list[Any], done: threading.Event, found: list[Any]) -> None:
    results += found
    done.set()


def test_random_use_from_eight_threads() -> None:
    """Every byte that is returned belongs to its key; nobody waits for ever."""
    store = rig(members=2, size_bytes=512 * 1024)
    engine = LaneEngine(store.members, EngineOptions(reader_threads=4, native=False))
    threaded = Store(store.store.volume, engine, options=store.options)
    problems: list[str] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for step in range(200):
            name = f"key{rng.randrange(90)}"
            done = threading.Event()
            action = rng.random()
            buffer = zero_buffer(CHUNK)
            if action < 0.4:
                buffer.view[:] = chunk(name)
                stored: list[PutResult] = []
                item = PutItem(digest_of(name), META, buffer)
                threaded.put([item], partial(answered, stored, done))
            elif action < 0.9:
                loaded: list[LoadResult] = []
                wanted = LoadItem(digest_of(name), buffer, lambda _m, _n: True)
                threaded.load([wanted], partial(answered, loaded, done))
                if done.wait(20) and loaded[0].length and bytes(buffer.view) != chunk(name):
                    problems.append(f"{name}: wrong bytes")
            elif action < 0.995:
                threaded.remove([digest_of(name)])
                done.set()
            else:
                threaded.clear()
                done.set()
            if not done.wait(20):
                problems.append(f"{seed}: step {step} never ended")
                return

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    found = threaded.counts()
    assert min(found["load_hits"], found["puts_stored"], found["evictions"], found["clears"]) > 0
    assert found.get("checksum_failures", 0) == 0
    assert threaded.close() == 0
    space = threaded.space()
    assert space.free + space.used + space.quarantined == space.total
    assert space.quarantined == 0
    live = [(digest, length) for _, digest, length, _ in threaded.entries()]
    store.reopen()
    assert {(d, n) for _, d, n, _ in store.store.entries()} == set(live)
