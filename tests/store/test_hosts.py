"""Two and three hosts on one volume, with clocks, pauses, deaths and late writes."""

import logging
from collections.abc import Iterator

import pytest

from fx100_lmcache.testing.host import RATES, Odds
from fx100_lmcache.testing.hosts import VARIETIES, World, run_schedules
from fx100_lmcache.volume import claim
from fx100_lmcache.volume.claim import ClaimTiming

SETTLE_S = 1.0  # as it is where nobody changed it for tests
SCHEDULES = 180  # of each part; the command runs as many as one likes


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("fx100_lmcache")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    monkeypatch.setattr(claim, "SETTLE_S", SETTLE_S)  # other hosts open at the same moment
    yield
    logger.setLevel(before)


def test_no_schedule_breaks_a_promise_and_all_hard_parts_are_met() -> None:
    counts = run_schedules(range(SCHEDULES))
    assert counts["schedules"] == SCHEDULES
    hard: tuple[str, ...] = (
        "opened: at once",
        "opened: watch",
        "opened: operator",
        "refused",
        "closes",
        "crashes",
    )
    hard += ("pauses", "late writes", "late claims", "acknowledged", "loaded")
    hard += ("not stored: claim_lost", "not stored: claim_stale")
    assert {name for name in hard if counts[name] < 10} == set()


def test_the_same_seed_gives_the_same_schedule() -> None:
    for kind, odds in enumerate(VARIETIES):
        first, second = (World(kind, odds=odds).run() for _ in range(2))
        assert first == second


def test_without_pauses_no_owner_that_lives_loses_its_shard() -> None:
    calm = Odds(pause=0.0, crash=0.0, slow=0.0, late=0.0, late_claim=0.0, operator=0.0)
    for seed in range(20):
        counts = World(seed, hosts=3, odds=calm).run()
        assert counts["not stored: claim_lost"] == counts["not stored: claim_stale"] == 0
        assert counts["acknowledged"] > 0


def test_what_the_model_assumes_of_clocks_fits_the_timing() -> None:
    """A slow owner and a fast watcher, at rates far worse than any real clock's."""
    slow, fast = RATES
    timing = ClaimTiming()
    assert (timing.lease_s + timing.renew_within_s) / slow < timing.watch_s / fast
    assert claim.WRITE_WITHIN_S / slow < SETTLE_S / fast
