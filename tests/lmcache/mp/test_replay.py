"""After a restart listeners hear of what is there: in order, once, and without ghosts."""

import random
import threading
from typing import Any

import numpy as np
import pytest
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.eviction import L2EvictionPolicy
from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy

from fx100_lmcache.lmcache.mp import replay
from fx100_lmcache.testing.harness import Rig
from support.l2 import Client, Recorder, adapter_on, key, keys, memory_obj, payload

SIZE = 4096
COUNT = 300


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "BATCH", 16)


@pytest.fixture
def rig() -> Rig:
    """A volume that was filled by a process that died."""
    rig = Rig.fresh(2, 4 << 20)
    client = adapter_on(rig)
    put(client, keys(COUNT))
    rig.reopen()
    return rig


def put(client: Client, some: list[ObjectKey]) -> None:
    objects = [memory_obj(payload(one.chunk_hash[0], SIZE)) for one in some]
    for one, obj in zip(some, objects, strict=True):
        assert client.store([one], [obj]).is_successful()


def caught_up(client: Client) -> None:
    done = threading.Event()
    while client.adapter.report_status()["listeners_catching_up"]:
        done.wait(0.01)
    client.settle()


def test_usage_is_there_from_the_start(rig: Rig) -> None:
    put(adapter_on(rig), [key(1, cache_salt="a"), key(2, cache_salt="a")])
    rig.reopen()
    usage = adapter_on(rig).adapter.get_usage()
    assert usage.total_bytes_used == (COUNT + 2) * SIZE == rig.store.live_bytes
    assert dict(usage.bytes_by_cache_salt) == {"": COUNT * SIZE, "a": 2 * SIZE}


def test_every_listener_hears_of_every_entry_once(rig: Rig) -> None:
    client = adapter_on(rig)
    listeners = [Recorder(), Recorder()]
    for listener in listeners:
        client.adapter.register_listener(listener)
    caught_up(client)
    for listener in listeners:
        assert sorted(listener.told("stored"), key=str) == sorted(keys(COUNT), key=str)
        assert set(listener.present.values()) == {SIZE}
    assert client.usage() == COUNT * SIZE, "nothing is counted twice"


def test_a_policy_gets_the_order_of_writing(rig: Rig) -> None:
    policy = LRUEvictionPolicy()
    client = adapter_on(rig)
    client.adapter.register_listener(L2EvictionPolicy(policy))
    caught_up(client)
    assert list(policy._order) == keys(COUNT)


class SlowPolicy(L2EvictionPolicy):
    """Stops in the middle of the replay until told to go on."""

    def __init__(self, policy: LRUEvictionPolicy, after: int) -> None:
        super().__init__(policy)
        self._left = after
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            self.go_on.wait(30)
        super().on_l2_keys_stored(keys, sizes)


def in_the_middle(rig: Rig) -> tuple[LRUEvictionPolicy, Client, SlowPolicy]:
    """Begin a replay, and stop in the middle of it."""
    policy = LRUEvictionPolicy()
    client = adapter_on(rig)
    listener = SlowPolicy(policy, after=3)
    client.adapter.register_listener(listener)
    assert listener.reached.wait(30)
    return policy, client, listener


def test_what_is_used_meanwhile_is_newest(rig: Rig) -> None:
    policy, client, listener = in_the_middle(rig)
    new = keys(2, 1000)
    client.adapter.submit_store_task(new, [memory_obj(payload(1, SIZE)) for _ in new])
    client.adapter.submit_load_task([key(5)], [memory_obj(SIZE)])
    listener.go_on.set()
    caught_up(client)
    assert list(policy._order)[-3:] == [key(1001), key(1000), key(5)]
    assert len(policy._order) == COUNT + 2


def test_a_key_deleted_before_its_replay_leaves_no_ghost(rig: Rig) -> None:
    policy, client, listener = in_the_middle(rig)
    gone = [key(0), key(40), key(41), key(200), key(COUNT - 1)]  # told, being told, to be told
    deleter = threading.Thread(target=client.adapter.delete, args=(gone,))
    deleter.start()
    while len(rig.store) != COUNT - len(gone):
        pass
    listener.go_on.set()
    deleter.join(30)
    caught_up(client)
    assert set(policy._order) == set(keys(COUNT)) - set(gone)
    assert client.usage() == rig.store.live_bytes


