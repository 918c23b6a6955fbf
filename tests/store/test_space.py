"""Capacity is a hard limit, space is not lost, and what is left stays in long runs."""

import random
import threading

import pytest

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.ondisk.geometry import Geometry, MemberShape
from fx100_lmcache.store import PutItem, PutResult, Store
from fx100_lmcache.testing.harness import META, Rig, digest_of
from fx100_lmcache.testing.inline import InlineLanes, inline_engine
from fx100_lmcache.testing.memory import memory_members
from fx100_lmcache.volume.format import format_volume
from support.store import CHUNK, chunk, counts, has, inode_writes, no_faults, options, put_all, rig


@pytest.mark.parametrize("width", [0, 1])
@pytest.mark.parametrize("sizes", [[256 * 1024] * 2, [96 * 1024, 300 * 1024, 160 * 1024]])
@pytest.mark.parametrize("seed", range(3))
def test_hard_capacity_after_every_step(sizes: list[int], width: int, seed: int) -> None:
    """Random sizes, five times the capacity; the limit holds at every moment."""
    store = Rig.fresh(len(sizes), sizes, options=options(width=width))
    rng = random.Random(seed)
    for member in store.members:
        member.calls.clear()
    written = refused = 0
    while written < 5 * store.store.space().total * 4096:
        name = f"key{rng.randrange(200)}"
        action = rng.random()
        if action < 0.75:
            length = rng.choice((CHUNK, 4 * CHUNK, rng.randrange(1, CHUNK), 4096))
            result = store.put(name, chunk(name, length=length))
            written += result.written
            refused += not result.stored
            assert result.stored or width == 1, f"{name}: {result.reason}"
        elif action < 0.85:
            store.store.remove([digest_of(name)])
        elif action < 0.99:
            store.get(name)
        else:
            store.reopen()
        store.check_space()
        space = store.store.space()
        live = sum(-(-length // 4096) for _, _, length, _ in store.store.entries())
        assert space.used == live
        assert space.quarantined == 0
    assert counts(store)["evictions"] > 0
    assert refused <= 12  # four frames on one small member are hard to find
    for number, member in enumerate(store.members):  # nothing was written past the limit
        geometry = store.store.volume.geometry
        end = geometry.block_offset(number, len(geometry.shard_blocks(number, 0)))
        assert all(at + n <= end for what, at, n in member.calls if what == "write")


def test_restarts_do_not_eat_the_disk() -> None:
    """What is not in the index holds no space."""
    store = rig(members=2)
    for round_ in range(6):
        for number in range(20):
            store.put(f"{round_}.{number}", chunk(str(number)))
        store.reopen()
        store.check_space()
        space = store.store.space()
        assert space.used == 4 * len(store.store)
        assert space.used <= space.total


def test_space_is_usable_again_after_checksum_failures() -> None:
    store = rig(members=2)
    total = store.store.space().total
    for round_ in range(5):
        names = [f"{round_}.{n}" for n in range(10)]
        put_all(store, names)
        for number, member in enumerate(store.members):
            first = store.store.volume.geometry.block_offset(number, 0)
            for at in range(first, len(member.media) - 8192, 4096):
                member.media[at] ^= 1
        assert [store.get(name) for name in names] == [None] * 10
        assert store.store.space().free == total
    assert counts(store)["checksum_failures"] == 50


def test_eviction_runs_ahead_of_need() -> None:
    """A put into a store that is full does not wait for an erase."""
    store = rig(members=2, size_bytes=1 << 20)
    reserve = int(store.store.space().total * store.options.reserve_fraction)
    for number in range(300):
        assert store.put(str(number), chunk(str(number))).stored
        assert store.store.space().free >= reserve - 4  # the last put's own frame


def test_a_burst_of_puts_waits_for_the_erases_of_all() -> None:
    """Each that waits has its own space coming; none is dropped because others wait, too."""
    store = rig(members=2, reserve_fraction=0.0)
    capacity = store.store.space().total // 4
    put_all(store, [f"old{n}" for n in range(capacity)])
    assert store.store.space().free < 4
    inode_writes(store, "stall", times=1000)
    results = [store.start_put(f"new{n}", chunk(f"new{n}")) for n in range(6)]
    assert results == [[]] * 6
    no_faults(store)
    store.lanes.release()
    assert [[r.stored for r in result] for result in results] == [[True]] * 6
    store.check_space()


def test_waiting_puts_are_dropped_at_their_deadline_not_kept_for_ever() -> None:
    store = rig(members=2, reserve_fraction=0.0, store_s=60.0)
    capacity = store.store.space().total // 4
    put_all(store, [f"old{n}" for n in range(capacity)])
    inode_writes(store, "stall", times=1000)
    results = store.start_put("new", chunk("new"))
    assert results == []
    store.clock.advance(60.1)
    store.engine.expire_due()
    assert [(r.stored, r.reason) for r in results] == [(False, "full")]
    store.check_space()


# A mix of full chunks, partial chunks and small objects: the real proportions (a full chunk is
# one frame on each of four members), with smaller blocks

FRAME_BLOCKS = 31
BLOCK = 4096
FULL = 4 * FRAME_BLOCKS * BLOCK


def mixed_store(frames: int = 64) -> Store:
    slots = frames * FRAME_BLOCKS
    size = (frames * FRAME_BLOCKS + 8) * BLOCK + slots * 512
    shape = MemberShape(size, slots, frames)
    geometry = Geometry(BLOCK, FRAME_BLOCKS, 512, 512, 1, (shape,) * 4)
    media = memory_members(4, size)
    volume = format_volume(media, geometry, unix_s=1)
    return Store(volume, inline_engine(media)[0], options=options())


def put(store: Store, name: str, length: int) -> bool:
    buffer = zero_buffer(-(-length // 4096) * 4096)
    buffer.length = length
    results: list[PutResult] = []
    store.put([PutItem(digest_of(name), META, buffer)], results.extend)
    return results[0].stored


def mix(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.6:
        return FULL
    return rng.randrange(1, FULL) if kind < 0.8 else BLOCK


def pieces_of_full_chunks(store: Store) -> list[int]:
    catalog = store._core.catalog
    entries = (catalog.entry(row) for row in catalog.live_rows())
    return [len(e.pieces) for e in entries if e.length == FULL]


@pytest.mark.parametrize("recency", ["fifo", "random"])
def test_mix_after_churning_ten_times_the_capacity(recency: str) -> None:
    """Waste at most 5 %, mean I/O of a full chunk at least 0.9 of a fresh volume's."""
    store = mixed_store()
    rng = random.Random(1)
    capacity = store.space().total * BLOCK
    put(store, "first", FULL)
    fresh = pieces_of_full_chunks(store)[0]
    written = number = refused = 0
    while written < 10 * capacity:
        length = mix(rng)
        number += 1
        refused += not put(store, f"key{number}", length)
        written += length
        if recency == "random":
            recent = range(max(1, number - 150), number + 1)
            store.lookup([digest_of(f"key{rng.choice(recent)}") for _ in range(3)])
    assert refused == 0
    pieces = pieces_of_full_chunks(store)
    assert fresh / (sum(pieces) / len(pieces)) >= 0.9
    space = store.space()
    # what lies idle beyond the reserve and one round of eviction, and what blocks waste
    idle = max(0.0, space.free - space.total * (0.03 + 0.01)) * BLOCK
    in_blocks = space.used * BLOCK - store.live_bytes
    assert (idle + in_blocks) / capacity <= 0.05


def test_a_volume_full_of_small_objects_takes_full_chunks_again() -> None:
    """Whatever the order in which the small ones were used, and however they are scattered."""
    store = mixed_store(frames=12)
    total = store.space().total
    for number in range(total):
        assert put(store, f"small{number}", BLOCK)
    shuffled = [digest_of(f"small{n}") for n in range(total)]
    random.Random(3).shuffle(shuffled)
    for digest in shuffled:
        store.lookup([digest])
    assert [put(store, f"full{n}", FULL) for n in range(20)] == [True] * 20
    space = store.space()
    assert space.free <= 0.15 * space.total


def test_puts_from_eight_threads_stay_within_capacity() -> None:
    """Five times the capacity, all at once."""
    rig_ = rig(members=2, size_bytes=512 * 1024)
    engine = LaneEngine(rig_.members, EngineOptions(reader_threads=2, native=False))
    store = Store(rig_.store.volume, engine, options=rig_.options)
    total = store.space().total
    outcomes: list[PutResult] = []
    over: list[object] = []

    def client(seed: int) -> None:
        for number in range(5 * total // 4 // 8):
            name = f"{seed}.{number}"
            buffer = zero_buffer(CHUNK)
            buffer.view[:] = chunk(name)
            done = threading.Event()

            def told(results: list[PutResult], done: threading.Event = done) -> None:
                outcomes.extend(results)
                done.set()

            store.put([PutItem(digest_of(name), META, buffer)], told)
            if not done.wait(20):
                over.append(f"{name} never ended")
            space = store.space()
            if space.free + space.used + space.quarantined != total or space.free < 0:
                over.append(space)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert over == []
    reasons = {r.reason for r in outcomes if not r.stored}
    assert sum(r.stored for r in outcomes) >= 0.95 * len(outcomes), reasons
    assert store.close() == 0


def test_lookup_of_ten_thousand_does_no_io() -> None:
    store = rig(members=2)
    put_all(store, ["a", "b"])
    before = [len(m.calls) for m in store.members]
    asked = [digest_of(str(n)) for n in range(9_998)] + [digest_of("a"), digest_of("b")]
    assert store.store.lookup(asked).sum() == 2
    assert [len(m.calls) for m in store.members] == before
    assert isinstance(store.lanes, InlineLanes)
    assert has(store, "a", "b") == [True, True]
