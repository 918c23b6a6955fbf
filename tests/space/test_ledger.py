"""The ledger of blocks, against a dictionary."""

import random

import pytest

from fx100_lmcache.space.ledger import BlockLedger, Use

TOTAL = 200

ALLOWED = {
    ("reserve", Use.FREE): Use.RESERVED,
    ("publish", Use.RESERVED): Use.LIVE,
    ("retire", Use.LIVE): Use.ERASING,
    ("erase", Use.RESERVED): Use.ERASING,
    ("erase", Use.QUARANTINED): Use.ERASING,
    ("keep_for_readers", Use.ERASING): Use.READING,
    ("keep_for_readers", Use.QUARANTINED): Use.READING,
    ("quarantine", Use.RESERVED): Use.QUARANTINED,
    ("quarantine", Use.ERASING): Use.QUARANTINED,
    ("free", Use.RESERVED): Use.FREE,
    ("free", Use.ERASING): Use.FREE,
    ("free", Use.READING): Use.FREE,
    ("free", Use.QUARANTINED): Use.FREE,
}


def blocks_of(uses: dict[int, Use], sizes: dict[int, int], *wanted: Use) -> int:
    return sum(sizes[row] for row, use in uses.items() if use in wanted)


@pytest.mark.parametrize("seed", range(10))
def test_every_block_is_counted_once_at_every_moment(seed: int) -> None:
    rng, ledger = random.Random(seed), BlockLedger(TOTAL)
    uses = dict.fromkeys(range(20), Use.FREE)
    sizes = {row: rng.randrange(1, 10) for row in uses}
    for _ in range(500):
        row = rng.choice(list(uses))
        step, new = rng.choice([(s, to) for (s, old), to in ALLOWED.items() if old is uses[row]])
        if step in ("reserve", "retire"):
            getattr(ledger, step)(row, sizes[row])
        else:
            getattr(ledger, step)(row)
        uses[row] = new
        assert ledger.use(row) is (Use.FREE if new is Use.LIVE else new)
        free = TOTAL - blocks_of(uses, sizes, *(use for use in Use if use is not Use.FREE))
        entries = blocks_of(uses, sizes, Use.LIVE, Use.READING, Use.ERASING)
        ledger.check(free, entries)
        assert ledger.free_blocks == free
        assert ledger.quarantined_blocks == blocks_of(uses, sizes, Use.QUARANTINED)
        assert ledger.erasing_blocks == blocks_of(uses, sizes, Use.ERASING)
        assert ledger.reading_blocks == blocks_of(uses, sizes, Use.READING)
        assert ledger.free_blocks + ledger.used_blocks + ledger.quarantined_blocks == TOTAL
        assert ledger.erases_in_flight == sum(use is Use.ERASING for use in uses.values())


@pytest.mark.parametrize("step", sorted({step for step, _ in ALLOWED} - {"retire"}))
@pytest.mark.parametrize("use", [use for use in Use if use is not Use.LIVE])
def test_a_step_that_does_not_follow_is_refused_and_changes_nothing(step: str, use: Use) -> None:
    """Freed twice, published twice, erased without having been anything: defects of ours."""
    if (step, use) in ALLOWED:
        return
    ledger = BlockLedger(TOTAL)
    if use is not Use.FREE:
        ledger.reserve(7, 5)
    if use in (Use.ERASING, Use.READING):
        ledger.erase(7)
    if use is Use.READING:
        ledger.keep_for_readers(7)
    if use is Use.QUARANTINED:
        ledger.quarantine(7)
    with pytest.raises(AssertionError):
        getattr(ledger, step)(7, *([5] if step == "reserve" else []))
    assert ledger.use(7) is use
    free = TOTAL if use is Use.FREE else TOTAL - 5
    ledger.check(free, TOTAL - free)


def test_blocks_that_are_nowhere_are_noticed() -> None:
    ledger = BlockLedger(TOTAL)
    ledger.recover(10)
    ledger.reserve(1, 5)
    ledger.check(TOTAL - 15, 10)
    for free, entries in ((TOTAL - 14, 10), (TOTAL - 15, 9), (TOTAL - 15, 16)):
        with pytest.raises(AssertionError):
            ledger.check(free, entries)


def test_stale_inodes_have_no_blocks() -> None:
    ledger = BlockLedger(TOTAL)
    ledger.erase_stale(3)
    assert (ledger.use(3), ledger.erases_in_flight, ledger.free_blocks) == (Use.ERASING, 1, TOTAL)
    ledger.free(3)
    assert ledger.erases_in_flight == 0
