"""Locks: counted, ended by a TTL, and kept apart from reads in flight."""

from fx100_lmcache.store import StoreOptions
from fx100_lmcache.testing.harness import Rig
from fx100_lmcache.testing.memory import Fault
from support.l2 import Client, adapter_on, bytes_of, key, keys, memory_obj, payload

SIZE = 4096


def small_client(**options: float) -> tuple[Rig, Client]:
    rig = Rig.fresh(2, 1024 * 1024, options=StoreOptions(**options))  # type: ignore[arg-type]
    return rig, adapter_on(rig)


def put(client: Client, numbers: range) -> None:
    objects = [memory_obj(payload(n, SIZE)) for n in numbers]
    assert client.store([key(n) for n in numbers], objects).is_successful()


def deletable(client: Client, number: int) -> bool:
    client.adapter.delete([key(number)])
    listed = client.adapter.list_l2_keys().entries  # a lookup would renew the locks
    return key(number) not in [entry.key.to_object_key() for entry in listed]


def test_one_unlock_for_each_lookup() -> None:
    _, client = small_client()
    put(client, range(1))
    assert client.lookup(keys(1) * 3) == [True] * 3
    for _ in range(2):
        client.adapter.submit_unlock(keys(1))
        assert not deletable(client, 0)
    client.adapter.submit_unlock(keys(1))
    assert deletable(client, 0)


def test_a_miss_takes_no_lock_and_an_unlock_too_many_is_only_counted() -> None:
    rig, client = small_client()
    put(client, range(1))
    client.adapter.submit_unlock(keys(2))
    assert rig.store.counts()["unpins_of_nothing"] == 2
    assert client.lookup(keys(2)) == [True, False]
    assert not deletable(client, 0)


def test_a_lock_that_nobody_gives_back_ends() -> None:
    rig, client = small_client(pin_ttl_s=300)
    put(client, range(1))
    client.lookup(keys(1))
    rig.clock.advance(299)
    assert not deletable(client, 0)
    rig.clock.advance(3)
    assert deletable(client, 0)


def test_a_read_in_flight_is_no_lock_and_a_lock_no_read() -> None:
    rig, client = small_client()
    put(client, range(1))
    rig.members[0].faults.append(Fault("stall", "read"))
    rig.members[1].faults.append(Fault("stall", "read"))
    obj = memory_obj(SIZE)
    task = client.adapter.submit_load_task(keys(1), [obj])
    assert rig.lanes.stalled
    free = rig.store.space().free
    client.adapter.delete(keys(1))
    assert not client.has(key(0)), "not locked, so it goes at once"
    assert rig.store.space().free == free, "but its space stays until the reader is done"
    rig.lanes.release()
    assert client.wait_load(task, 1) == [True]
    assert bytes_of(obj) == payload(0, SIZE)
    assert rig.store.space().free > free


def test_what_a_lookup_found_is_loadable_until_unlocked() -> None:
    rig, client = small_client()
    put(client, range(118))
    assert all(client.lookup(keys(118)))
    capacity = rig.store.capacity_bytes // SIZE
    for start in range(1000, 1000 + 10 * capacity, 50):
        put(client, range(start, start + 50))
    assert rig.store.counts()["evictions"] > 5 * capacity
    objects = [memory_obj(SIZE) for _ in range(118)]
    assert all(client.load(keys(118), objects))
    assert [bytes_of(obj) for obj in objects] == [payload(n, SIZE) for n in range(118)]
    client.adapter.submit_unlock(keys(118))
    for start in range(10**6, 10**6 + 3 * capacity, 50):
        put(client, range(start, start + 50))
    assert not any(client.lookup(keys(118)))
