"""Ownership as the store sees it: looks at the claim, losing it, giving it back."""

import socket
from dataclasses import replace

import pytest

from fx100_lmcache.errors import ClaimError
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES
from fx100_lmcache.testing.harness import Rig, digest_of
from fx100_lmcache.testing.memory import Fault
from fx100_lmcache.volume.claim import write_claim
from support.store import CHUNK, chunk, counts, expire, has, options, put_all, start_load
from support.store_claims import FAR, on_media, taken_over

ALWAYS = -1.0  # the last look is never recent enough


def watchful() -> Rig:
    return Rig.fresh(options=options(claim_check_s=ALWAYS))


def claim_faults(store: Rig, kind: str) -> None:
    start = store.store.volume.geometry.claim_offset(0, 0)
    for member in store.members:
        member.faults.append(
            Fault(kind, "read", first_byte=start, last_byte=start + 2 * CLAIM_BYTES - 1)
        )


def test_a_writer_that_was_replaced_stores_nothing_more() -> None:
    store = watchful()
    assert store.put("a", chunk("a")).stored
    taken_over(store)
    after = on_media(store)
    for name in ("b", "c"):
        result = store.put(name, chunk(name))
        assert (result.stored, result.reason) == (False, "claim_lost")
    assert counts(store)["put_drop_claim_lost"] == 2
    assert store.get("a") == chunk("a")  # reading goes on: bytes verify themselves
    assert any("taken over" in problem for problem in store.store.problems())
    store.store.close()
    assert on_media(store) == after  # what is not ours is not given back


def test_a_replaced_writer_causes_misses_at_most() -> None:
    """Its last writes may land after the new owner began."""
    old = watchful()
    old.put("a", chunk("a"))
    new = Rig(old.members, options(), old.journal, wall_s=2_000_000_000)
    new.open()
    assert new.get("a") == chunk("a")
    old.store.remove([digest_of("a")])  # unaware: remove does not look at the claim
    new.put("b", chunk("b", 1))
    assert not old.put("c", chunk("c")).stored
    for name, version in (("a", 0), ("b", 1), ("c", 0)):
        assert new.get(name) in (chunk(name, version), None)
    new.reopen()
    for name, version in (("a", 0), ("b", 1), ("c", 0)):
        assert new.get(name) in (chunk(name, version), None)
    assert new.get("b") == chunk("b", 1)


def test_looks_are_rare() -> None:
    store = Rig.fresh(options=options(claim_check_s=1e9))
    for member in store.members:
        member.calls.clear()
    put_all(store, ["a", "b", "c"])
    assert not any(what == "read" for m in store.members for what, _, _ in m.calls)


def test_an_unreadable_claim_drops_the_put_but_is_not_a_loss() -> None:
    store = watchful()
    claim_faults(store, "error")
    assert not store.put("a", chunk("a")).stored
    for member in store.members:
        member.faults.clear()
    assert store.put("a", chunk("a")).stored
    assert not any("taken over" in problem for problem in store.store.problems())


def test_a_stalled_look_does_not_keep_puts_for_ever() -> None:
    """Neither those that wait for the look, nor later ones."""
    store = watchful()
    claim_faults(store, "stall")
    waiting = [store.start_put(name, chunk(name)) for name in "ab"]
    assert waiting == [[], []]
    expire(store, store.options.load_s)
    assert [[r.stored for r in results] for results in waiting] == [[False], [False]]
    for member in store.members:
        member.faults.clear()
    assert store.put("c", chunk("c")).stored  # the other member is asked
    store.lanes.release()
    assert store.put("a", chunk("a")).stored


def test_puts_that_wait_for_one_look_share_it() -> None:
    store = watchful()
    claim_faults(store, "stall")
    waiting = [store.start_put(name, chunk(name)) for name in "abc"]
    for member in store.members:
        member.faults.clear()
    start = store.store.volume.geometry.claim_offset(0, 0)
    looks = [c for m in store.members for c in m.calls if c[:2] == ("read", start)]
    before = len(looks)
    store.lanes.release()
    assert [[r.stored for r in results] for results in waiting] == [[True]] * 3
    looks = [c for m in store.members for c in m.calls if c[:2] == ("read", start)]
    assert len(looks) == before + 1


def test_close_says_that_nobody_holds_the_shard() -> None:
    store = Rig.fresh(options=options())
    assert "pid=" in on_media(store).holder
    store.store.close()
    assert on_media(store).holder == ""


def test_every_open_has_a_later_epoch_even_with_a_clock_that_went_back() -> None:
    store = Rig.fresh(options=options())
    epochs = [on_media(store).epoch]
    for wall_s in (5, 4, 3):
        store.wall_s = wall_s
        store.open()
        epochs.append(on_media(store).epoch)
    assert epochs == sorted(set(epochs))


def test_inodes_are_newer_than_any_on_the_media() -> None:
    """A claim block that was lost in a power cut must not turn the order of writes around."""
    store = Rig.fresh(options=options())
    store.wall_s = 50_000_000
    store.reopen()
    store.put("a", chunk("a"))
    volume = store.store.volume
    for member in store.members:  # the claims of the last open never reached the media
        start = volume.geometry.claim_offset(0, 0)
        member.media[start : start + 2 * CLAIM_BYTES] = bytes(2 * CLAIM_BYTES)
    store.wall_s = 10
    store.open()
    store.store.remove([digest_of("a")])
    store.put("a", chunk("a", 1))
    store.reopen()
    assert store.get("a") == chunk("a", 1)


def test_a_clear_survives_the_loss_of_its_claim_block() -> None:
    store = Rig.fresh(options=options())
    put_all(store, ["old"])
    before = [bytes(m.media[: store.store.volume.geometry.table_offset]) for m in store.members]
    store.store.clear()
    put_all(store, ["new"])
    for member, start in zip(store.members, before, strict=True):
        member.media[: len(start)] = start
    store.reopen()
    assert has(store, "old", "new") == [False, True]
    assert on_media(store).generation == 2  # written again


@pytest.mark.parametrize("holder", [FAR, f"host={socket.gethostname()} boot=b pid=1"])
def test_another_host_is_refused(holder: str) -> None:
    """By an equal host name nobody is known: containers share names, or are all localhost."""
    store = Rig.fresh(options=options())
    foreign = replace(on_media(store), holder=holder, version=1, counter=10)
    volume = store.store.volume
    write_claim(store.members[0], volume.geometry, volume.uuid, foreign)
    with pytest.raises(ClaimError, match=r"claimed by another host: host="):
        store.open()


def test_loading_needs_no_claim() -> None:
    store = watchful()
    store.put("a", chunk("a"))
    claim_faults(store, "error")
    results, _ = start_load(store, "a")
    assert [r.length for r in results] == [CHUNK]


def test_a_replaced_writer_that_clears_leaves_the_new_owners_claim() -> None:
    old = Rig.fresh(options=options())
    new = Rig(old.members, options(claim_check_s=-1.0), old.journal, wall_s=2_000_000_000)
    new.open()
    assert new.put("a", chunk("a")).stored
    assert old.store.clear() == 0
    assert old.store.clear() == 0
    assert new.put("b", chunk("b")).stored
    assert new.get("a") == chunk("a")


def test_a_stale_owners_close_leaves_the_new_owners_claim() -> None:
    """It was stopped, replaced, woken, and asked to close before it had looked once."""
    old = Rig.fresh(options=options())
    taken_over(old)
    before = [bytes(member.media) for member in old.members]
    old.store.close(0.1)
    assert [bytes(member.media) for member in old.members] == before
