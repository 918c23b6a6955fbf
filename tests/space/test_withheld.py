"""Space that was never written is withheld and given back, against sets of blocks and slots."""

import random

import numpy as np
import pytest

from fx100_lmcache.space.allocator import FrameAllocator, SlotAllocator
from fx100_lmcache.space.scarcity import Stock, Stocks

FIRST = 128


@pytest.mark.parametrize("frame", [1, 5, 64])
@pytest.mark.parametrize("seed", range(8))
def test_only_what_was_written_is_given_out_while_the_rest_is_withheld(
    frame: int, seed: int
) -> None:
    rng = random.Random(seed)
    blocks = range(FIRST, FIRST + 12 * frame)
    allocator = FrameAllocator(blocks, frame)
    taken: list[range] = []
    written: set[int] = set()
    withheld: set[int] = set()

    def used() -> set[int]:
        return {block for run in taken for block in run}

    for _ in range(400):
        action = rng.random()
        if action < 0.5:
            count = rng.choice([rng.randint(1, frame), frame, 2 * frame])
            start = allocator.allocate(count if count <= frame else 2 * frame)
            if start is not None:
                run = range(start, start + count)
                assert not (used() | withheld) & set(run)
                taken.append(run)
        elif action < 0.85 and taken:
            run = taken.pop(rng.randrange(len(taken)))
            if rng.random() < 0.7:
                allocator.note_written(run.start, len(run))
                written |= set(run)
            allocator.free(run.start, len(run))
        elif action < 0.95:
            allocator.withhold()
            withheld |= set(blocks) - used() - written
        else:
            allocator.release()
            withheld.clear()
        assert allocator.withheld_blocks == len(withheld)
        assert allocator.free_blocks == len(blocks) - len(used()) - len(withheld)
        for block in (blocks[0], blocks[-1], rng.choice(blocks)):
            found = allocator.withheld_block(block)
            assert found == block if block in withheld else found in withheld or not withheld
    allocator.release()
    for run in taken:
        allocator.free(run.start, len(run))
    assert allocator.free_blocks == len(blocks)
    assert allocator.allocate(12 * frame) == FIRST


def test_a_block_outside_is_not_withheld() -> None:
    allocator = FrameAllocator(range(10), 5)
    assert allocator.withheld_block(3) is None
    allocator.withhold()
    assert allocator.withheld_block(-1) == 0
    assert allocator.withheld_block(99) == 0


def test_slots_that_were_never_taken_are_withheld() -> None:
    slots = SlotAllocator(10)
    assert [slots.allocate() for _ in range(4)] == [0, 1, 2, 3]
    slots.free(3)
    slots.free(1)
    slots.withhold()
    assert (slots.slots, slots.free_slots) == (4, 2)
    assert [slots.allocate() for _ in range(3)] == [1, 3, None]
    slots.free(2)
    assert slots.free_slots == 1
    slots.release()
    assert (slots.slots, slots.free_slots) == (10, 7)
    assert [slots.allocate() for _ in range(2)] == [2, 4]


def test_recovered_slots_were_taken() -> None:
    slots = SlotAllocator(10)
    slots.mark(np.array([2, 5]))
    slots.withhold()
    assert (slots.slots, slots.free_slots) == (6, 4)
    slots.mark(np.array([], np.int64))
    assert slots.free_slots == 4


def test_a_stock_counts_what_is_kept_free() -> None:
    stock = Stock(1000, 500)
    assert (stock.used, stock.reserve(0.03)) == (500, 30)
    assert stock.used_share(0.0) == 0.5
    assert stock.used_share(0.03) == pytest.approx(500 / 970)
    assert Stock(1000, 10).used_share(0.03) == 1.0
    assert Stock(0, 0).used_share(0.03) == 1.0


def test_what_to_evict_is_what_is_missing_and_at_least_a_batch() -> None:
    assert Stock(1000, 30).to_evict(0.03, 0, 0.01) == 0
    assert Stock(1000, 29).to_evict(0.03, 0, 0.01) == 10
    assert Stock(1000, 0).to_evict(0.03, 0, 0.01) == 30
    assert Stock(1000, 0).to_evict(0.03, 25, 0.01) == 10
    assert Stock(1000, 0).to_evict(0.03, 30, 0.01) == 0


@pytest.mark.parametrize(
    ("blocks", "inodes", "share", "limit"),
    [(90, 20, 0.9, "blocks"), (20, 90, 0.9, "inodes"), (0, 0, 0.0, "blocks")],
)
def test_the_larger_share_is_the_limit(blocks: int, inodes: int, share: float, limit: str) -> None:
    stocks = Stocks(Stock(100, 100 - blocks), Stock(100, 100 - inodes))
    assert (stocks.used_share(0.0), stocks.limit) == (share, limit)
