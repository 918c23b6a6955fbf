"""Members whose storage below has no room: what was stored stays, and its space is used again."""

import errno
import itertools
import random

import pytest

from fx100_lmcache.store import PutResult
from fx100_lmcache.store.backing import FIRST_PAUSE_S, LONGEST_PAUSE_S
from fx100_lmcache.testing.harness import Rig, digest_of
from fx100_lmcache.testing.memory import THIN_UNIT_BYTES, Fault, MemoryMember
from support.store import (
    CHUNK,
    chunk,
    counts,
    data_from,
    has,
    inode_writes,
    no_faults,
    options,
    put_all,
    rig,
)

MIB = 1 << 20
PLENTY = 1 << 40


def thin(store: Rig, room_bytes: int) -> None:
    """Leave every member so much space below for what was never written."""
    for member in store.members:
        member.make_thin(room_bytes)


def give_space(store: Rig) -> None:
    for member in store.members:
        member.room_bytes = PLENTY


def settle(store: Rig) -> None:
    """Let the engine look at its members until nothing changes any more."""
    store.clock.advance(LONGEST_PAUSE_S)
    store.look()
    store.look()


def states(store: Rig) -> list[str]:
    return [state.state for state in store.engine.states()]


def check_all(store: Rig, names: list[str]) -> int:
    """Every object is there with its own bytes, or a miss; return how many are there."""
    there = [name for name in names if has(store, name) == [True]]
    for name in there:
        assert store.get(name) == chunk(name), name
    store.check_space()
    return len(there)


def put_and_look(store: Rig, names: list[str]) -> None:
    """Put one after the other; after each the store looks what is there below."""
    for name in names:
        store.put(name, chunk(name))
        store.look()


def test_what_was_stored_is_read_and_its_space_used_again() -> None:
    """2.5 times as much is promised as there is; ten times what is there is stored."""
    store = rig(size_bytes=MIB)
    thin(store, 400 * 1024)
    names = [f"object{number}" for number in range(500)]
    dropped = 0
    for number, name in enumerate(names):
        before = counts(store).get("put_drop_no_space_below", 0)
        result = store.put(name, chunk(name))
        if not result.stored:
            dropped += 1
            assert result.reason == "no_space_below"
            assert counts(store)["put_drop_no_space_below"] == before + 1
        assert states(store) == ["up", "up"]
        store.look()
        if number % 50 == 49:
            assert check_all(store, names) > 30
            store.clock.advance(1.0)
    assert dropped <= 10  # when a member found no space, and with trials that found little
    # evicted in order: what is there are the newest
    there = has(store, *names)
    assert sum(there) > 35
    assert all(there[there.index(True) :])
    assert counts(store)["evictions"] > 400


def test_space_below_that_comes_back_is_used_and_the_store_is_healthy() -> None:
    store = rig(size_bytes=MIB)
    thin(store, 200 * 1024)
    names = [f"object{number}" for number in range(60)]
    put_and_look(store, names)
    problems = store.store.problems()
    assert len(problems) == 2
    for member, problem in zip(store.members, problems, strict=True):
        assert member.name in problem
        assert "no space below" in problem
    status = store.store.status()
    assert [m["no_space_below"] for m in status["members"]] == [True, True]
    assert status["blocks"]["withheld"] > 0
    assert status["inodes"]["withheld"] > 0
    held = len(store.store)

    give_space(store)
    settle(store)
    assert store.store.problems() == []
    assert store.store.space().withheld == 0
    assert store.store.status()["inodes"]["withheld"] == 0
    more = [f"more{number}" for number in range(60)]
    assert all(store.put(name, chunk(name)).stored for name in more)
    assert len(store.store) >= held + 50
    check_all(store, names + more)


def test_the_capacity_that_is_told_is_what_there_is() -> None:
    store = rig(size_bytes=MIB)
    whole = store.store.capacity_bytes
    thin(store, 200 * 1024)
    for number in range(60):
        store.put(str(number), chunk(str(number)))
        store.look()
    assert store.store.capacity_bytes < whole / 2
    assert store.store.used_share > 0.9
    give_space(store)
    settle(store)
    assert store.store.capacity_bytes == whole
    assert store.store.used_share < 0.5


def test_a_device_that_is_gone_is_down_at_its_first_write_without_space() -> None:
    store = rig()
    put_all(store, ["a", "b"])
    store.members[0].gone = True
    while states(store)[0] == "up":
        store.put("c", chunk("c"))
        store.store.remove([digest_of("c")])
        store.look()
    assert counts(store)["put_drop_no_space_below"] == 1
    assert states(store) == ["down", "up"]
    [problem] = store.store.problems()
    assert f"member {store.members[0].name} is down" in problem
    store.members[0].gone = False
    settle(store)
    assert store.store.problems() == []
    assert check_all(store, ["a", "b"]) == 2


