"""Free space: the allocators and the space of the opened shards, against naive models."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fx100_lmcache.ondisk.geometry import Geometry, MemberShape
from fx100_lmcache.ondisk.location import pack_location
from fx100_lmcache.space.allocator import FrameAllocator, SlotAllocator
from fx100_lmcache.space.space import Extent, Space, extent_of
from support.steps import counted_steps

FRAME = 5
FRAMES = 8
FIRST = 40  # the part of a later shard does not start at block 0


class FrameMachine(RuleBasedStateMachine):
    """Runs of whole frames and shared frames, compared with a set of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = range(FIRST, FIRST + FRAMES * FRAME)
        self.allocator = FrameAllocator(self.blocks, FRAME)
        self.taken: list[range] = []

    @property
    def used(self) -> set[int]:
        return {block for run in self.taken for block in run}

    def longest_free_in(self, frame: int) -> int:
        first = FIRST + frame * FRAME
        free = "".join("x" if first + n in self.used else " " for n in range(FRAME))
        return max(map(len, free.split("x")))

    @rule(frames=st.integers(1, 4))
    def take_frames(self, frames: int) -> None:
        start = self.allocator.allocate(frames * FRAME)
        whole = [self.longest_free_in(f) == FRAME for f in range(FRAMES)]
        possible = any(all(whole[f : f + frames]) for f in range(FRAMES - frames + 1))
        self.took(start, frames * FRAME, possible)
        if start is not None:
            assert (start - FIRST) % FRAME == 0

    @rule(blocks=st.integers(1, FRAME - 1))
    def take_part(self, blocks: int) -> None:
        room = [self.longest_free_in(f) for f in range(FRAMES)]
        start = self.allocator.allocate(blocks)
        self.took(start, blocks, max(room) >= blocks)
        if start is not None:
            frame = (start - FIRST) // FRAME
            assert (start + blocks - 1 - FIRST) // FRAME == frame, "runs over a frame's end"
            if room[frame] == FRAME:  # a fresh frame is opened only when no shared one has room
                assert not any(blocks <= r < FRAME for r in room)

    def took(self, start: int | None, blocks: int, possible: bool) -> None:
        assert (start is not None) == possible
        if start is None:
            return
        run = range(start, start + blocks)
        assert not self.used & set(run), "taken twice"
        assert set(run) <= set(self.blocks)
        self.taken.append(run)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        run = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.allocator.free(run.start, len(run))

    @rule()
    def recover(self) -> None:
        """Marking what is taken on a fresh allocator leads to the same state."""
        fresh = FrameAllocator(self.blocks, FRAME)
        starts = np.array([r.start for r in self.taken], np.int64)
        fresh.mark(starts, np.array([len(r) for r in self.taken], np.int64))
        assert fresh._state == self.allocator._state
        assert fresh._masks == self.allocator._masks
        assert fresh._by_run == self.allocator._by_run
        self.allocator = fresh

    @invariant()
    def free_and_used_are_all(self) -> None:
        assert self.allocator.free_blocks + len(self.used) == len(self.blocks)


TestFrames = FrameMachine.TestCase
TestFrames.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_run_is_frames_or_less_than_one() -> None:
    with pytest.raises(ValueError, match="whole frames"):
        FrameAllocator(range(20), 5).allocate(7)


def test_frames_of_one_block() -> None:
    allocator = FrameAllocator(range(4), 1)
    assert [allocator.allocate(1) for _ in range(5)] == [0, 1, 2, 3, None]
    allocator.free(2, 1)
    assert allocator.allocate(1) == 2


def test_frames_of_64_blocks() -> None:
    allocator = FrameAllocator(range(128), 64)
    starts = [allocator.allocate(63), allocator.allocate(1), allocator.allocate(64)]
    assert (starts, allocator.free_blocks) == ([0, 63, 64], 0)


def test_short_free_runs_are_used_before_long_ones() -> None:
    allocator = FrameAllocator(range(10), 10)
    runs = [allocator.allocate(n) for n in (2, 1, 3, 1)]
    assert runs == [0, 2, 3, 6]
    allocator.free(0, 2)
    assert allocator.allocate(2) == 0  # not from the run of three at the end


@pytest.mark.parametrize("seed", range(5))
def test_slots_against_a_set(seed: int) -> None:
    rng = random.Random(seed)
    slots, used = SlotAllocator(20), set[int]()
    for _ in range(400):
        if used and rng.random() < 0.45:
            slot = rng.choice(sorted(used))
            used.remove(slot)
            slots.free(slot)
        else:
            found = slots.allocate()
            lowest = next((n for n in range(20) if n not in used), None)
            assert found == lowest
            if found is not None:
                used.add(found)
        assert slots.free_slots == 20 - len(used)
    fresh = SlotAllocator(20)
    fresh.mark(np.array(sorted(used), np.int64))
    assert (fresh.free_slots, fresh._used) == (slots.free_slots, slots._used)


