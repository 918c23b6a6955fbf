"""The catalog, its index and its piece table, against dictionaries."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fx100_lmcache.catalog import Catalog
from fx100_lmcache.catalog.eviction import LIVE
from fx100_lmcache.catalog.index import DigestIndex, as_words
from fx100_lmcache.catalog.pieces import PieceTable
from support.steps import counted_steps

ROWS = 64


def digest(number: int) -> bytes:
    return b"scope-of-16-byte" + number.to_bytes(32, "little")


def rows_of(*rows: int) -> Any:
    return np.array(rows, np.int64)


def add(
    catalog: Catalog, row: int, number: int, *, length: int = 10, blocks: int = 1, **how: Any
) -> None:
    pieces = how.pop("pieces", ((number + 1, number + 2),))
    catalog.add(
        row,
        digest(number),
        length=length,
        blocks=blocks,
        meta=0,
        members=how.pop("members", 1),
        pieces=pieces,
    )


class CatalogMachine(RuleBasedStateMachine):
    """Random use of the catalog, compared with a dictionary of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(ROWS)
        self.live: dict[int, int] = {}  # number -> row
        self.dying: dict[int, int] = {}  # row -> number
        self.readers: dict[int, int] = {}
        self.pieces: dict[int, list[tuple[int, int]]] = {}

    @rule(number=st.integers(0, 99), row=st.integers(0, ROWS - 1), count=st.integers(1, 6))
    def publish(self, number: int, row: int, count: int) -> None:
        if number in self.live or row in self.dying or row in self.live.values():
            return
        self.pieces[row] = [(number * 100 + n + 1, n) for n in range(count)]
        add(self.catalog, row, number, length=number + 1, blocks=count, pieces=self.pieces[row])
        self.live[number] = row

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        row = self.live.pop(number)
        self.catalog.drop(row)
        self.dying[row] = number

    @precondition(lambda self: self.dying)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.dying)))
        if not self.readers.get(row):
            self.catalog.release(row)
            del self.dying[row]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        row = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.catalog.start_reading([row])
        self.readers[row] = self.readers.get(row, 0) + 1

    @precondition(lambda self: any(self.readers.values()))
    @rule(data=st.data())
    def stop_reading(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(r for r, n in self.readers.items() if n)))
        self.readers[row] -= 1
        last = self.catalog.stop_reading([row]) == [row]
        assert last == (row in self.dying and self.readers[row] == 0)

    @rule()
    def drop_all(self) -> None:
        dropped = self.catalog.drop_all()
        rows = {number: (row, len(self.pieces[row])) for number, row in self.live.items()}
        assert sorted(dropped) == sorted((r, digest(n), count) for n, (r, count) in rows.items())
        self.dying |= {row: number for number, row in self.live.items()}
        self.live.clear()

    @rule(asked=st.lists(st.integers(0, 120), max_size=30))
    def find(self, asked: list[int]) -> None:
        found = self.catalog.find([digest(n) for n in asked]).tolist()
        assert found == [self.live.get(n, -1) for n in asked]

    @invariant()
    def books_are_right(self) -> None:
        assert len(self.catalog) == len(self.live)
        assert self.catalog.live_bytes == sum(number + 1 for number in self.live)
        held = [*self.live.values(), *self.dying]
        assert self.catalog.used_blocks() == sum(len(self.pieces[row]) for row in held)
        assert self.catalog.live_rows() == sorted(self.live.values())
        for number, row in self.live.items():
            entry = self.catalog.entry(row)
            assert (entry.digest, entry.length) == (digest(number), number + 1)
            assert list(entry.pieces) == self.pieces[row]


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


# The index


def index_of(count: int) -> tuple[DigestIndex, Any]:
    column = np.zeros((count, 6), np.uint64)
    column[:] = as_words(b"".join(digest(n) for n in range(count)))
    return DigestIndex(column), column


@pytest.mark.parametrize("one_by_one", [False, True])
def test_index_grows(one_by_one: bool) -> None:
    index, column = index_of(20_000)
    if one_by_one:
        for row in range(3000):
            index.insert(rows_of(row))
        index.insert(np.arange(3000, 20_000))
    else:
        index.insert(np.arange(20_000))
    order = np.random.default_rng(1).permutation(20_000)
    assert (index.find(column[order]) == order).all()
    assert len(index) == 20_000


