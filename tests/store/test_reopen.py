"""Reopening: what survives, whatever the members are called; foreign geometries."""

from dataclasses import replace

import pytest

from fx100_lmcache.buffers import aligned_buffer
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.ondisk.geometry import Geometry
from fx100_lmcache.store import Store
from fx100_lmcache.testing.harness import Rig, digest_of
from fx100_lmcache.testing.inline import inline_engine
from fx100_lmcache.testing.memory import Fault, MemoryMember
from fx100_lmcache.volume.volume import assemble
from support.store import chunk, counts, has, options, put_all, rig

NAMES = [f"chunk{n}" for n in range(20)]


@pytest.mark.parametrize("closed", [False, True])
def test_everything_is_found_again(closed: bool) -> None:
    """Also without a close, as after SIGKILL."""
    store = rig(members=3)
    put_all(store, NAMES)
    if closed:
        store.store.close()
    store.reopen()
    assert all(has(store, *NAMES))
    assert [store.get(name) for name in NAMES] == [chunk(name) for name in NAMES]
    assert counts(store).get("checksum_failures", 0) == 0


def test_members_in_another_order_under_other_names() -> None:
    """What a member is, its label says; nothing else is needed."""
    store = rig(members=3)
    put_all(store, NAMES)
    moved = []
    for number in (2, 0, 1):
        old = store.members[number]
        member = MemoryMember(old.size_bytes, name=f"/dev/nvme{number + 7}n1")
        member.media[:] = old.media
        moved.append(member)
    again = Rig(moved, options())
    again.open()
    assert [again.get(name) for name in NAMES] == [chunk(name) for name in NAMES]
    assert [m.name for m in again.store.volume.members] == [
        "/dev/nvme7n1",
        "/dev/nvme8n1",
        "/dev/nvme9n1",
    ]


def test_order_of_eviction_after_reopening_is_that_of_writing() -> None:
    store = rig(members=2)
    for name in NAMES[:8]:
        store.put(name, chunk(name))
    store.store.lookup([digest_of(NAMES[0])])
    store.reopen()
    [batch] = store.store.oldest_first()
    assert [digest for digest, _, _ in batch] == [digest_of(name) for name in NAMES[:8]]
    [first, *_] = store.store.oldest_first(batch=3)
    assert len(first) == 3


def test_use_survives_ten_rounds_of_reopening() -> None:
    store = rig(members=2)
    for round_ in range(10):
        put_all(store, [f"{round_}.{n}" for n in range(5)])
        store.store.remove([digest_of(f"{round_}.0")])
        before = {d for _, d, _, _ in store.store.entries()}
        store.reopen()
        assert {d for _, d, _, _ in store.store.entries()} == before
        store.check_space()
        for row, digest, _, _ in store.store.entries():
            name = digest[16:].rstrip(b"\0").decode()
            assert store.get(name) == chunk(name), row


def relabel(store: Rig, geometry: Geometry) -> None:
    """Write labels that are valid but describe another geometry."""
    label = store.store.volume.label
    for number, member in enumerate(store.members):
        block = replace(label, index=number, geometry=geometry).pack()
        for offset in (0, label.geometry.label_copy_offset(number)):
            with aligned_buffer(len(block)) as view:
                view[:] = block
                member.write_from(offset, view)


def member_change(field: str, by: int) -> dict[str, object]:
    return {"members": (field, by)}


@pytest.mark.parametrize(
    "change",
    [
        {"block_bytes": 4097},
        {"block_bytes": 8192},
        {"block_bytes": 512},
        {"frame_blocks": 3},
        {"frame_blocks": 5},
        {"frame_blocks": 0},
        {"inode_bytes": 513},
        {"inode_bytes": 1024},
        {"inode_bytes": 0},
        {"io_align_bytes": 1024},
        {"io_align_bytes": 4096},
        {"io_align_bytes": 0},
        {"shards": 2},
        member_change("slots_per_shard", 1),
        member_change("slots_per_shard", -1),
        member_change("slots_per_shard", 1 << 20),
        member_change("frames_per_shard", 1),
        member_change("frames_per_shard", -1),
        member_change("frames_per_shard", 1 << 20),
    ],
    ids=str,
)
def test_another_geometry_is_refused_or_gives_misses(change: dict[str, object]) -> None:
    """Never bytes from the wrong place."""
    store = rig(members=2)
    put_all(store, NAMES)
    geometry = store.store.volume.geometry
    if "members" in change:
        field, by = change["members"]  # type: ignore[misc]
        shapes = tuple(
            replace(m, **{field: getattr(m, field) + by})  # type: ignore[has-type]
            for m in geometry.members
        )
        geometry = replace(geometry, members=shapes)
    else:
        geometry = replace(geometry, **change)  # type: ignore[arg-type]
    relabel(store, geometry)
    try:
        volume = assemble(store.members)
        engine, _, _ = inline_engine(volume.members)
        store.store = Store(volume, engine, options=options(), wall_clock=lambda: 2e9)
    except (FX100Error, OSError):
        return
    for name in NAMES:
        assert store.get(name) in (None, chunk(name))
    store.check_space()


@pytest.mark.parametrize("heals", [True, False])
def test_an_unreadable_inode_costs_one_entry_and_its_slot_until_it_is_erased(heals: bool) -> None:
    store = rig()
    for name in "abc":
        store.put(name, chunk(name))
    row = next(row for row, digest, *_ in store.store.entries() if digest == digest_of("b"))
    geometry = store.store.volume.geometry
    member, shard, slot = geometry.place(row)
    first = geometry.slot_offset(member, shard, slot)
    last = first + geometry.inode_bytes - 1
    store.members[member].faults = [Fault("unreadable", "read", first_byte=first, last_byte=last)]
    if not heals:
        broken = Fault("error", "write", times=99, first_byte=first, last_byte=last)
        store.members[member].faults.append(broken)
    store.reopen()
    assert [store.get(name) for name in "abc"] == [chunk("a"), None, chunk("c")]
    assert store.store.counts()["unreadable_inodes"] == 1
    assert bool(store.store.problems()) != heals
    store.put("b", chunk("b", 1))
    assert store.get("b") == chunk("b", 1)
    store.check_space()
    store.members[member].faults = []
    store.reopen()  # the old inode, if it is still there, has lost against the new one
    assert store.get("b") == chunk("b", 1)
    store.check_space()
