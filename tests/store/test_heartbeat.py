"""The thread that renews the claims of an open store: what it survives, and when it ends."""

import gc
import os
import threading
import time
from dataclasses import replace

import pytest

from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES
from fx100_lmcache.store import Store
from fx100_lmcache.store.heartbeat import Heartbeat
from fx100_lmcache.testing.harness import Rig
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.volume import claim as rules
from fx100_lmcache.volume.volume import assemble
from support.store import chunk, options
from support.store_claims import taken_over


@pytest.fixture(autouse=True)
def _claims_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SETTLE_S", 1.0)


class Beating:
    """Counts; fails every other time."""

    def __init__(self) -> None:
        self.beats = self.failures = 0
        self.often = threading.Event()

    def beat(self) -> float | None:
        self.beats += 1
        if self.beats >= 6:
            self.often.set()
            return None if self.beats == 8 else 0.0
        if self.beats % 2:
            raise OSError("injected")
        return 0.0

    def beat_failed(self, problem: Exception) -> None:
        assert "injected" in str(problem)
        self.failures += 1


def ended(heartbeat: Heartbeat) -> bool:
    until = time.monotonic() + 20
    while heartbeat.running and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()  # it may have held its owner while this was dropped
    return not heartbeat.running


def test_the_heartbeat_survives_errors_and_ends_when_there_is_nothing_to_renew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fx100_lmcache.store.heartbeat._AFTER_A_FAILURE_S", 0.0)
    owner = Beating()
    heartbeat = Heartbeat(owner)
    heartbeat.start()
    assert owner.often.wait(20)
    assert ended(heartbeat)
    assert (owner.beats, owner.failures) == (8, 3)


def threaded(store: Rig) -> Store:
    engine = LaneEngine(store.members, EngineOptions(reader_threads=1, native=False))
    return Store(store.store.volume, engine, options=store.options)


def test_a_store_renews_by_itself_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SETTLE_S", 0.0)
    timing = rules.ClaimTiming(heartbeat_s=0.01)
    rig = Rig.fresh(options=replace(options(), claim_timing=timing))
    rig.store.close(0.1)
    store = threaded(rig)
    until = time.monotonic() + 20
    while store.counts()["claim_renewals"] < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert store.counts()["claim_renewals"] >= 5
    assert store._heartbeat.running
    child = os.fork()
    if child == 0:  # no thread of it, and the copy writes nothing
        os._exit(store._heartbeat.running or store.may_write or store.beat() is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert store.close() == 0
    assert ended(store._heartbeat)


def test_the_heartbeat_ends_with_a_store_that_was_lost_or_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "SETTLE_S", 0.0)
    timing = rules.ClaimTiming(heartbeat_s=0.01)
    rig = Rig.fresh(options=replace(options(), claim_timing=timing))
    rig.store.close(0.1)
    lost = threaded(rig)
    taken_over(rig)
    assert ended(lost._heartbeat)
    assert lost.counts()["claim_lost"] == 1
    lost.close()
    rig.members[0].media[4096 : 4096 + 2 * CLAIM_BYTES] = bytes(2 * CLAIM_BYTES)
    rig.members[1].media[4096 : 4096 + 2 * CLAIM_BYTES] = bytes(2 * CLAIM_BYTES)
    dropped = threaded(rig)
    heartbeat = dropped._heartbeat
    dropped._engine.close(1.0)
    del dropped
    assert ended(heartbeat)


def test_a_renewal_does_not_wait_behind_bulk_writes() -> None:
    rig = Rig.fresh(options=options())
    rig.store.close(0.1)
    gate = threading.Event()

    class Slow(MemoryMember):
        def write_from(self, offset: int, buffer: memoryview) -> int:
            if offset >= rig.store.volume.geometry.block_offset(0, 0):
                gate.wait(30)
            return super().write_from(offset, buffer)

    for index, member in enumerate(rig.members):
        slow = Slow(member.size_bytes, index=index)
        slow.media = member.media
        rig.members[index] = slow
    volume = assemble(rig.members)
    engine = LaneEngine(volume.members, EngineOptions(reader_threads=1, native=False))
    store = rig.store = Store(volume, engine, options=rig.options, heartbeat=False)
    waiting = [rig.start_put(name, chunk(name)) for name in "abcdefgh"]
    before = store.counts()["claim_renewals"]
    store.beat()
    until = time.monotonic() + 20
    while store.counts()["claim_renewals"] == before and time.monotonic() < until:
        time.sleep(0.01)
    assert store.counts()["claim_renewals"] > before
    assert waiting == [[]] * 8
    gate.set()
    store.close()