def test_index_stays_small_under_churn() -> None:
    """Deleted slots are reused or swept; the table does not grow for ever."""
    index, column = index_of(4000)
    index.insert(np.arange(100))
    for row in range(100, 4000):
        index.insert(rows_of(row))
        index.delete(row - 100)
        assert len(index) == 100
    assert len(index._table) == 1024
    found = index.find(column)
    assert (found[-100:] == np.arange(3900, 4000)).all()
    assert (found[:-100] == -1).all()


def test_find_of_duplicates_and_of_ten_thousand() -> None:
    index, column = index_of(10_000)
    index.insert(np.arange(0, 10_000, 2))
    asked = np.repeat(np.arange(5000), 2)
    found = index.find(column[asked])
    assert (found == np.where(asked % 2 == 0, asked, -1)).all()
    assert len(index.find(column[:0])) == 0


@pytest.mark.parametrize("word", range(2, 6))
def test_hashes_that_differ_in_one_word_only_do_not_pile_up(word: int) -> None:
    """Chunk hashes need not be random: a test's, or a padded counter, is not."""
    column = np.zeros((4000, 6), np.uint64)
    column[:, word] = np.arange(4000)
    index = DigestIndex(column)
    assert len(np.unique(index._home(column))) > 500  # of 1,024 places
    column[:, word] = np.arange(4000, dtype=np.uint64) << np.uint64(52)
    assert len(np.unique(index._home(column))) > 500


# Pieces


def test_pieces_against_a_dictionary() -> None:
    table, kept, rng = PieceTable(), dict[int, list[tuple[int, int]]](), random.Random(5)
    for _ in range(4000):
        if kept and rng.random() < 0.45:
            at = rng.choice(list(kept))
            table.free(at, len(kept.pop(at)))
        else:
            pieces = [
                (rng.getrandbits(64), rng.getrandbits(64)) for _ in range(rng.randrange(1, 9))
            ]
            kept[table.add(pieces)] = pieces
    for at, pieces in kept.items():
        locations, checksums = table.read(at, len(pieces))
        assert list(zip(locations.tolist(), checksums.tolist(), strict=True)) == pieces
    places = sorted((at, len(pieces)) for at, pieces in kept.items())
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))


def test_freed_runs_are_reused() -> None:
    table = PieceTable()
    runs = [table.add([(n, n)] * 8) for n in range(2000)]
    for at in runs:
        table.free(at, 8)
    assert sorted(table.add([(1, 1)] * 8) for _ in range(2000)) == sorted(runs)


# Pins and eviction order


def catalog_of(count: int, **how: Any) -> Catalog:
    catalog = Catalog(ROWS)
    for number in range(count):
        add(catalog, number, number, **how)
    return catalog


def test_victims_are_the_least_recently_used_and_no_more_than_needed() -> None:
    catalog = catalog_of(6, blocks=2)
    catalog.touch(rows_of(0, 2))
    assert catalog.victims(1, 0.0, 0) == [1]
    assert catalog.victims(4, 0.0, 0) == [1, 3]
    assert catalog.victims(5, 0.0, 0) == [1, 3, 4]
    assert catalog.victims(99, 0.0, 0) == [1, 3, 4, 5, 2, 0]


def test_a_prefix_is_kept_longer_than_its_suffix() -> None:
    """Without its first chunk, what is left of a conversation cannot be used."""
    catalog = catalog_of(5)
    catalog.touch(rows_of(0, 1, 2, 3, 4))
    assert catalog.victims(5, 0.0, 0) == [4, 3, 2, 1, 0]
    rows, used_at = catalog.ages()
    assert rows[np.argsort(used_at)].tolist() == [4, 3, 2, 1, 0]


def test_live_rows_are_found_in_any_stretch_of_a_large_catalog() -> None:
    catalog = Catalog(200_000)
    catalog._top = 200_000
    live = [*range(1, 65_530), *range(150_000, 200_000)]
    catalog._state[live] = LIVE
    assert catalog.live_rows() == live
    assert catalog.live_rows(65_000, 600) == [*range(65_000, 65_530), *range(150_000, 150_070)]
    assert catalog.live_rows(149_999, 2) == [150_000, 150_001]
    assert catalog.live_rows(200_000, 5) == catalog.live_rows(10**17, 5) == []


