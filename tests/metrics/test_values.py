import logging
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fx100_lmcache import metrics
from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.config import MetricsConfig
from fx100_lmcache.metrics import COUNTERS, GAUGES, MetricsPublisher, publish
from fx100_lmcache.store import LoadItem, PutItem
from fx100_lmcache.testing.harness import META, Rig, digest_of, value_of
from fx100_lmcache.testing.memory import Fault

VOLUME = "5a5e4b5e-0000-4000-8000-00000000000a"
LABELS = ("worker", "model", "3", VOLUME, "2")
NAMES = ("role", "model_name", "worker_id", "volume", "shard")


class Shown:
    """A publisher with a registry of its own."""

    def __init__(self, rig: Rig, **extra: Any) -> None:
        self.extra = extra
        self.rig = rig
        self.registry = CollectorRegistry()
        self.publisher = MetricsPublisher(self.status, LABELS, registry=self.registry)

    def status(self) -> Mapping[str, Any]:
        return {**self.rig.store.status(), **self.extra}

    def __call__(self, name: str, **labels: str) -> float | None:
        common = dict(zip(NAMES, LABELS, strict=True))
        return self.registry.get_sample_value(name, {**common, **labels})

    def update(self) -> None:
        self.publisher.update()


@pytest.fixture
def rig() -> Rig:
    return Rig.fresh()


@pytest.fixture
def shown(rig: Rig) -> Iterator[Any]:
    made = Shown(rig)
    yield made
    made.publisher.close()


def test_every_series_is_there_at_zero_before_first_use(shown: Shown) -> None:
    for metric in COUNTERS.values():
        if metric.label == "member":
            assert shown(f"{metric.name}_total", member="memory0") == 0
        for value in metric.values:
            renewed = value == "claim_renewals"  # once, to open
            assert shown(f"{metric.name}_total", **{metric.label: value}) == renewed, value
        if not metric.label:
            assert shown(f"{metric.name}_total") == 0
    for metric in GAUGES.values():
        if metric.label == "member":
            assert shown(metric.name, member="memory1") is not None
        for value in metric.values:
            assert shown(metric.name, **{metric.label: value}) is not None
        if not metric.label:
            assert shown(metric.name) is not None


def test_what_the_store_does_is_counted(shown: Shown, rig: Rig) -> None:
    data = value_of("a", 1, 10_000)
    assert rig.put("a", data).stored
    assert rig.put("a", data).stored
    assert rig.get("a") == data
    assert rig.get("b") is None
    assert rig.store.lookup([digest_of("a"), digest_of("b")]).tolist() == [True, False]
    shown.update()
    assert shown("fx100_put_objects_total", outcome="stored") == 1
    assert shown("fx100_put_objects_total", outcome="present") == 1
    assert shown("fx100_written_bytes_total") == 10_000
    assert shown("fx100_load_objects_total", outcome="hit") == 1
    assert shown("fx100_load_objects_total", outcome="miss_absent") == 1
    assert shown("fx100_read_bytes_total") == 10_000
    assert shown("fx100_lookup_objects_total", outcome="hit") == 1
    assert shown("fx100_lookup_objects_total", outcome="miss") == 1
    assert shown("fx100_entries") == 1
    assert shown("fx100_live_bytes") == 10_000
    assert shown("fx100_healthy") == 1
    used, free = shown("fx100_space_bytes", use="used"), shown("fx100_space_bytes", use="free")
    assert used == 3 * 4096
    assert free is not None
    assert used + free == rig.store.space().total * 4096
    assert shown("fx100_member_up", member="memory0") == 1
    assert shown("fx100_member_direct_io", member="memory0") == 0


def test_counting_twice_the_same_changes_nothing(shown: Shown, rig: Rig) -> None:
    rig.put("a", value_of("a", 1, 100))
    for _ in range(3):
        shown.update()
    assert shown("fx100_put_objects_total", outcome="stored") == 1
    rig.put("b", value_of("b", 1, 100))
    shown.update()
    assert shown("fx100_put_objects_total", outcome="stored") == 2


