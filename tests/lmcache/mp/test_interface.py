"""The rules of LMCache's L2 interface, one by one."""

import json
import logging
import threading
from pathlib import Path

import pytest
import torch
import yaml
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from prometheus_client import REGISTRY

from fx100_lmcache.config import IdentityConfig
from fx100_lmcache.counters import ADAPTER, STORE
from fx100_lmcache.errors import ClaimError, FX100Error
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.l2_adapter import FX100L2Adapter
from fx100_lmcache.lmcache.mp.keys import KeyNamer
from fx100_lmcache.lmcache.versions import Supported
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope
from fx100_lmcache.testing.harness import Rig
from support.l2 import (
    CHUNK_BYTES,
    MODEL,
    Client,
    Recorder,
    adapter_on,
    bytes_of,
    desc,
    key,
    keys,
    memory_obj,
    opened,
    payload,
    write_config,
)
from support.releases import places

SIZE = 8192


@pytest.fixture
def rig() -> Rig:
    return Rig.fresh(2, 512 * 1024)


@pytest.fixture
def client(rig: Rig) -> Client:
    return adapter_on(rig)


def put(client: Client, count: int, start: int = 0, size: int = SIZE) -> None:
    stored = client.store(
        keys(count, start), [memory_obj(payload(n, size)) for n in range(start, start + count)]
    )
    assert stored.is_successful()


def test_the_three_descriptors_are_distinct(client: Client) -> None:
    fds = {
        client.adapter.get_store_event_fd(),
        client.adapter.get_lookup_and_lock_event_fd(),
        client.adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    assert min(fds) >= 0


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 65])
def test_bitmaps_have_the_size_of_the_request_and_independent_bits(
    client: Client, count: int
) -> None:
    asked = keys(count)
    stored = asked[::2]
    client.store(stored, [memory_obj(payload(n, 4096)) for n in range(0, count, 2)])
    assert client.lookup(asked) == [n % 2 == 0 for n in range(count)]
    objects = [memory_obj(4096) for _ in asked]
    assert client.load(asked, objects) == [n % 2 == 0 for n in range(count)]
    for number in range(0, count, 2):
        assert bytes_of(objects[number]) == payload(number, 4096)


def test_results_are_handed_out_once(client: Client) -> None:
    adapter = client.adapter
    put(client, 1)
    lookup = adapter.submit_lookup_and_lock_task(keys(1), {})
    assert adapter.query_lookup_and_lock_result(lookup) is not None
    assert adapter.query_lookup_and_lock_result(lookup) is None
    load = adapter.submit_load_task(keys(1), [memory_obj(SIZE)])
    assert client.wait_load(load, 1) == [True]
    assert adapter.query_load_result(load) is None
    assert adapter.pop_completed_store_tasks() == {}
    assert adapter.query_load_result(10**6) is None
    assert adapter.query_lookup_and_lock_result(10**6) is None


def test_objects_of_different_sizes_and_groups_in_one_task(client: Client) -> None:
    sizes = [4096, 8192, 512, 20_000, 34]
    asked = [key(n, object_group_id=n % 2) for n in range(len(sizes))]
    objects = [memory_obj(payload(n, size)) for n, size in enumerate(sizes)]
    result = client.store(asked, objects)
    assert result.is_successful()
    assert result.bytes_transferred() == sum(sizes)
    for number, one in enumerate(asked):
        assert client.get(one, objects[number]) == payload(number, sizes[number])


def test_storing_again_writes_nothing_and_adds_nothing(client: Client) -> None:
    listener = Recorder()
    client.adapter.register_listener(listener)
    put(client, 3)
    used = client.usage()
    again = client.store(keys(3), [memory_obj(payload(n, SIZE)) for n in range(3)])
    assert again.is_successful()
    assert again.bytes_transferred() == 0
    assert client.usage() == used == 3 * SIZE
    assert listener.told("stored") == keys(3)


def test_usage_and_capacity_are_what_lmcaches_watermark_needs(client: Client, rig: Rig) -> None:
    assert client.adapter.supports_global_eviction
    put(client, 4)
    usage = client.adapter.get_usage()
    assert usage.total_capacity_bytes == rig.store.capacity_bytes > 0
    assert usage.total_bytes_used == 4 * SIZE
    assert dict(usage.bytes_by_cache_salt) == {"": 4 * SIZE}
    client.adapter.delete(keys(1))
    assert client.usage() == 3 * SIZE