def test_victims_pass_over_what_is_pinned_read_or_on_a_member_that_is_down() -> None:
    catalog = catalog_of(3)
    add(catalog, 3, 3, members=0b110)
    catalog.pin(rows_of(0), 10.0, 20)
    catalog.start_reading([1])
    assert catalog.victims(99, 10.0, 0b100) == [2]
    assert catalog.victims(99, 20.0, 0) == [0, 2, 3]  # the pin has expired
    catalog.stop_reading([1])
    assert catalog.victims(99, 10.0, 0) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(40))
def test_victims_against_a_list_sorted_anew_each_time(seed: int) -> None:
    """Whatever is pinned, read, away, used or gone meanwhile, and whatever comes back."""
    rng, catalog, now = random.Random(seed), Catalog(ROWS), 100.0
    down, numbers = 0, itertools.count()
    live: set[int] = set()
    readers: dict[int, int] = dict.fromkeys(range(ROWS), 0)
    for _ in range(300):
        some = rng.sample(sorted(live), min(len(live), 3))
        what = rng.random()
        if what < 0.3 and len(live) < ROWS:
            row = rng.choice(sorted(set(range(ROWS)) - live))
            if not readers[row]:
                members = rng.choice((0b1, 0b10, 0b11))
                add(catalog, row, next(numbers), blocks=rng.randrange(1, 4), members=members)
                live.add(row)
        elif what < 0.4:
            catalog.touch(rows_of(*some))
        elif what < 0.5:
            catalog.pin(rows_of(*some), now, int(now) + rng.randrange(1, 30))
        elif what < 0.55:
            catalog.unpin(rows_of(*some))
        elif what < 0.65:
            catalog.start_reading(some)
            for row in some:
                readers[row] += 1
        elif what < 0.75:
            ended = [row for row in readers if readers[row] and rng.random() < 0.5]
            assert not catalog.stop_reading(ended)
            for row in ended:
                readers[row] -= 1
        elif what < 0.8:
            now += rng.randrange(20)
        elif what < 0.85:
            down = rng.choice((0, 0, 0b1, 0b10))
        elif what < 0.87 and not any(readers.values()):
            for row, _, _ in catalog.drop_all():
                catalog.release(row)
            live.clear()
        blocks, at_most = rng.randrange(1, 30), rng.choice((1, 3, ROWS))
        found = catalog.victims(blocks, now, down, at_most)
        expected: list[int] = []
        freed = 0
        rows, used_at = catalog.ages()
        for row in rows[np.argsort(used_at, kind="stable")].tolist():
            if freed < blocks and len(expected) < at_most and catalog.evictable(row, now, down):
                expected.append(row)
                freed += catalog.blocks(row)
        assert found == expected
        for row in found if rng.random() < 0.3 else ():
            catalog.drop(row)
            catalog.release(row)
            live.discard(row)


def many(count: int, rows: int, **how: Any) -> Catalog:
    """Make a catalog of many entries; those on member 1 come first and are the oldest."""
    catalog = Catalog(rows)
    every = np.arange(rows, dtype=np.int64)
    words = np.zeros((rows, 6), np.uint64)
    words[:, 2] = every
    ones = np.ones(rows, np.int64)
    pieces = np.ones((rows, 1), np.uint64)
    catalog.add_recovered(
        every,
        words,
        length=ones,
        blocks=ones,
        meta=0 * ones,
        members=np.where(every < count, 2, 1),
        locations=pieces,
        checksums=pieces,
        piece_counts=ones,
        age=every,
    )
    return catalog


def pin_them(catalog: Catalog, rows: Any) -> int:
    catalog.pin(rows, 0.0, 300)
    return 0


def read_them(catalog: Catalog, rows: Any) -> int:
    catalog.start_reading(rows.tolist())
    return 0


def take_their_member_away(catalog: Catalog, rows: Any) -> int:
    return 0b10