def test_what_is_on_its_way_is_shown_with_its_time(shown: Shown, rig: Rig) -> None:
    rig.members[0].faults.append(Fault("stall", "write"))
    data = value_of("a", 1, 40_000)
    results = rig.start_put("a", data)
    assert not results
    shown.update()
    assert shown("fx100_write_backlog_bytes") == 40_000
    assert shown("fx100_jobs_in_flight") == 1
    rig.clock.advance(2.5)
    rig.lanes.release()
    assert results[0].stored
    shown.update()
    assert shown("fx100_write_backlog_bytes") == 0
    assert shown("fx100_jobs_in_flight") == 0
    assert shown("fx100_write_seconds_total") == pytest.approx(2.5)
    rig.members[0].faults.append(Fault("stall", "read"))
    rig.members[1].faults.append(Fault("stall", "read"))
    read_slowly(rig)
    shown.update()
    assert shown("fx100_read_seconds_total") == pytest.approx(1.5)


def read_slowly(rig: Rig) -> None:
    results: list[Any] = []
    buffer = zero_buffer(40_960)
    rig.store.load([LoadItem(digest_of("a"), buffer, lambda _m, _n: True)], results.extend)
    assert not results
    assert rig.store.status()["jobs_in_flight"] == 1
    rig.clock.advance(1.5)
    rig.lanes.release()
    assert results[0].length == 40_000


def test_transfers_through_a_bounce_buffer_are_counted(shown: Shown, rig: Rig) -> None:
    rig.put("aligned", value_of("aligned", 1, 8192))
    shown.update()
    assert shown("fx100_events_total", event="bounced_transfers") == 0
    whole = zero_buffer(16384)
    odd = IoBuffer(whole.view[8:8200], 8192, whole.address + 8)
    done: list[Any] = []
    rig.store.put([PutItem(digest_of("odd"), META, odd)], done.extend)
    assert done[0].stored
    shown.update()
    assert (shown("fx100_events_total", event="bounced_transfers") or 0) >= 1


def test_a_member_that_fails_is_shown(shown: Shown, rig: Rig) -> None:
    rig.members[0].faults.append(Fault("error", "write", times=1000, value=5))
    for number in range(12):
        rig.put(f"x{number}", value_of("x", number, 40_000))
    shown.update()
    assert shown("fx100_member_up", member="memory0") == 0
    assert shown("fx100_member_up", member="memory1") == 1
    assert (shown("fx100_member_errors_total", member="memory0") or 0) >= 3
    assert (shown("fx100_put_objects_total", outcome="dropped_error") or 0) >= 1
    assert shown("fx100_healthy") == 0


def test_what_the_face_counts_is_shown_as_events(rig: Rig) -> None:
    shown = Shown(
        rig,
        adapter_counts={"store_tasks_done": 2},
        plugin_counts={"put_queue_full": 3, "unheard_of": 1},
        put_queue_bytes=77,
    )
    try:
        assert shown("fx100_events_total", event="store_tasks_done") == 2
        assert shown("fx100_events_total", event="put_queue_full") == 3
        assert shown("fx100_events_total", event="unheard_of") == 1
        assert shown("fx100_put_queue_bytes") == 77
    finally:
        shown.publisher.close()


def test_a_closed_store_is_not_healthy_and_keeps_its_counts(rig: Rig) -> None:
    shown = Shown(rig)
    rig.put("a", value_of("a", 1, 100))
    shown.publisher.close()
    assert shown("fx100_healthy") == 0
    assert shown("fx100_put_objects_total", outcome="stored") == 1
    shown.update()
    assert shown("fx100_healthy") == 0


