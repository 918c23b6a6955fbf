"""Every crash that 40 random workloads can meet, 500 states each: 20,000 in all."""

import logging
from collections.abc import Iterator

import pytest

from fx100_lmcache.testing.crash import enumerate_crashes
from fx100_lmcache.testing.workload import Workload

WORKLOADS, STATES = 40, 500


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("fx100_lmcache")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("seed", range(WORKLOADS))
def test_no_crash_gives_wrong_bytes_or_loses_what_was_acknowledged(seed: int) -> None:
    members, size_bytes = (2, 192 * 1024) if seed % 2 else (3, 160 * 1024)
    recording = Workload(seed, members=members, size_bytes=size_bytes).run(50)
    assert enumerate_crashes(recording, seed=seed, limit=STATES) == STATES


def test_workloads_reach_the_hard_parts() -> None:
    """The states mean something only if the workloads evict, clear, format and stall."""
    operations: set[str] = set()
    evictions = stalls = 0
    for seed in range(8):
        workload = Workload(seed)
        recording = workload.run(50)
        operations |= set(recording.log)
        evictions += sum(
            change.value is None
            for changes in recording.oracle.changes.values()
            for change in changes
        )
        stalls += recording.log.count("stalled_put")
    assert operations == {
        *("put", "replace", "remove", "stalled_put", "release", "clear", "kill", "close"),
        "format",
    }
    assert evictions > 50
    assert stalls > 8