# Space


def geometry(frames: Sequence[int], slots: Sequence[int] | int = 30, shards: int = 1) -> Geometry:
    each = [slots] * len(frames) if isinstance(slots, int) else slots
    shapes = tuple(MemberShape(1 << 30, s, f) for s, f in zip(each, frames, strict=True))
    return Geometry(4096, 4, 512, 512, shards, shapes)


def members_of(extent: Extent) -> set[int]:
    return {member for member, _, _ in extent.runs}


def check(space: Space, g: Geometry, extents: Sequence[Extent], shards: Sequence[int]) -> None:
    """Nothing is taken twice, everything lies in its own shard, the books are right."""
    blocks: set[tuple[int, int]] = set()
    for extent in extents:
        home, shard, _ = g.place(extent.row)
        assert home == extent.runs[0][0], "the inode lies with the first piece"
        for member, start, count in extent.runs:
            own = g.shard_blocks(member, shard)
            assert own.start <= start
            assert start + count <= own.stop
            mine = {(member, block) for block in range(start, start + count)}
            assert not mine & blocks
            blocks |= mine
    rows = [e.row for e in extents]
    assert len(set(rows)) == len(rows)
    assert space.free_blocks + len(blocks) == space.total_blocks
    slots = len(shards) * sum(m.slots_per_shard for m in g.members)
    assert space.free_slots_up(0) + len(rows) == slots
    check_sums_and_tenants(space, g, extents, shards)


def check_sums_and_tenants(
    space: Space, g: Geometry, extents: Sequence[Extent], shards: Sequence[int]
) -> None:
    """What is kept so that it need not be counted is what counting finds."""
    for down_mask in (0, 1, 2):
        up = [m for m in range(len(g.members)) if not down_mask >> m & 1]
        free = sum(space._frames[s, m].free_blocks for s in shards for m in up)
        assert space.free_blocks_up(down_mask) == free
        slots = sum(space._slots[s, m].free_slots for s in shards for m in up)
        assert space.free_slots_up(down_mask) == slots
    tenants: dict[tuple[int, int], set[int]] = {}
    for extent in extents:
        for member, start, blocks in extent.runs:
            if blocks < g.frame_blocks:
                frame = start // g.frame_blocks * g.frame_blocks
                tenants.setdefault((member, frame), set()).add(extent.row)
    assert {frame: set(rows) for frame, rows in space._tenants.items()} == tenants
    for member, first in tenants:
        whole = range(first, first + g.frame_blocks)
        assert set(space.tenants(member, whole)) == tenants[member, first]


@pytest.mark.parametrize("width", [0, 1, 2])
@pytest.mark.parametrize("shards", [[0], [0, 1], [1]])
@pytest.mark.parametrize("frames", [[9], [9, 9], [3, 20, 7]])
@pytest.mark.parametrize("seed", range(3))
def test_space_against_sets_of_blocks(
    frames: list[int], shards: list[int], width: int, seed: int
) -> None:
    g = geometry(frames, shards=2)
    space, rng = Space(g, shards, width), random.Random(seed)
    extents: list[Extent] = []
    for _ in range(200):
        if extents and rng.random() < 0.45:
            space.free(extents.pop(rng.randrange(len(extents))))
        else:
            wanted = rng.choice((1, 2, 3, 4, 6, 8, 11, 16, 23))
            extent = space.allocate(wanted, down_mask=0, max_pieces=12)
            if extent is not None:
                assert extent.blocks == wanted
                assert len(extent.runs) <= 12
                if width:
                    assert len(members_of(extent)) <= width
                extents.append(extent)
        check(space, g, extents, shards)
    recovered = Space(g, shards, width)
    widest = max((len(e.runs) for e in extents), default=0)
    locations = np.zeros((len(extents), widest), np.uint64)
    for at, extent in enumerate(extents):
        locations[at, : len(extent.runs)] = [pack_location(*run) for run in extent.runs]
    recovered.mark_recovered(np.array([e.row for e in extents], np.int64), locations)
    check(recovered, g, extents, shards)
    for extent, packed in zip(extents, locations.tolist(), strict=True):
        assert extent_of(extent.row, [p for p in packed if p]) == extent
        recovered.free(extent)
    check(recovered, g, [], shards)


def test_full_objects_take_one_piece_on_each_member() -> None:
    space = Space(geometry([10, 10, 10, 10]), [0])
    extents = [space.allocate(16, 0, 99) for _ in range(10)]
    for extent in extents:
        assert extent is not None
        assert sorted(member for member, _, _ in extent.runs) == [0, 1, 2, 3]
    homes = [e.runs[0][0] for e in extents if e]
    assert homes == [n % 4 for n in range(10)]  # small objects and inodes take turns
    assert space.allocate(16, 0, 99) is None


