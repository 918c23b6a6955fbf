"""Remove and clear: what is hidden at once, and when its space is free."""

from store_tools import (
    CHUNK,
    chunk,
    has,
    inode_writes,
    no_faults,
    rig,
    stall_data_writes,
    start_load,
)

from fx100_lmcache.testing.harness import digest_of
from fx100_lmcache.testing.memory import Fault

# Remove and clear


def test_remove() -> None:
    store = rig()
    for name in "abc":
        store.put(name, chunk(name))
    removed = store.store.remove([digest_of("a"), digest_of("x"), digest_of("a"), digest_of("c")])
    assert removed == [(digest_of("a"), CHUNK), (digest_of("c"), CHUNK)]
    assert has(store, "a", "b", "c") == [False, True, False]
    store.check_space()
    store.reopen()
    assert has(store, "a", "b", "c") == [False, True, False]


def test_remove_of_pinned_objects() -> None:
    store = rig()
    store.put("a", chunk("a"))
    store.store.lookup([digest_of("a")], pin=True)
    assert store.store.remove([digest_of("a")]) == []
    assert store.store.remove([digest_of("a")], force=True) == [(digest_of("a"), CHUNK)]


def test_removed_while_being_read_is_read_whole_and_freed_after() -> None:
    store = rig()
    store.put("a", chunk("a"))
    free = store.store.space().free
    for member in store.members:
        member.faults = [Fault("stall", "read")]
    results, item = start_load(store, "a")
    assert store.store.remove([digest_of("a")]) == [(digest_of("a"), CHUNK)]
    assert has(store, "a") == [False]
    assert store.store.space().free == free  # still being read
    for number in range(30):  # nobody gets its blocks meanwhile
        store.put(f"n{number}", chunk(f"n{number}"))
    no_faults(store)
    store.lanes.release()
    assert [r.length for r in results] == [CHUNK]
    assert bytes(item.buffer.view[:CHUNK]) == chunk("a")
    store.check_space()
    store.reopen()
    assert has(store, "a") == [False]


def test_an_erase_that_fails_keeps_the_space_until_it_works() -> None:
    store = rig()
    store.put("a", chunk("a"))
    free = store.store.space().free
    inode_writes(store, "error")
    store.store.remove([digest_of("a")])
    no_faults(store)
    assert (store.store.space().free, store.store.space().quarantined) == (free, 4)
    store.check_space()
    store.put("b", chunk("b"))
    store.store.remove([digest_of("b")])  # gives the other one a chance, too
    assert store.store.space().quarantined == 0
    store.reopen()
    assert has(store, "a", "b") == [False, False]


def test_clear() -> None:
    store = rig()
    for number in range(10):
        store.put(str(number), chunk(str(number)))
    store.store.lookup([digest_of("3")], pin=True)
    assert store.store.clear() == 10
    assert (len(store.store), store.store.live_bytes) == (0, 0)
    assert store.store.space().free == store.store.space().total
    store.put("new", chunk("new"))
    store.reopen()
    assert [digest for _, digest, _, _ in store.store.entries()] == [digest_of("new")]
    assert store.store.space().used == 4


def test_clear_while_a_put_is_in_flight() -> None:
    store = rig()
    stall_data_writes(store)
    results = store.start_put("a", chunk("a"))
    no_faults(store)
    assert store.store.clear() == 0
    store.lanes.release()
    assert [(r.stored, r.reason) for r in results] == [(False, "cleared")]
    assert store.store.space().free == store.store.space().total
    store.check_space()
    store.reopen()
    assert len(store.store) == 0


def test_clear_while_an_object_is_read() -> None:
    store = rig()
    for name in "ab":
        store.put(name, chunk(name))
    for member in store.members:
        member.faults = [Fault("stall", "read")]
    results, item = start_load(store, "a")
    store.store.clear()
    store.check_space()
    no_faults(store)
    store.lanes.release()
    assert bytes(item.buffer.view[: results[0].length]) == chunk("a")
    assert store.store.space().free == store.store.space().total
    store.reopen()
    assert len(store.store) == 0


def test_clear_that_cannot_be_written_is_finished_later() -> None:
    """With every member away nothing says that the old inodes are void."""
    store = rig(members=1)
    store.engine._probe = lambda _, member: member
    for name in "abc":
        store.put(name, chunk(name))
    store.members[0].faults.append(Fault("error", "read", times=3))
    assert [store.get(name) for name in "abc"] == [None] * 3
    assert store.engine.down_mask() == 1
    store.store.clear()
    assert len(store.store) == 0
    store.check_space()
    store.engine.probe(0)
    store.put("b", chunk("b"))
    store.store.remove([digest_of("b")])
    store.reopen()
    assert len(store.store) == 0
    assert store.store.space().free == store.store.space().total
