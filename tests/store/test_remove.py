"""Remove and clear: what is hidden at once, and when its space is free."""

from collections.abc import Callable

import pytest

from fx100_lmcache.testing.harness import META, Rig, digest_of
from fx100_lmcache.testing.memory import Fault
from support.store import (
    CHUNK,
    OTHER_META,
    chunk,
    counts,
    expire,
    has,
    inode_writes,
    no_faults,
    put_all,
    rig,
    stall_data_writes,
    start_load,
)

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


def remove(store: Rig) -> None:
    store.store.remove([digest_of("a")], force=True)


def clear(store: Rig) -> None:
    store.store.clear()


def replace(store: Rig) -> None:
    """The put that follows has another layout."""


def find_damaged(store: Rig) -> None:
    """Another read of it ends at once, and what it gets is not what was stored."""
    for member in store.members:
        member.faults = [Fault("flip", "read", times=9)]
    assert store.get("a") is None
    no_faults(store)


@pytest.mark.parametrize("lose", [remove, clear, replace, find_damaged])
def test_a_key_is_stored_again_while_its_old_copy_is_being_read(
    lose: Callable[[Rig], None],
) -> None:
    """The put waits for the old inode, not for those who read the old blocks."""
    store = rig(members=1)
    store.put("a", chunk("a"))
    store.members[0].faults = [Fault("stall", "read", times=2)]
    reads = [start_load(store, "a") for _ in range(2)]
    no_faults(store)
    lose(store)
    meta = OTHER_META if lose is replace else META
    results = store.start_put("a", chunk("a", 1), meta=meta)
    assert [r.stored for r in results] == [True]
    assert store.get("a") == chunk("a", 1)
    space = store.store.space()
    assert (space.used, space.quarantined) == (8, 0)  # the old blocks are nobody else's yet
    store.check_space()
    names = [str(number) for number in range(2 * space.total // 4)]
    put_all(store, names)  # whatever is evicted, nobody gets them
    store.lanes.release()
    for results_of_read, item in reads:
        assert [r.length for r in results_of_read] == [CHUNK]
        assert bytes(item.buffer.view[:CHUNK]) == chunk("a")
    store.check_space()
    assert store.store.space().used == 4 * len(store.store)
    store.reopen()
    assert store.get("a") in (None, chunk("a", 1))


def test_an_old_copy_is_gone_for_good_although_it_is_being_read() -> None:
    """A crash while somebody reads what was removed does not bring it back."""
    store = rig()
    store.put("a", chunk("a"))
    for member in store.members:
        member.faults = [Fault("stall", "read")]
    start_load(store, "a")
    remove(store)
    no_faults(store)
    store.reopen()
    assert has(store, "a") == [False]


def test_the_last_reader_frees_the_blocks_also_if_the_inode_is_erased_after_it() -> None:
    store = rig()
    store.put("a", chunk("a"))
    for member in store.members:
        member.faults = [Fault("stall", "read")]
    results, _ = start_load(store, "a")
    inode_writes(store, "stall")
    remove(store)
    geometry = store.store.volume.geometry
    stalled = [lane for lane in store.lanes._made if lane.stalled]
    reads = [lane for lane in stalled if not lane.stalled[0].job.write]
    no_faults(store)
    for lane in reads:
        lane.release()
    assert [r.length for r in results] == [CHUNK]
    assert store.store.space().used == geometry.blocks_for(CHUNK)
    store.lanes.release()
    assert store.store.space().used == 0
    store.check_space()


def test_a_late_inode_of_a_put_that_timed_out_never_meets_another_one() -> None:
    """A crash between the late write and its erase must not undo a later put or remove."""
    store = rig(store_s=60.0)
    inode_writes(store, "stall")
    late = store.start_put("a", chunk("a"))
    no_faults(store)
    expire(store, 60.0)
    assert late[0].reason == "deadline"
    for index in range(len(store.members)):
        store.engine.probe(index)
    second = store.put("a", chunk("a", 1))
    assert (second.stored, second.reason) == (False, "being_erased")
    store.lanes.release()  # the kernel writes it at last; then it is erased
    assert store.put("a", chunk("a", 2)).stored
    store.check_space()
    store.reopen()
    assert store.get("a") == chunk("a", 2)


def test_an_object_is_leaving_until_the_last_of_its_inodes_is_erased() -> None:
    """Two puts of it failed half way: that one inode is erased says nothing of the other."""
    store = rig(members=2)
    eraser, core = store.store._eraser, store.store._core
    digest = digest_of("a")
    extents = [core.space.allocate(4, 0, 9) for _ in range(2)]
    inode_writes(store, "stall")
    with core.lock:
        for extent in extents:
            assert extent is not None
            core.ledger.reserve(extent.row, extent.blocks)
            eraser.erase_unpublished(extent, digest)
    no_faults(store)
    stalled = [lane for lane in store.lanes._made if lane.stalled]
    assert len(stalled) == 2
    stalled[0].release()
    results = store.start_put("a", chunk("a"))
    assert results == []
    stalled[1].release()
    assert [r.stored for r in results] == [True]
    store.check_space()


def test_inodes_that_could_not_be_erased_are_erased_later_without_any_traffic() -> None:
    """However many: one that works again brings the next one with it."""
    store = rig(members=1, size_bytes=1 << 20)
    names = [str(number) for number in range(40)]
    put_all(store, names)
    store.members[0].gone = True
    store.store.remove([digest_of(name) for name in names])
    assert store.store.space().quarantined == 40 * 4
    expire(store, 1.0)
    assert store.store.space().quarantined == 40 * 4
    store.members[0].gone = False
    store.engine.probe(0)
    expire(store, 1.0)
    assert store.store.space().quarantined == 0
    assert store.store.space().free == store.store.space().total
    store.check_space()


def test_an_inode_that_cannot_be_erased_is_not_tried_for_every_put() -> None:
    """Its sector may be bad, and each try may take seconds: once in a second is enough."""
    store = rig(members=1, size_bytes=1 << 20)
    put_all(store, [str(number) for number in range(30)])
    bad = store.store.volume.geometry.table_offset + 7 * 512
    sector = Fault("error", "write", times=999, first_byte=bad, last_byte=bad)
    store.members[0].faults = [sector]
    store.store.remove([digest_of("7")])
    for number in range(20):
        store.put(f"more{number}", chunk(str(number)))
    assert counts(store)["erase_failures"] == 2
    store.clock.advance(1.1)
    store.put("later", chunk("later"))
    assert counts(store)["erase_failures"] == 3
    no_faults(store)
    store.clock.advance(1.1)
    store.put("at last", chunk("at last"))
    assert store.store.space().quarantined == 0
    store.check_space()


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