def test_delete_spares_locked_keys_and_tells_only_of_the_others(client: Client) -> None:
    listener = Recorder()
    client.adapter.register_listener(listener)
    put(client, 3)
    assert client.lookup([key(1)]) == [True]
    client.adapter.delete([*keys(3), key(99)])
    assert listener.told("deleted") == [key(0), key(2)]
    assert client.lookup(keys(3)) == [False, True, False]
    client.adapter.submit_unlock([key(1), key(1)])
    client.adapter.delete(keys(3))
    assert listener.present == {}
    assert client.usage() == 0


def test_only_what_was_loaded_counts_as_accessed(client: Client) -> None:
    put(client, 2)
    listener = Recorder()
    client.adapter.register_listener(listener)
    client.settle()
    client.lookup([key(0)])
    assert listener.told("accessed") == []
    client.load([key(7), key(1)], [memory_obj(SIZE), memory_obj(SIZE)])
    assert listener.told("accessed") == [key(1)]


def test_our_own_evictions_are_told(client: Client, rig: Rig) -> None:
    listener = Recorder()
    client.adapter.register_listener(listener)
    for start in range(0, 200, 10):
        put(client, 10, start)
    client.settle()
    assert rig.store.counts()["evictions"] > 0
    assert set(listener.present) == {one for one in keys(200) if client.has(one)}
    assert client.usage() == sum(listener.present.values()) == rig.store.live_bytes


def test_an_entry_that_proved_bad_is_told_as_deleted(client: Client, rig: Rig) -> None:
    listener = Recorder()
    client.adapter.register_listener(listener)
    put(client, 1)
    unit = payload(0, SIZE)[-16:]
    for member in rig.members:
        at = member.media.find(unit)
        if at >= 0:
            member.media[at] ^= 1
    assert client.load(keys(1), [memory_obj(SIZE)]) == [False]
    client.settle()
    assert listener.told("deleted") == keys(1)
    assert client.usage() == 0


def test_a_failing_listener_loses_no_result(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Recorder):
        def on_l2_keys_stored(self, keys: object, sizes: object) -> None:
            raise RuntimeError("not my day")

    client.adapter.register_listener(Bad())
    put(client, 1)
    assert client.adapter.report_status()["adapter_counts"]["listener_errors"] == 1
    assert "not my day" in caplog.text