def test_every_block_can_be_used() -> None:
    g = geometry([3, 5, 2], slots=40)
    space = Space(g, [0])
    taken = list(itertools.takewhile(bool, (space.allocate(3, 0, 9) for _ in range(99))))
    single = list(itertools.takewhile(bool, (space.allocate(1, 0, 9) for _ in range(99))))
    assert (len(taken), len(single), space.free_blocks) == (10, 10, 0)


@pytest.mark.parametrize("width", [0, 1, 2])
def test_down_members_are_avoided(width: int) -> None:
    space = Space(geometry([10, 10, 10]), [0], width)
    for _ in range(8):
        extent = space.allocate(8, down_mask=0b010, max_pieces=9)
        assert extent is not None
        assert 1 not in members_of(extent)
    assert space.allocate(8, down_mask=0b111, max_pieces=9) is None


def test_narrow_objects_go_where_there_is_room() -> None:
    """One small member of several must not make the others' space unusable."""
    space = Space(geometry([1, 20, 20], slots=60), [0], width=1)
    extents = [space.allocate(4, 0, 9) for _ in range(41)]
    assert None not in extents
    assert space.free_blocks == 0


def test_a_full_inode_table_does_not_stop_the_others() -> None:
    space = Space(geometry([20, 20], slots=[2, 30]), [0])
    extents = [space.allocate(8, 0, 9) for _ in range(20)]
    assert None not in extents
    assert space.free_blocks == 0


def test_without_slots_blocks_are_of_no_use() -> None:
    space = Space(geometry([20, 20], slots=2), [0])
    extents = [space.allocate(4, 0, 9) for _ in range(5)]
    assert extents[4] is None
    assert None not in extents[:4]


def test_pieces_are_bounded() -> None:
    g = geometry([12])
    space = Space(g, [0])
    singles = [space.allocate(4, 0, 9) for _ in range(12)]
    for extent in singles[::2]:
        assert extent is not None
        space.free(extent)
    assert space.allocate(24, 0, 5) is None  # only single frames are free
    assert space.free_blocks == 24
    extent = space.allocate(24, 0, 6)
    assert extent is not None
    assert len(extent.runs) == 6


@pytest.mark.parametrize(
    ("blocks", "width", "pieces", "fits"),
    [
        (48, 0, 3, True),
        (48, 0, 2, False),
        (48, 1, 1, False),
        (16, 1, 1, True),
        (49, 0, 99, False),
        (33, 2, 99, False),
    ],
)
def test_what_could_never_fit_is_known(blocks: int, width: int, pieces: int, fits: bool) -> None:
    space = Space(geometry([4, 4, 4]), [0], width)
    assert space.could_hold(blocks, pieces) == fits
    assert (space.allocate(blocks, 0, pieces) is not None) == fits


@pytest.mark.parametrize("seed", range(20))
def test_what_was_refused_is_found_as_soon_as_it_is_there(seed: int) -> None:
    """A shard that had no room is asked again after each free: memory hides nothing."""
    g = geometry([4, 5], slots=[3, 9], shards=2)
    space, rng = Space(g, [0, 1]), random.Random(seed)
    extents: list[Extent] = []
    for _ in range(200):
        if extents and rng.random() < 0.4:
            space.free(extents.pop(rng.randrange(len(extents))))
            continue
        wanted, down = rng.choice((1, 3, 4, 6, 8, 12)), rng.choice((0, 0, 1, 2))
        pieces = rng.choice((1, 2, 9))
        extent = space.allocate(wanted, down, pieces)
        for remembered in space._hopeless.values():
            remembered.clear()
        again = space.allocate(wanted, down, pieces)
        assert extent is not None or again is None
        extents += [e for e in (extent, again) if e is not None]
    check(space, g, extents, [0, 1])


def test_an_allocation_costs_the_same_in_one_shard_and_in_64() -> None:
    """Python steps, with 16 members: of one that works, and of one in a volume that is full."""
    steps = {}
    for shards in (1, 64):
        g = geometry([8] * 16, slots=200, shards=shards)
        space = Space(g, range(shards))
        with counted_steps() as working:
            for _ in range(7):
                assert space.allocate(64, 0, 99) is not None
        while space.allocate(4, 0, 99) is not None:
            pass
        with counted_steps() as refused:
            for _ in range(9):
                assert space.allocate(4, 0, 99) is None
                space.free_blocks_up(0)
        steps[shards] = (working[0], refused[0])
    assert steps[64][0] <= 1.1 * steps[1][0]
    assert steps[64][1] <= steps[1][1] + 9 * 64 * 2


def test_held_slots_are_not_allocated() -> None:
    g = geometry([4])
    space = Space(g, [0])
    space.hold_slot(0)
    extent = space.allocate(1, 0, 9)
    assert extent is not None
    assert extent.row == 1
    space.free(Extent(0, ()))
    extent = space.allocate(1, 0, 9)
    assert extent is not None
    assert extent.row == 0
