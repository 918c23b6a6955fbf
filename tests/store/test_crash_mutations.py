"""Crash enumeration can fail: with each protection switched off it finds a counter-example."""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from fx100_lmcache.engine.jobs import Job, Transfer
from fx100_lmcache.store import load
from fx100_lmcache.store.erase import Eraser
from fx100_lmcache.store.put import Putter
from fx100_lmcache.testing.crash import enumerate_crashes
from fx100_lmcache.testing.workload import Workload
from fx100_lmcache.volume import recovery

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("fx100_lmcache")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def without_checksums(patch: Patch) -> None:
    patch.setattr(load, "Transfer", lambda *where, **_: Transfer(*where[:5]))


def without_generation(patch: Patch) -> None:
    join = recovery._join

    def all_current(*arguments: Any) -> recovery.Recovered:
        found = join(*arguments)
        found.generation = np.ones_like(found.generation)
        return found

    patch.setattr(recovery, "_join", all_current)


def without_publish_after_write(patch: Patch) -> None:
    data_job = Putter._data_job

    def inode_first(self: Putter, put: Any, extent: Any) -> Job:
        job = data_job(self, put, extent)
        for t in job.transfers:
            t.checksum = xxhash.xxh3_64_intdigest(t.buffer.view[t.start : t.start + t.length])
        written: Any = SimpleNamespace(ok=True, transfers=job.transfers, finished_at=0.0)
        self._data_done(put, written)
        return Job(True, job.transfers, put.deadline, lambda _: None)

    patch.setattr(Putter, "_data_job", inode_first)


def without_zero_before_reuse(patch: Patch) -> None:
    patch.setattr(Eraser, "_erase", Eraser._gone)


def without_first_claim_wins(patch: Patch) -> None:
    patch.setattr(recovery, "resolve", lambda locations, contested: [])


def without_quarantine(patch: Patch) -> None:
    failed = Putter._failed

    def give_back_at_once(self: Putter, put: Any, job: Job, **how: Any) -> None:
        for transfer in job.transfers:
            transfer.in_kernel = False
        failed(self, put, job, **how)

    patch.setattr(Putter, "_failed", give_back_at_once)
    patch.setattr(Putter, "_late", lambda *_, **__: None)


@pytest.mark.parametrize(
    "switch_off",
    [
        without_checksums,
        without_generation,
        without_publish_after_write,
        without_zero_before_reuse,
        without_first_claim_wins,
        without_quarantine,
    ],
)
def test_counter_example_is_found(
    switch_off: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(monkeypatch)
    with pytest.raises(AssertionError):  # a Violation, or the store's own assertion
        _enumerate()


def _enumerate() -> None:
    for seed in range(40):
        enumerate_crashes(Workload(seed).run(50), seed=seed, limit=400)