def test_nothing_raises_whatever_is_asked(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    class NoObject:
        """Neither size nor bytes."""

    assert client.store([], []).is_successful()
    assert not client.store(keys(2), [memory_obj(SIZE), NoObject()]).is_successful()
    assert not client.store(keys(2), [memory_obj(SIZE)]).is_successful()
    assert not client.has(key(0)), "a refused task stores nothing"
    put(client, 2)
    assert client.load(keys(2), [NoObject(), memory_obj(SIZE)]) == [False, True]
    assert client.load(keys(2), [memory_obj(SIZE)]) == [False, False]
    assert client.lookup([*keys(1), object()]) == [True, False]
    client.adapter.submit_unlock([object(), *keys(1)])
    client.adapter.delete([object(), *keys(1)])
    assert not client.has(key(0)), "it was unlocked, and deleted"
    counts = client.adapter.report_status()["adapter_counts"]
    assert counts["store_tasks_refused"] == 2
    assert counts["load_buffers_refused"] == 1
    assert counts["load_errors"] == 1, "fewer objects than keys"
    assert counts["keys_refused_malformed"] == 3


def test_failed_stores_are_logged_once_per_burst(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20):
        assert not client.store([key(b"x" * 33)], [memory_obj(SIZE)]).is_successful(), number
    lines = [r for r in caplog.records if "store tasks failed" in r.message]
    assert len(lines) == 1
    assert client.adapter.report_status()["adapter_counts"]["store_tasks_failed"] == 20


def test_pages_of_keys_are_complete_while_others_come_and_go(client: Client) -> None:
    adapter = client.adapter
    put(client, 30, size=4096)
    other = key(1, model_name="other")
    client.store([other], [memory_obj(payload("other", 4096))])
    seen, cursor, page_number = [], None, 0
    while True:
        page = adapter.list_l2_keys(MODEL, 7, cursor)
        seen += [entry.key.to_object_key() for entry in page.entries]
        assert all(entry.size_bytes == 4096 for entry in page.entries)
        adapter.delete([key(page_number)])  # of the first page, listed already or not
        put(client, 1, 100 + page_number, size=4096)
        page_number += 1
        cursor = page.next_page_token
        if cursor is None:
            break
    assert len(seen) == len(set(seen))
    assert set(keys(30)[page_number:]) <= set(seen)
    assert [e.key.to_object_key() for e in adapter.list_l2_keys("other").entries] == [other]
    assert adapter.list_l2_keys("nobody").entries == ()


@pytest.mark.parametrize("cursor", ["", "-1", "x", "1.5", "٣", "9" * 30])
def test_a_foreign_cursor_is_a_value_error(client: Client, cursor: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        client.adapter.list_l2_keys(cursor=cursor)
    with pytest.raises(ValueError, match="page_size"):
        client.adapter.list_l2_keys(page_size=0)


def test_status_is_plain_json_and_turns_red(client: Client, rig: Rig) -> None:
    put(client, 1)
    status = json.loads(json.dumps(client.adapter.report_status()))
    assert status["is_healthy"] is True
    assert status["entries"] == 1
    assert status["adapter_counts"]["store_tasks_done"] == 1
    rig.members[0].gone = True
    for number in range(10, 20):
        client.store([key(number)], [memory_obj(payload(number, SIZE))])
    status = client.adapter.report_status()
    assert status["is_healthy"] is False
    assert rig.members[0].name in " ".join(status["problems"])


def test_close_twice_and_calls_after_it(client: Client) -> None:
    put(client, 1)
    adapter = client.adapter
    adapter.close()
    adapter.close()
    assert adapter.get_store_event_fd() == -1
    store = adapter.submit_store_task(keys(1), [memory_obj(SIZE)])
    assert not adapter.pop_completed_store_tasks()[store].is_successful()
    lookup = adapter.submit_lookup_and_lock_task(keys(1), {})
    load = adapter.submit_load_task(keys(1), [memory_obj(SIZE)])
    for bitmap in (adapter.query_lookup_and_lock_result(lookup), adapter.query_load_result(load)):
        assert bitmap is not None
        assert (places(bitmap), bitmap.popcount()) == (1, 0)
    assert adapter.list_l2_keys().entries == ()
    adapter.submit_unlock(keys(1))
    adapter.delete(keys(1))
    assert adapter.report_status()["is_healthy"] is False


def test_it_loads_as_a_plugin(tmp_path: Path) -> None:
    config = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "fx100_lmcache.lmcache.l2_adapter",
            "class_name": "FX100L2Adapter",
            "adapter_params": {"config": str(write_config(tmp_path))},
        }
    )
    desc = L1MemoryDesc(ptr=0, size=1 << 20, align_bytes=4096)
    adapter = create_l2_adapter(config, l1_memory_desc=desc)
    try:
        assert isinstance(adapter, FX100L2Adapter)
        assert adapter.report_status()["buffers_are_copied"] is False
    finally:
        adapter.close()


def test_badly_aligned_l1_memory_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desc = L1MemoryDesc(ptr=0, size=1 << 20, align_bytes=64)
    adapter = FX100L2Adapter({"config": str(write_config(tmp_path))}, desc)
    adapter.close()
    assert adapter.report_status()["buffers_are_copied"] is True
    assert "--l1-align-bytes" in caplog.text


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "adapter_params must be"),
        ({"config": 7}, "adapter_params must be"),
        ({"config": "x", "shards": 2}, "unknown: shards"),
        ({"config": "/nowhere/fx100.yaml"}, "/nowhere/fx100.yaml"),
    ],
)
def test_wrong_parameters_stop_the_server_readably(params: dict[str, object], said: str) -> None:
    with pytest.raises(FX100Error, match=said):
        FX100L2Adapter(params)


