"""Whatever raises, and whenever: every task gets its result, once, and nothing leaves the adapter.

One call after the other of everything that the adapter calls is made to fail.
"""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmcache.lmcache_native import Bitmap

from fx100_lmcache.config import DeadlineConfig
from fx100_lmcache.lmcache import events, l2_adapter
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.mp import replay, results, stuck, tasks
from fx100_lmcache.lmcache.mp.keys import KeyNamer
from fx100_lmcache.store import Store, StoreOptions
from fx100_lmcache.testing.harness import Rig
from support.injected import InjectedError, Injection, each_call
from support.l2 import (
    Client,
    Recorder,
    adapter_on,
    bytes_of,
    gated_members,
    key,
    keys,
    memory_obj,
    payload,
    threaded_adapter,
)
from support.releases import places

SIZE = 4096
BEFORE = 10
OPTIONS = StoreOptions(store_s=0.1)

Into = Callable[[Injection, pytest.MonkeyPatch], None]


def into(owner: Any, *names: str) -> Into:
    return lambda injection, patch: injection.into(patch, owner, *names)


def into_listeners(injection: Injection, patch: pytest.MonkeyPatch) -> None:
    names = ("on_l2_keys_stored", "on_l2_keys_accessed", "on_l2_keys_deleted")
    injection.into(patch, Fragile, *names)


def into_bus(injection: Injection, patch: pytest.MonkeyPatch) -> None:
    class Bus:
        publish = staticmethod(injection.around(lambda _event: None))

    patch.setattr("lmcache.v1.distributed.l2_adapters.base.get_event_bus", Bus)


def into_notifiers(injection: Injection, patch: pytest.MonkeyPatch) -> None:
    create = results.create_event_notifier  # type: ignore[attr-defined]

    def created() -> Any:
        notifier = create()
        notifier.notify = injection.around(notifier.notify)
        return notifier

    patch.setattr(results, "create_event_notifier", created)


def into_bitmaps(injection: Injection, patch: pytest.MonkeyPatch) -> None:
    class Flaky(Bitmap):
        set = injection.around(Bitmap.set)
        batched_set = injection.around(Bitmap.batched_set)

    patch.setattr(l2_adapter, "Bitmap", injection.around(Flaky))


class Fragile(Recorder):
    """A listener that an injection may make fail."""


# name -> (how an exception gets there, whether that is a defect; None if not always)
PLACES: dict[str, tuple[Into, bool | None]] = {
    "listeners": (into_listeners, True),
    "event bus": (into_bus, True),
    "notifiers": (into_notifiers, True),
    "bitmaps": (into_bitmaps, True),
    "counters": (into(Counts, "add"), None),
    "key translator": (into(KeyNamer, "digests", "scope_of"), None),
    "puts": (into(Store, "put"), True),
    "loads": (into(Store, "load"), True),
    "lookups": (into(Store, "lookup"), True),
    "unpins": (into(Store, "unpin"), True),
    "removals": (into(Store, "remove"), True),
    "replays": (into(replay._Replay, "note_used", "announce_batch"), True),
    "watch": (into(stuck.StuckWatch, "begin"), True),
    "put buffers": (into(l2_adapter, "io_buffer", "layout_of", "packed_meta"), False),
    "load buffers": (into(tasks, "io_buffer", "layout_of"), False),
    "layouts": (into(l2_adapter, "accepts"), True),
}


class Traffic:
    """Stores, looks up, loads, unlocks, deletes and lists, and keeps account of the results."""

    def __init__(self, rig: Rig) -> None:
        self.client = adapter_on(rig)
        self.adapter = self.client.adapter
        self.stores: list[int] = []
        self.lookups: dict[int, int] = {}
        self.loads: dict[int, tuple[list[int], list[Any]]] = {}

    def run(self, listeners: list[Recorder]) -> None:
        """Call the adapter; nothing may come out of it but numbers of tasks."""
        adapter = self.adapter
        adapter.register_listener(listeners[0])
        self._store(range(3))
        self._lookup(range(5))
        adapter.register_listener(listeners[1])  # in the middle of everything
        self._load([0, 5, 6, 1])
        self._store([2, 100])
        self._lookup([0, 1, 9])
        self._load(range(BEFORE))
        adapter.submit_unlock(keys(5))
        adapter.submit_unlock([key(0), key(1), key(9)])
        adapter.delete([key(7), key(8)])
        self._load([7, 9])
        assert adapter.list_l2_keys().next_page_token is None

    def _store(self, numbers: Any) -> None:
        objects = [memory_obj(payload(n, SIZE)) for n in numbers]
        self.stores.append(self.adapter.submit_store_task([key(n) for n in numbers], objects))

    def _lookup(self, numbers: Any) -> None:
        asked = [key(n) for n in numbers]
        self.lookups[self.adapter.submit_lookup_and_lock_task(asked, {})] = len(asked)

    def _load(self, numbers: Any) -> None:
        objects = [memory_obj(SIZE) for _ in numbers]
        task = self.adapter.submit_load_task([key(n) for n in numbers], objects)
        self.loads[task] = (list(numbers), objects)

    def collect(self) -> None:
        """Get every result, each once, and check it."""
        for task in self.stores:
            self.client.wait_store(task)
        for task, count in self.lookups.items():
            bitmap = self.adapter.query_lookup_and_lock_result(task)
            assert bitmap is not None
            assert places(bitmap) == count
        for task, (numbers, objects) in self.loads.items():
            loaded = self.client.wait_load(task, len(numbers))
            for number, obj, good in zip(numbers, objects, loaded, strict=True):
                assert not good or bytes_of(obj) == payload(number, SIZE)
        self.client.settle()
        self._nothing_is_left()

    def _nothing_is_left(self) -> None:
        adapter = self.adapter
        assert adapter.pop_completed_store_tasks() == {}
        assert self.client.results == {}
        for task in itertools.chain(self.stores, self.lookups, self.loads):
            assert adapter.query_lookup_and_lock_result(task) is None
            assert adapter.query_load_result(task) is None
        assert adapter.report_status()["loads_in_flight"] == 0


