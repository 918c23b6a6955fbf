"""Plugins of one process share one store, and leave nothing open."""

import threading
from pathlib import Path

import pytest
import torch
import yaml
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from fx100_lmcache.lmcache.inprocess import registry
from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from support.inprocess import (
    descriptors,
    engine_config,
    free,
    holds,
    keys,
    manager_on,
    metadata,
    plugin_on,
    put,
    rewrite_config,
    wait_until,
    write_config,
)


def test_a_plugin_that_was_never_closed_does_not_stop_the_next_one(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with manager_on(path) as manager:
        first = manager.storage_backends["fx100"]
        put(first, keys(3))
        manager.create_backends()
        second = manager.storage_backends["fx100"]
        assert second is not first
        assert second._store is first._store
        assert second.batched_contains(keys(3)) == 3
        manager.recreate_backend("LocalCPUBackend")
        third = manager.storage_backends["fx100"]
        found = third.batched_get_blocking(keys(3))
        assert [holds(obj, n) for n, obj in enumerate(found)] == [True] * 3
        free(found)
        third.close()
        assert first.batched_contains(keys(3)) == 3
        assert registry._open
        second.close()
        first.close()
        assert not registry._open
        first.local_cpu_backend.memory_allocator.close()


def test_plugins_that_were_overwritten_without_close_leave_nothing_open(tmp_path: Path) -> None:
    """LMCache's API constructs anew over what is there; only the last one is closed."""
    path = write_config(tmp_path)
    files, threads, pools = descriptors(), set(threading.enumerate()), []
    with manager_on(path) as manager:
        for _ in range(3):
            pools.append(manager.local_cpu_backend.memory_allocator)
            manager.create_backends()
        put(manager.storage_backends["fx100"], keys(3))
        assert [len(opened.users) for opened in registry._open.values()] == [1]
    assert not registry._open
    for pool in pools:
        pool.close()
    mine = [t for t in threading.enumerate() if "fx100" in t.name and t not in threads]
    wait_until(lambda: not any(thread.is_alive() for thread in mine))
    assert descriptors() == files
    with plugin_on(path) as plugin:
        assert plugin.batched_contains(keys(3)) == 3


def test_a_plugin_that_was_dropped_is_followed_by_one_that_closes(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    config, told = engine_config(path), metadata()
    backend = LocalCPUBackend(config, told, "cpu")
    given = {"config": config, "metadata": told, "local_cpu_backend": backend}
    FX100StoragePlugin(**given)  # nobody keeps it
    [opened] = registry._open.values()
    assert len(opened.users) == 0
    with plugin_on(path) as plugin:
        assert plugin._opened is opened
    assert not registry._open
    backend.memory_allocator.close()


def test_recreating_ours_goes_on_with_the_same_data(tmp_path: Path) -> None:
    with manager_on(write_config(tmp_path)) as manager:
        put(manager.storage_backends["fx100"], keys(3))
        assert manager.recreate_backend("fx100") == {"fx100": "FX100StoragePlugin"}
        assert manager.storage_backends["fx100"].batched_contains(keys(3)) == 3
        assert manager.close_backend("fx100")


def test_a_changed_file_is_noticed_by_the_second_plugin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_config(tmp_path)
    with plugin_on(path):
        rewrite_config(path, identity={"model_tags": {"test/model": "other"}})
        with plugin_on(path):
            assert "takes effect after a restart" in caplog.text


def test_descriptors_and_threads_are_back_after_close(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with plugin_on(path):
        pass
    before = descriptors()
    for _ in range(3):
        with plugin_on(path) as plugin:
            put(plugin, keys(2))
    assert descriptors() == before


def test_a_plugin_that_cannot_be_built_leaves_nothing_open(tmp_path: Path) -> None:
    odd = metadata(kv_dtype=torch.uint16)  # LMCache has no name for it
    with (
        pytest.raises(ValueError, match="Unsupported dtype"),
        plugin_on(write_config(tmp_path), odd),
    ):
        pass
    assert not registry._open


def test_a_plugin_that_waits_for_its_members_keeps_no_other_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first = write_config(tmp_path / "a")
    late = write_config(tmp_path / "b", deadlines={"start": "60s"})
    member = Path(yaml.safe_load(late.read_text())["volume"]["members"][1]["path"])
    away = member.rename(member.with_name("away"))
    found = []

    def open_late() -> None:
        with plugin_on(late) as plugin:
            found.append(plugin.batched_contains(keys(1)))

    thread = threading.Thread(target=open_late)
    thread.start()
    wait_until(lambda: "missing volume.members[1]" in caplog.text)
    with plugin_on(first) as plugin:
        put(plugin, keys(2))
    assert not registry._open
    away.rename(member)
    thread.join(60)
    assert found == [0]