def test_a_member_is_not_written_to_before_its_label_was_looked_at() -> None:
    """But read: both meanings of "no space" are possible until then."""
    store = rig(members=1)
    put_all(store, ["a"])
    thin(store, 0)
    assert store.put("b", chunk("b")).reason == "no_space_below"
    store.members[0].calls.clear()
    assert store.put("c", chunk("c")).reason == "no_space_below"
    assert store.get("a") == chunk("a")
    assert [call[0] for call in store.members[0].calls] == ["read"]
    assert has(store, "a") == [True]  # nothing was evicted for it


def test_one_refusal_that_does_not_happen_again_costs_nothing() -> None:
    store = rig(members=1)
    put_all(store, ["a"])
    store.members[0].faults = [Fault("error", "write", value=errno.ENOSPC)]
    assert store.put("b", chunk("b")) == PutResult(False, reason="no_space_below")
    store.look()
    assert store.store.problems() == []
    assert store.put("b", chunk("b")).stored
    assert check_all(store, ["a", "b"]) == 2
    assert counts(store).get("evictions", 0) == 0


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT])
def test_new_space_is_tried_at_a_measured_pace(refusal: int) -> None:
    """One small write each time, after 1, 2, 4 and at last 60 seconds, whatever is stored."""
    store = rig(members=1)
    member = store.members[0]
    member.faults = [Fault("error", "write", times=10**6, value=refusal)]
    store.put("a", chunk("a"))
    trials = []
    for second in range(400):
        member.calls.clear()
        store.look()
        trials += [second for what, *_ in member.calls if what == "write"]
        store.clock.advance(1.0)
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert gaps[:7] == [FIRST_PAUSE_S * 2**n for n in range(6)] + [LONGEST_PAUSE_S]
    assert set(gaps[7:]) == {LONGEST_PAUSE_S}