def filled() -> Rig:
    """A store that another process has filled."""
    rig = Rig.fresh(2, 1 << 20, options=OPTIONS)
    client = adapter_on(rig)
    client.store(keys(BEFORE), [memory_obj(payload(n, SIZE)) for n in range(BEFORE)])
    client.adapter.close()
    rig.reopen()
    return rig


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_adapter, "AFTER_S", 0.01)
    monkeypatch.setattr(replay, "BATCH", 4)


@pytest.mark.parametrize("place", PLACES)
def test_every_task_is_answered_once_whichever_call_fails(place: str) -> None:
    reach, counted = PLACES[place]

    def run(injection: Injection) -> None:
        rig = filled()
        listeners = [Fragile(), Recorder()]
        with pytest.MonkeyPatch.context() as patch:
            reach(injection, patch)
            traffic = Traffic(rig)
            traffic.run(listeners)
            traffic.collect()
            while traffic.adapter.report_status()["listeners_catching_up"]:
                time.sleep(0.001)
            status = traffic.adapter.report_status()
        failed = 0 < injection.fail_at <= injection.calls
        defects = [text for text in status["problems"] if "defects since the start" in text]
        assert bool(defects) == (failed and counted) or counted is None
        assert traffic.adapter.get_usage().total_bytes_used == rig.store.live_bytes
        no_reader_and_no_pin_is_left(rig)
        traffic.adapter.close()

    assert each_call(run) > 0


@pytest.mark.parametrize("place", ["puts", "loads", "lookups", "unpins", "removals"])
def test_every_task_is_answered_once_when_a_call_fails_after_its_work(place: str) -> None:
    reach, _ = PLACES[place]

    def run(injection: Injection) -> None:
        rig = filled()
        with pytest.MonkeyPatch.context() as patch:
            reach(injection, patch)
            traffic = Traffic(rig)
            traffic.run([Recorder(), Recorder()])
            traffic.collect()
        rig.clock.advance(OPTIONS.pin_ttl_s + 2)
        no_reader_and_no_pin_is_left(rig)
        traffic.adapter.close()

    assert each_call(run, after=True) > 0


def no_reader_and_no_pin_is_left(rig: Rig) -> None:
    catalog, now = rig.store._core.catalog, rig.store._core.engine.now()
    rows = catalog.live_rows()
    assert not [row for row in rows if catalog.being_read(row) or catalog.pinned(row, now)]


def test_other_listeners_hear_of_everything_when_one_fails_always() -> None:
    class Bad(Recorder):
        def fail(self, *_: object) -> None:
            raise InjectedError

        on_l2_keys_stored = on_l2_keys_accessed = on_l2_keys_deleted = fail  # type: ignore[assignment]

    rig = filled()
    client = adapter_on(rig)
    good = [Recorder(), Recorder()]
    for listener in (good[0], Bad(), good[1]):
        client.adapter.register_listener(listener)
    client.store(keys(30, 100), [memory_obj(payload(n, SIZE)) for n in range(100, 130)])
    assert client.load([key(3)], [memory_obj(SIZE)]) == [True]
    client.adapter.delete([key(4)])
    while client.adapter.report_status()["listeners_catching_up"]:
        time.sleep(0.001)
    client.settle()
    for listener in good:
        assert set(listener.present) == set(keys(BEFORE) + keys(30, 100)) - {key(4)}
        assert key(3) in listener.told("accessed")
    assert "listener_errors" in " ".join(client.adapter.report_status()["problems"])


def test_a_listener_may_register_while_keys_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = filled()
    client, late = adapter_on(rig), Recorder()
    note_used = replay._Replay.note_used
    registered: list[bool] = []

    def note_and_register(self: Any, some: Any) -> None:
        if not registered:
            registered.append(True)
            client.adapter.register_listener(late)
        note_used(self, some)

    monkeypatch.setattr(replay._Replay, "note_used", note_and_register)
    monkeypatch.setattr(events, "IDLE_PAUSE_S", 0.1)  # the first replay is still open
    client.adapter.register_listener(Recorder())
    objects = [memory_obj(payload(n, SIZE)) for n in range(100, 104)]
    assert client.store(keys(4, 100), objects).is_successful()
    assert client.load([key(1)], [memory_obj(SIZE)]) == [True]
    assert registered
    while client.adapter.report_status()["listeners_catching_up"]:
        time.sleep(0.01)
    client.settle()
    assert set(late.present) == set(keys(BEFORE) + keys(4, 100))
    assert client.adapter.report_status()["is_healthy"]