def test_a_volume_that_is_opened_again_goes_on_with_its_series(rig: Rig) -> None:
    first, other = Shown(rig), Rig.fresh()
    rig.put("a", value_of("a", 1, 100))
    first.publisher.close()
    second = MetricsPublisher(other.store.status, LABELS, registry=first.registry)
    other.put("b", value_of("b", 1, 100))
    second.update()
    assert first("fx100_put_objects_total", outcome="stored") == 2
    assert first("fx100_healthy") == 1
    second.close()


def test_volumes_and_shards_of_one_process_are_told_apart(rig: Rig) -> None:
    first, other = Shown(rig), Rig.fresh()
    for number in range(40):
        rig.put(str(number), value_of("x", number, 100))
    lose(rig)
    first.update()
    others = [(*LABELS[:3], "another", "2"), (*LABELS[:4], "3")]
    made = [MetricsPublisher(other.store.status, o, registry=first.registry) for o in others]
    assert first("fx100_entries") == len(rig.store) > 10
    assert first("fx100_healthy") == 0
    assert first("fx100_member_up", member="memory0") == 0
    for labels in others:
        told = dict(zip(NAMES, labels, strict=True))
        assert first("fx100_entries", **told) == 0
        assert first("fx100_healthy", **told) == 1
        assert first("fx100_member_up", **told, member="memory0") == 1
    for publisher in (*made, first.publisher):
        publisher.close()


def lose(rig: Rig) -> None:
    rig.members[0].gone = True
    for number in range(12):
        rig.put(f"lost {number}", value_of("x", number, 40_000))
        rig.look()


def test_a_member_under_another_name_is_no_alert_under_the_old_one(shown: Shown, rig: Rig) -> None:
    lose(rig)
    shown.update()
    assert shown("fx100_member_up", member="memory0") == 0
    rig.members[0].gone = False
    rig.members[0].name = "memory7"
    shown.update()
    assert math.isnan(shown("fx100_member_up", member="memory0") or 0)
    assert shown("fx100_member_up", member="memory7") is not None


def test_values_are_brought_up_to_date_in_the_background(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "UPDATE_S", 0.01)
    shown = Shown(rig)
    asked = threading.Event()
    status = shown.publisher._status

    def noting() -> Mapping[str, Any]:
        told = status()
        if told["counts"].get("puts_stored"):
            asked.set()
        return told

    shown.publisher._status = noting
    rig.put("a", value_of("a", 1, 100))
    assert asked.wait(30)
    shown.publisher.close()
    shown.publisher._thread.join(30)
    assert not shown.publisher._thread.is_alive()


def test_a_defect_is_logged_once_and_ends_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "UPDATE_S", 0.01)
    shown = Shown(rig)
    status, failures, works = shown.publisher._status, [0], threading.Event()
    healthy: list[float | None] = []

    def failing() -> Mapping[str, Any]:
        if failures[0] < 5:
            failures[0] += 1
            healthy.append(shown("fx100_healthy"))
            raise RuntimeError("no status")
        works.set()
        return status()

    with caplog.at_level(logging.ERROR):
        shown.publisher._status = failing
        assert works.wait(30)
    assert [record.message for record in caplog.records] == ["metrics are not up to date"]
    assert healthy == [1, 0, 0, 0, 0], "what is not known to work is not shown as healthy"
    shown.publisher.close()


def test_metrics_can_be_switched_off(rig: Rig) -> None:
    assert publish(rig.store.status, MetricsConfig(enabled=False), role="mp", volume="v") is None


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (FileNotFoundError(2, "No such file", "/gone/counter_1.db"), "PROMETHEUS_MULTIPROC_DIR"),
        (ValueError("Duplicated timeseries"), "Duplicated timeseries"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
    ],
)
def test_metrics_that_cannot_be_had_cost_the_cache_nothing(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    problem: Exception,
    said: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(metrics, "MetricsPublisher", fail)
    assert publish(rig.store.status, MetricsConfig(), role="mp", volume="v") is None
    assert said in caplog.text