def test_evictions_during_the_replay_leave_no_ghosts(rig: Rig) -> None:
    policy = LRUEvictionPolicy()
    client = adapter_on(rig)
    listener = SlowPolicy(policy, after=2)
    client.adapter.register_listener(listener)
    listener.reached.wait(30)
    capacity = rig.store.capacity_bytes // SIZE
    tasks = [
        client.adapter.submit_store_task([one], [memory_obj(payload(1, SIZE))])
        for one in keys(capacity, 10_000)
    ]
    assert rig.store.counts()["evictions"] > COUNT // 2
    listener.go_on.set()
    for task in tasks:
        client.wait_store(task)
    caught_up(client)
    assert set(policy._order) == {e.key.to_object_key() for e in listed(client)}
    assert client.usage() == rig.store.live_bytes


def listed(client: Client) -> list[Any]:
    entries, cursor = [], None
    while True:
        page = client.adapter.list_l2_keys(cursor=cursor)
        entries += page.entries
        cursor = page.next_page_token
        if cursor is None:
            return entries


@pytest.mark.parametrize("seed", range(4))
def test_listeners_agree_with_the_store_after_any_mix(rig: Rig, seed: int) -> None:
    client = adapter_on(rig)
    early, late = Recorder(), Recorder()
    client.adapter.register_listener(early)

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(300):
            one = key(dice.randrange(2 * COUNT))
            if dice.random() < 0.6:
                client.adapter.submit_store_task([one], [memory_obj(payload(1, SIZE))])
            else:
                client.adapter.delete([one])

    workers = [threading.Thread(target=work, args=(seed * 10 + n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    client.adapter.register_listener(late)
    for worker in workers:
        worker.join(60)
    caught_up(client)
    there = {e.key.to_object_key(): e.size_bytes for e in listed(client)}
    assert early.present == there
    assert late.present == there
    assert client.usage() == rig.store.live_bytes == sum(there.values())


def test_service_does_not_wait_for_the_replay(rig: Rig) -> None:
    class Busy(Recorder):
        """While it is told the first batch, somebody loads."""

        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            if not self.heard:
                client.adapter.submit_load_task([key(COUNT - 1)], [memory_obj(SIZE)])
            super().on_l2_keys_stored(keys, sizes)

    client, listener = adapter_on(rig), Busy()
    client.adapter.register_listener(listener)
    caught_up(client)
    assert [what for what, _ in listener.heard[:3]] == ["stored", "accessed", "stored"]


def test_a_listener_that_fails_costs_others_nothing_and_is_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Recorder):
        def on_l2_keys_stored(self, keys: object, sizes: object) -> None:
            raise RuntimeError("not my day")

    client, good = adapter_on(rig), Recorder()
    client.adapter.register_listener(Bad())
    client.adapter.register_listener(good)
    caught_up(client)
    assert set(good.present) == set(keys(COUNT))
    assert caplog.text.count("not my day") == 2  # one traceback
    assert client.adapter.report_status()["adapter_counts"]["listener_errors"] == -(-COUNT // 16)


def test_nobody_waits_while_what_is_there_is_sorted_for_a_listener(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, listener = adapter_on(rig), Recorder()
    sort, free = np.argsort, []

    def sorted_rows(*args: Any, **kwargs: Any) -> Any:
        def look() -> None:
            for lock in (rig.store._core.lock._lock, client.adapter._replays._lock):
                free.append(lock.acquire(timeout=5))
                if free[-1]:
                    lock.release()

        other = threading.Thread(target=look)
        other.start()
        other.join()
        return sort(*args, **kwargs)

    monkeypatch.setattr(np, "argsort", sorted_rows)
    client.adapter.register_listener(listener)
    monkeypatch.undo()
    caught_up(client)
    assert free == [True, True]
    assert set(listener.present) == set(keys(COUNT))