# ----- buffers of LMCache's


def test_a_load_of_which_a_part_is_out_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 120
    members = gated_members(2, 8 << 20)
    client = threaded_adapter(members, DeadlineConfig(), readers=4)
    client.store(keys(count), [memory_obj(payload(n, SIZE)) for n in range(count)])
    for member in members:
        member.gate.clear()
    batches = itertools.count(1)
    engine = client.adapter._mounted.engine
    read = engine.read

    def read_but_not_the_second(several: Any) -> None:
        for batch in several:
            if next(batches) == 2:
                raise MemoryError
            read([batch])

    monkeypatch.setattr(engine, "read", read_but_not_the_second)
    objects = [memory_obj(b"\xff" * SIZE) for _ in range(count)]
    task = client.adapter.submit_load_task(keys(count), objects)
    while not any(member.held for member in members):
        time.sleep(0.001)
    client.settle()
    assert client.adapter.query_load_result(task) is None, "the kernel may write to its buffers"
    assert client.adapter.report_status()["loads_in_flight"] == 1
    for member in members:
        member.gate.set()
    loaded = client.wait_load(task, count)
    reported = [bytes_of(obj) for obj in objects]
    assert 0 < sum(loaded) < count
    for number in range(count):
        assert reported[number] == (payload(number, SIZE) if loaded[number] else b"\xff" * SIZE)
    client.adapter.close()
    assert [bytes_of(obj) for obj in objects] == reported, "nothing came late"


def test_a_put_that_failed_half_way_keeps_its_buffer_until_it_is_surely_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = gated_members(1, 4 << 20)
    client = threaded_adapter(members, DeadlineConfig(store_s=0.5))
    put = client.adapter._store.put

    def put_and_fail(*args: Any) -> None:
        put(*args)
        raise InjectedError

    monkeypatch.setattr(client.adapter._store, "put", put_and_fail)
    members[0].gate.clear()
    task = client.adapter.submit_store_task(keys(1), [memory_obj(payload(0, SIZE))])
    client.settle()
    assert client.adapter.pop_completed_store_tasks() == {}, "its bytes are not hashed yet"
    members[0].gate.set()
    assert client.wait_store(task).is_successful(), "it was on its way"
    client.adapter.close()


def test_a_put_that_never_began_is_reported_after_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = adapter_on(filled())
    real = Injection(2).around(client.adapter._store.put)
    monkeypatch.setattr(client.adapter._store, "put", real)
    task = client.adapter.submit_store_task(keys(3, 500), [memory_obj(SIZE) for _ in range(3)])
    assert not client.wait_store(task).is_successful()
    assert [client.has(one) for one in keys(3, 500)] == [True, False, True]


def test_without_its_thread_results_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    client = adapter_on(filled())

    def die() -> None:
        raise InjectedError

    died = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: died.set())
    monkeypatch.setattr(client.adapter._events, "_take", die)
    client.adapter._events.wake()  # it takes what is there once more, and then dies
    assert died.wait(30)
    client.adapter._events._thread.join(30)
    assert client.store([key(50)], [memory_obj(payload(50, SIZE))]).is_successful()
    assert client.load([key(50)], [memory_obj(SIZE)]) == [True]
    assert "event thread has died" in " ".join(client.adapter.report_status()["problems"])


# ----- the constructor


def test_a_constructor_that_fails_anywhere_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig.fresh(2, 512 * 1024)

    def run(injection: Injection) -> None:
        before = (set(running()), descriptors())
        rig.reopen()
        with monkeypatch.context() as patch:
            injection.into(patch, l2_adapter, "Results", "EventThread", "StuckWatch", "Replays")
            injection.into(patch, events.EventThread, "start")
            injection.into(patch, stuck.StuckWatch, "start")
            if injection.fail_at:
                with pytest.raises(InjectedError):
                    adapter_on(rig)
            else:
                adapter_on(rig).adapter.close()
        until = time.monotonic() + 10
        while set(running()) - before[0] and time.monotonic() < until:
            time.sleep(0.01)
        assert set(running()) <= before[0]
        assert descriptors() == before[1]

    assert each_call(run) == 8


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fx100")]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_close_takes_every_step_whichever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(injection: Injection) -> None:
        client: Client = adapter_on(Rig.fresh(2, 512 * 1024))
        adapter = client.adapter
        for owner in (adapter._watch, adapter._events, adapter._stores, adapter._loads):
            injection.into(monkeypatch, owner, "close")
        adapter.close()
        for results_ in (adapter._stores, adapter._lookups, adapter._loads):
            failed = results_._open
            assert failed <= (injection.fail_at > 0)
        assert adapter._store.closing
        monkeypatch.undo()
        client.stop()

    assert each_call(run) == 4