@pytest.mark.parametrize("keep", [pin_them, read_them, take_their_member_away])
def test_a_round_of_eviction_costs_the_same_whatever_may_not_go(
    keep: Callable[[Catalog, Any], int],
) -> None:
    """Python steps of 50 rounds beside 1,000 and 50,000 entries that have to stay."""
    steps = []
    for count in (1_000, 50_000):
        catalog = many(count, count + 2_000)
        down = keep(catalog, np.arange(count))
        with counted_steps() as taken:
            for number in range(50):
                rows = catalog.victims(4, 1.0, down)
                assert rows == list(range(count + 4 * number, count + 4 * number + 4))
                for row in rows:
                    catalog.drop(row)
        steps.append(taken[0])
    assert steps[1] <= 1.1 * steps[0]


def test_pins_that_run_out_together_come_back_in_order() -> None:
    count = 5_000
    catalog = many(0, count)
    catalog.pin(np.arange(count), 0.0, 300)
    assert catalog.victims(9, 299.0, 0) == []
    assert catalog.victims(3, 300.0, 0) == [0, 1, 2]
    catalog.pin(np.arange(count), 300.0, 600)
    assert catalog.victims(1, 301.0, 0) == []
    assert catalog.unpin(np.array([7, 5])) == 2
    assert catalog.victims(9, 301.0, 0) == [5, 7]


def test_more_readers_than_16_bits_count() -> None:
    """An entry that 65,536 reads are on at once is still being read."""
    catalog = catalog_of(1)
    catalog.start_reading([0] * 65_536)
    assert catalog.being_read(0)
    catalog.drop(0)
    assert catalog.stop_reading([0] * 65_535) == []
    assert catalog.stop_reading([0]) == [0]


def test_victims_of_consecutive_rounds() -> None:
    """Each round goes on where the last one ended, whatever was used in between."""
    catalog = catalog_of(40)
    gone: list[int] = []
    rng = random.Random(2)
    expected = list(range(40))
    for _ in range(10):
        used = rng.choice(expected)
        catalog.touch(rows_of(used))
        expected.remove(used)
        expected.append(used)
        for row in catalog.victims(2, 0.0, 0):
            catalog.drop(row)
            gone.append(row)
            assert expected.pop(0) == row
    assert len(set(gone)) == 20


def test_counted_pins() -> None:
    catalog = catalog_of(2)
    catalog.pin(rows_of(0, 0, 1), 0.0, 300)
    assert int(catalog._pins.sum()) == 3
    assert catalog.unpin(rows_of(0)) == 1
    assert catalog.pinned(0, 299.0)
    assert catalog.unpin(rows_of(0, 0, 1)) == 2  # one of them was one too many
    assert not catalog.pinned(0, 0.0)
    assert not catalog.pinned(1, 0.0)
    assert (int(catalog._pins.sum()), catalog.unpin(rows_of(0))) == (0, 0)  # never below zero


def test_expired_pins_do_not_come_back_with_a_new_one() -> None:
    """A pin that was never given back must not outlive its time to live."""
    catalog = catalog_of(1)
    catalog.pin(rows_of(0), 0.0, 300)
    assert not catalog.pinned(0, 300.0)
    catalog.pin(rows_of(0), 400.0, 700)
    assert catalog.unpin(rows_of(0)) == 1
    assert not catalog.pinned(0, 401.0)


def test_100_000_pins_on_one_row() -> None:
    catalog = catalog_of(1)
    catalog.pin(np.zeros(100_000, np.int64), 0.0, 300)
    assert int(catalog._pins.sum()) == 100_000
    assert catalog.unpin(rows_of(0)) == 1
    assert catalog.pinned(0, 1.0)


def test_dropping_ends_all_pins() -> None:
    catalog = catalog_of(1)
    catalog.pin(rows_of(0), 0.0, 300)
    catalog.drop(0)
    catalog.release(0)
    add(catalog, 0, 7)
    assert not catalog.pinned(0, 0.0)


def test_metadata_is_kept_once() -> None:
    catalog = Catalog(4)
    numbers = [catalog.intern_meta(meta) for meta in (b"a", b"b", b"a")]
    assert (numbers, catalog.metas) == ([0, 1, 0], [b"a", b"b"])