def test_a_second_opener_is_told_who_holds_the_volume(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with opened(path), pytest.raises(ClaimError, match=r"in use.*pid="):
        FX100L2Adapter({"config": str(path)})
    with opened(path) as client:
        assert client.lookup(keys(1)) == [False]


def test_a_lookup_touches_no_device(client: Client, rig: Rig) -> None:
    put(client, 5)
    for member in rig.members:
        member.calls.clear()
    like = memory_obj(SIZE)
    assert client.lookup(keys(6), {0: desc(like)}) == [True] * 5 + [False]
    assert not any(member.calls for member in rig.members)


def test_a_real_volume_round_trips(tmp_path: Path) -> None:
    with opened(write_config(tmp_path)) as client:
        objects = [memory_obj(payload(n, CHUNK_BYTES)) for n in range(20)]
        assert client.store(keys(20), objects).bytes_transferred() == 20 * CHUNK_BYTES
        loaded = [memory_obj(CHUNK_BYTES, dtypes=[torch.bfloat16]) for _ in range(20)]
        assert all(client.load(keys(20), loaded))
        assert [bytes_of(o) for o in loaded] == [payload(n, CHUNK_BYTES) for n in range(20)]


def test_a_server_that_starts_before_its_members_waits_for_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_config(tmp_path, deadlines={"start": "60s"})
    member = Path(yaml.safe_load(path.read_text())["volume"]["members"][1]["path"])
    away = member.rename(member.with_name("away"))
    udev = threading.Timer(0.2, away.rename, [member])
    udev.start()
    with opened(path) as client:
        assert client.lookup(keys(1)) == [False]
    udev.join()
    assert f"missing volume.members[1] ({member})" in caplog.text
    assert "nothing is missing any more" in caplog.text


def test_an_engine_that_is_insisted_on_and_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, io={"engine": "native"})
    monkeypatch.setattr("fx100_lmcache.mount.native_available", lambda: False)
    with pytest.raises(FX100Error, match=r"io\.engine is native.*fx100 doctor"):
        FX100L2Adapter({"config": str(path)})


def test_an_untested_lmcache_is_named_with_what_to_do(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    adapter_on(Rig.fresh(2, 512 * 1024))
    assert "pip install" not in caplog.text
    old = Supported("LMCache", ("lmcache",), "0.3", "0.3", ("0.3.9",))
    monkeypatch.setattr("fx100_lmcache.lmcache.l2_adapter.LMCACHE", old)
    adapter_on(Rig.fresh(2, 512 * 1024))
    assert "outside the supported range: 0.3.*" in caplog.text
    assert "pip install 'lmcache==0.3.9'" in caplog.text


def test_counters_are_all_there_from_zero(client: Client) -> None:
    status = client.adapter.report_status()
    renewed = {"claim_renewals": status["counts"]["claim_renewals"]}  # once or more, to open
    assert status["counts"] == dict.fromkeys(STORE, 0) | renewed
    assert status["adapter_counts"] == dict.fromkeys(ADAPTER, 0)


def test_entries_that_no_key_can_name_are_passed_over() -> None:
    said = [
        Scope("mp", MODEL, 1, model_tag="r1"),
        Scope("mp", "model@home", 1),
        Scope("mp", MODEL, 1, group=0, salt="a/b", model_tag="r1"),
        Scope("mp", MODEL, 1, model_tag="r1", tags=(("hash_bytes", "many"),)),
        Scope("mp", MODEL, 1, model_tag="r1", tags=(("hash_bytes", "99"),)),
        Scope("mp", MODEL, 1, model_tag="r1", tags=(("hash_bytes", "-1"),)),
        Scope("mp", MODEL, 1, model_tag="another"),
        Scope("in-process", MODEL, 1, model_tag="r1"),
    ]

    def meta_of(number: int) -> ChunkMeta:
        if number == len(said):
            raise ValueError("a record that cannot be read")
        return ChunkMeta(said[number], Layout("KV_2LTD"))

    identity = IdentityConfig(model_tags={MODEL: "r1"})
    translator = KeyNamer(identity, meta_of, Counts(ADAPTER))
    found = [translator.key_of(scope.digest(b"x" * 32), n) for n, scope in enumerate(said)]
    assert found == [ObjectKey(b"x" * 32, MODEL, 1), *[None] * (len(said) - 1)]
    assert translator.key_of(bytes(48), len(said)) is None


def test_two_volumes_in_one_server_are_told_apart(tmp_path: Path) -> None:
    def shown(client: Client, name: str, **more: str) -> float | None:
        volume = client.adapter.report_status()["volume"]
        labels = {"role": "mp", "model_name": "", "worker_id": "", "volume": volume, "shard": ""}
        client.adapter._metrics.update()
        return REGISTRY.get_sample_value(name, {**labels, **more})

    with opened(write_config(tmp_path / "a")) as a, opened(write_config(tmp_path / "b")) as b:
        put(a, 40)
        assert (shown(a, "fx100_entries"), shown(b, "fx100_entries")) == (40, 0)
        stored = "fx100_put_objects_total"
        assert shown(a, stored, outcome="stored") == 40
        assert shown(b, stored, outcome="stored") == 0
        a.adapter.close()
        assert shown(a, "fx100_healthy") == 0
        assert shown(b, "fx100_healthy") == 1
