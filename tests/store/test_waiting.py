"""Puts that wait: in line, each until its own deadline, at a cost that grows with their number."""

import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.space.space import Space
from fx100_lmcache.store import PutItem, PutResult, Store
from fx100_lmcache.store.erase import Eraser
from fx100_lmcache.testing.harness import META, Rig, digest_of
from fx100_lmcache.testing.memory import Fault
from support.store import (
    CHUNK,
    chunk,
    counts,
    expire,
    inode_writes,
    no_faults,
    options,
    put_all,
    rig,
)

Patch = pytest.MonkeyPatch


def start_put(store: Rig, name: str, deadline_s: float, length: int = CHUNK) -> list[PutResult]:
    buffer = zero_buffer(-(-length // 4096) * 4096)
    buffer.view[:length] = chunk(name, length=length)
    buffer.length = length
    results: list[PutResult] = []
    store.store.put([PutItem(digest_of(name), META, buffer)], results.extend, deadline_s)
    return results


def full(**how: Any) -> Rig:
    """Make a store with no space left, whose next erases the kernel keeps."""
    store = rig(members=2, **{"reserve_fraction": 0.0} | how)
    put_all(store, [f"old{n}" for n in range(store.store.space().total // 4)])
    assert store.store.space().free < 4
    inode_writes(store, "stall", times=10_000)
    return store


def wait_for_space(store: Rig) -> list[PutResult]:
    return start_put(store, "new", 5.0)


def wait_for_an_older_copy(store: Rig) -> list[PutResult]:
    store.store.remove([digest_of("old1")])
    return start_put(store, "old1", 5.0)


def wait_for_a_look_at_the_claim(store: Rig) -> list[PutResult]:
    for member in store.members:
        member.faults.append(Fault("stall", "read"))
    store.store._core.options = options(claim_check_s=-1.0)
    return start_put(store, "new", 5.0)


@pytest.mark.parametrize(
    ("wait", "reason"),
    [
        (wait_for_space, "full"),
        (wait_for_an_older_copy, "being_erased"),
        (wait_for_a_look_at_the_claim, "deadline"),
    ],
)
def test_a_put_that_waits_is_answered_at_its_own_deadline(
    wait: Callable[[Rig], list[PutResult]], reason: str
) -> None:
    """Whatever it waits for has a later one, and nothing else happens."""
    store = full()
    results = wait(store)
    expire(store, 4.9)
    assert results == []
    expire(store, 0.1)
    assert [(r.stored, r.reason) for r in results] == [(False, reason)]
    assert counts(store)[f"put_drop_{reason}"] == 1
    no_faults(store)
    store.lanes.release()
    assert len(results) == 1, "answered again"
    assert store.put("new", chunk("new", 1)).stored
    assert store.get("new") == chunk("new", 1)
    store.check_space()


def test_deadlines_in_any_order_are_kept() -> None:
    store = full()
    waits = (9.0, 3.0, 6.0, 3.0, 12.0)
    results = [start_put(store, f"new{n}", wait_s) for n, wait_s in enumerate(waits)]
    for now_s in range(1, 14):
        expire(store, 1.0)
        assert [len(r) for r in results] == [int(wait_s <= now_s) for wait_s in waits]


def test_a_put_behind_one_that_gave_up_goes_on() -> None:
    """The first one needs more than may be evicted; the second one needs what was."""
    store = full()
    old = [digest for _, digest, _, _ in store.store.entries()]
    store.store.lookup(old[2:], pin=True)
    big = start_put(store, "big", 60.0, 8 * CHUNK)
    small = start_put(store, "small", 60.0)
    assert (big, small) == ([], [])
    no_faults(store)
    store.lanes.release()
    assert [(r.stored, r.reason) for r in big] == [(False, "full")]
    assert [r.stored for r in small] == [True]
    store.check_space()


def test_large_objects_are_not_overtaken_for_ever() -> None:
    """Space goes to those who wait in the order in which they came."""
    store = full()
    names = ["large", *(f"small{n}" for n in range(4))]
    answered: list[str] = []
    for name in names:
        buffer = zero_buffer(6 * CHUNK if name == "large" else CHUNK)
        item = PutItem(digest_of(name), META, buffer)
        store.store.put([item], lambda _, name=name: answered.append(name))  # type: ignore[misc]
    no_faults(store)
    store.lanes.release()
    assert answered == names


def test_only_so_many_puts_wait() -> None:
    store = full(max_waiting_puts=3)
    results = [start_put(store, f"new{n}", 60.0) for n in range(5)]
    assert [[r.reason for r in one] for one in results] == [[]] * 3 + [["backlog"]] * 2
    assert counts(store)["put_drop_backlog"] == 2
    no_faults(store)
    store.lanes.release()
    assert [r.stored for one in results[:3] for r in one] == [True] * 3


def test_close_answers_those_who_wait() -> None:
    store = full()
    store.store.remove([digest_of("old1")])
    waiting = [start_put(store, "new", 60.0), start_put(store, "old1", 60.0)]
    store.store.close(0.1)
    assert [[r.reason for r in one] for one in waiting] == [["closing"]] * 2


def test_an_engine_that_closes_first_leaves_nobody_waiting() -> None:
    """Deadlines are the engine's: without it, those who wait are answered now."""
    store = full()
    waiting = [start_put(store, f"new{n}", 60.0) for n in range(3)]
    store.engine.close(0.0)
    assert [[r.stored for r in one] for one in waiting] == [[False]] * 3


def burst(patch: Patch, puts: int) -> dict[str, int]:
    """Put many objects at once into a full store whose erases end one by one."""
    done = {"allocations": 0, "erases": 0, "longest": 0}
    allocate, erase, held = Space.allocate, Eraser.drop, [0]

    def counted(self: Space, *request: int) -> object:
        done["allocations"] += 1
        held[0] += 1
        done["longest"] = max(done["longest"], held[0])
        return allocate(self, *request)

    def dropped(self: Eraser, row: int) -> object:
        done["erases"] += 1
        held[0] += 1
        done["longest"] = max(done["longest"], held[0])
        return erase(self, row)

    store = Rig.fresh(1, (puts * 5 // 4) * CHUNK + (1 << 20), options=options(reserve_fraction=0.0))
    put_all(store, [f"old{n}" for n in range(store.store.space().total // 4)])
    inode_writes(store, "stall", times=1 << 30)
    patch.setattr(Space, "allocate", counted)
    patch.setattr(Eraser, "drop", dropped)
    lock = type(store.store._core.lock)
    if hasattr(lock, "put_off"):  # count what is done between taking the lock and leaving it
        leave = lock.__exit__

        def left(self: object, *why: object) -> None:
            if self._depth == 1:  # type: ignore[attr-defined]
                held[0] = 0
            leave(self, *why)  # type: ignore[arg-type]

        patch.setattr(lock, "__exit__", left)
    results = [store.start_put(f"new{n}", chunk(str(n))) for n in range(puts)]
    no_faults(store)
    store.lanes.release()
    assert [r.stored for one in results for r in one] == [True] * puts
    store.check_space()
    patch.undo()
    return done


def test_a_burst_into_a_full_store_costs_what_its_puts_cost(monkeypatch: Patch) -> None:
    """Each put is looked at a few times, however many wait; lookups go in between."""
    few, many = burst(monkeypatch, 100), burst(monkeypatch, 400)
    assert many["allocations"] <= 4 * 400
    assert many["allocations"] <= 4.5 * few["allocations"]
    assert many["erases"] <= 1.2 * 400
    assert many["longest"] <= 2 * 64 + 16


# What raises half way


def raising(times: int) -> Callable[..., object]:
    left = [times]

    def maybe(call: Callable[..., object]) -> Callable[..., object]:
        def instead(*what: object, **how: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise MemoryError
            return call(*what, **how)

        return instead

    return maybe


PLACES = [
    "fx100_lmcache.space.space.Space.allocate",
    "fx100_lmcache.space.ledger.BlockLedger.reserve",
    "fx100_lmcache.space.ledger.BlockLedger.retire",
    "fx100_lmcache.store.erase.Transfer",
    "fx100_lmcache.store.erase.Job",
    "fx100_lmcache.store.evict.Evictor.keep_reserve",
    "fx100_lmcache.store.evict.Evictor.make_room",
    "fx100_lmcache.store.evict.Evictor.make_up",
    "fx100_lmcache.store.put.Putter._data_job",
    "fx100_lmcache.store.put.Putter._answer_at_once",
    "fx100_lmcache.store.put.pack_inode",
    "fx100_lmcache.store.put.Transfer",
    "fx100_lmcache.store.put.Job",
    "fx100_lmcache.buffers.BufferPool.take",
    "fx100_lmcache.catalog.catalog.Catalog.add",
    "fx100_lmcache.catalog.catalog.Catalog.victims",
    "fx100_lmcache.catalog.catalog.Catalog.intern_meta",
    "fx100_lmcache.catalog.index.DigestIndex.insert",
    "fx100_lmcache.burst_log.BurstLog.note",
    "fx100_lmcache.engine.engine.LaneEngine.submit",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_whatever_raises_every_put_is_answered_and_no_space_is_lost(
    place: str, at: int, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    store = rig(members=2, size_bytes=160 * 1024)
    total = store.store.space().total
    put_all(store, [f"old{n}" for n in range(total // 4)])
    if place.endswith("note"):
        store.members[0].faults = [Fault("error", "write", after=3, times=2)]
    owner, name = place.rsplit(".", 1)
    target = importlib.import_module(owner) if owner.islower() else _class(owner)
    maybe = raising(at)
    monkeypatch.setattr(target, name, maybe(getattr(target, name)))
    with caplog.at_level("CRITICAL", "fx100_lmcache"):
        results = [store.start_put(f"new{n}", chunk(f"new{n}")) for n in range(8)]
    monkeypatch.undo()
    no_faults(store)
    assert [len(one) for one in results] == [1] * 8
    assert {r.reason for one in results for r in one} <= {"", "internal", "error", "full"}
    assert sum(r.stored for one in results for r in one) >= 5
    store.check_space()
    for number, (result,) in enumerate(results):
        found = store.get(f"new{number}")
        assert found == chunk(f"new{number}") if result.stored else found is None
        store.clock.advance(1.5)  # what could not be erased is tried again
        assert store.put(f"new{number}", chunk(f"new{number}")).stored
    store.store.remove([digest for _, digest, _, _ in store.store.entries()])
    assert store.store.space().free == total
    store.check_space()


def _class(path: str) -> object:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_a_caller_that_raises_costs_the_others_nothing() -> None:
    store = rig()

    def raises(_: object) -> None:
        raise ValueError("a caller's own fault")

    buffer = zero_buffer(CHUNK)
    store.store.on_evicted(raises)
    store.store.put([PutItem(digest_of("a"), META, buffer)], raises)
    assert store.put("b", chunk("b")).stored
    assert store.get("a") == bytes(CHUNK)
    assert counts(store)["internal_errors"] == 1
    for number in range(60):
        assert store.put(str(number), chunk(str(number))).stored
    store.check_space()


def test_a_waiting_put_is_answered_by_the_engine_s_own_thread() -> None:
    """With threads, too, nothing else has to happen for it."""
    quiet = rig(members=1)
    engine = LaneEngine(quiet.members, EngineOptions(native=False))
    store = Store(quiet.store.volume, engine, options=quiet.options)
    room = store._putter._room
    buffer, answered = zero_buffer(CHUNK), threading.Event()
    results: list[PutResult] = []

    def told(answer: list[PutResult]) -> None:
        results.extend(answer)
        answered.set()

    with store._core.lock:  # what was handed over is not begun before the put waits for it
        store._core.space.allocate = lambda *_: None
        store._core.ledger.erases_begun += 1
        store.put([PutItem(digest_of("a"), META, buffer)], told, 0.2)
        assert room.puts == 1
    assert answered.wait(30)
    assert [r.reason for r in results] == ["full"]
    assert store.close() == 0