def test_when_even_written_space_finds_none_puts_cost_no_entries() -> None:
    """Storage that copies on write, or compresses, may refuse to write anything again."""
    store = rig(members=1, reserve_fraction=0.0)
    names = [f"object{n}" for n in range(store.store.space().total // 4)]
    put_all(store, names)
    store.members[0].faults = [Fault("error", "write", times=10**6, value=errno.ENOSPC)]
    before = check_all(store, names)
    for number in range(200):
        assert not store.put(f"new{number}", chunk("new")).stored
        store.look()
        store.clock.advance(0.1)
    assert before - check_all(store, names) <= 8  # one or two for each time that it is tried
    no_faults(store)
    settle(store)
    settle(store)
    assert store.put("last", chunk("last")).stored
    settle(store)
    assert store.store.problems() == []
    assert store.store.space().quarantined == 0
    store.check_space()


def test_a_member_that_refuses_to_be_rewritten_keeps_its_entries_and_the_others_go_on() -> None:
    store = rig(members=2, reserve_fraction=0.0, width=1)
    names = [f"object{n}" for n in range(store.store.space().total // 4)]
    put_all(store, names)
    rows = store.store._core.catalog.find([digest_of(name) for name in names]).tolist()
    place = store.store.volume.geometry.place
    on_first = [name for name, row in zip(names, rows, strict=True) if place(row)[0] == 0]
    store.members[0].faults = [Fault("error", "write", times=10**6, value=errno.ENOSPC)]
    new = [f"new{number}" for number in range(100)]
    stored = []
    for name in new:
        stored.append(store.put(name, chunk(name)).stored)
        store.look()
        store.clock.advance(0.1)
    assert sum(stored) > 80
    assert check_all(store, on_first) >= len(on_first) - 4
    assert has(store, new[-1]) == [True]
    no_faults(store)
    settle(store)
    settle(store)
    assert store.put("last", chunk("last")).stored
    settle(store)
    assert store.store.problems() == []


def test_an_inode_that_found_no_space_keeps_no_blocks_back() -> None:
    """It was never there, so there is nothing to erase: the media are looked at, not guessed."""
    store = rig(members=1)
    put_all(store, ["a"])
    inode_writes(store, "error", times=10**6, value=errno.ENOSPC)
    assert store.put("b", chunk("b")).reason == "no_space_below"
    assert store.store.space().quarantined == 0
    assert counts(store).get("erase_failures", 0) == 0
    store.check_space()
    no_faults(store)
    settle(store)
    assert store.store.status()["inodes"]["used"] == 1  # the slot is given out again
    assert store.put("b", chunk("b")).stored


def test_an_inode_that_is_there_after_all_is_erased_before_its_space_is_used() -> None:
    """Its write is refused, but reached the media; so is the first attempt to erase it."""
    store = rig(members=1)
    inode_writes(store, "error", times=2, value=errno.ENOSPC)
    member = store.members[0]
    applied = member.write_from

    def refused_yet_written(offset: int, buffer: memoryview) -> int:
        in_table = offset < data_from(store)
        if in_table and any(buffer):
            member._apply(offset, bytes(buffer))
        return applied(offset, buffer)

    member.write_from = refused_yet_written
    assert store.put("a", chunk("a")).reason == "no_space_below"
    assert store.store.space().quarantined == 4
    assert any("could not be erased" in problem for problem in store.store.problems())
    settle(store)
    assert store.put("b", chunk("b")).stored
    assert store.store.space().quarantined == 0
    assert store.store.problems() == []
    store.reopen()
    assert (has(store, "a"), store.get("b")) == ([False], chunk("b"))


def actions(store: Rig, names: list[str]) -> None:
    """Put, replace, remove, clear and claim: every kind of write that a store makes."""
    for number, name in enumerate(names):
        store.put(name, chunk(name))
        if number % 7 == 3:
            store.store.remove([digest_of(names[number - 2])])
        if number == len(names) * 2 // 3:
            store.store.clear()
        if number % 5 == 0:
            store.store.beat()
        store.look()


@pytest.mark.parametrize("lasting", [True, False], ids=["from then on", "once"])
def test_no_space_at_every_single_write(lasting: bool) -> None:
    """From the k-th write on, for every k: no wrong bytes, all space accounted for, and health."""
    names = [f"object{number}" for number in range(24)]
    fresh = rig(size_bytes=192 * 1024)
    for member in fresh.members:
        member.calls.clear()
    actions(fresh, names)
    total = [sum(call[0] == "write" for call in m.calls) for m in fresh.members]
    assert min(total) > 20
    for struck in range(2):
        for strike in range(total[struck]):
            store = rig(size_bytes=192 * 1024)
            times = 10**6 if lasting else 1
            fault = Fault("error", "write", strike, times, value=errno.ENOSPC)
            store.members[struck].faults = [fault]
            actions(store, names)
            check_all(store, names)
            assert states(store) == ["up", "up"]
            no_faults(store)
            store.store.beat()
            settle(store)
            settle(store)
            for name in ("new1", "new2", "new3", "new4"):
                assert store.put(name, chunk(name)).stored, (struck, strike)
            assert store.store.problems() == [], (struck, strike)
            space = store.store.space()
            assert (space.withheld, space.quarantined) == (0, 0)
            here = check_all(store, [*names, "new1", "new2", "new3", "new4"])
            assert here == len(store.store)
            store.reopen()
            assert check_all(store, [*names, "new1", "new2", "new3", "new4"]) == here


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_on_members_that_are_thinner_than_they_look(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.choice((0, 1))
    store = Rig.fresh(rng.choice((1, 2, 3)), 512 * 1024, options=options(width=width))
    for member in store.members:
        member.make_thin(rng.randrange(0, 300) * 1024)
    names = [f"object{number}" for number in range(80)]
    stored: set[str] = set()
    for _ in range(400):
        name, what = rng.choice(names), rng.random()
        if what < 0.7:
            result = store.put(name, chunk(name, length=rng.choice((CHUNK, 4096, 3 * CHUNK))))
            stored |= {name} if result.stored else set()
            assert result.stored or result.reason in ("no_space_below", "full", "impossible")
        elif what < 0.8:
            store.store.remove([digest_of(name)])
        elif what < 0.95:
            length = next((n for _, d, n, _ in store.store.entries() if d == digest_of(name)), 0)
            assert store.get(name) in (None, chunk(name, length=length))
        elif what < 0.97:
            store.reopen()
        else:
            rng.choice(store.members).room_bytes = rng.randrange(0, 40) * THIN_UNIT_BYTES
        if rng.random() < 0.5:
            store.look()
        store.clock.advance(rng.random())
        store.check_space()
        assert set(states(store)) == {"up"}
    give_space(store)
    for _ in range(3):
        settle(store)
        assert store.put(f"last{_}", chunk(f"last{_}")).stored
    assert store.store.problems() == []
    assert store.store.space().withheld == 0
    assert stored


def test_a_full_thin_member_opens_again_and_goes_on() -> None:
    """Nobody remembers over a restart what was written but what is stored."""
    store = rig(size_bytes=MIB)
    thin(store, 300 * 1024)
    names = [f"object{number}" for number in range(120)]
    put_and_look(store, names)
    there = check_all(store, names)
    store.reopen()
    assert check_all(store, names) == there
    more = [f"more{number}" for number in range(60)]
    for name in more:
        store.put(name, chunk(name))
        store.look()
        store.clock.advance(0.5)
    assert check_all(store, more) > 20


def test_the_member_of_these_tests_is_thin_in_units() -> None:
    member = MemoryMember(MIB)
    member.write_from(0, memoryview(bytes(4096)))
    member.make_thin(2 * THIN_UNIT_BYTES)
    assert member.write_from(0, memoryview(bytes(4096))) == 4096
    assert member.write_from(8192, memoryview(bytes(16384))) == 8192
    with pytest.raises(OSError, match="no space below"):
        member.write_from(16384, memoryview(bytes(512)))
    assert member.write_from(12288, memoryview(bytes(4096))) == 4096
