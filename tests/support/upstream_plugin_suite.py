"""LMCache's own tests of backends and plugins, with ours in place of theirs.

Run by ``test_lmcache_suite.py`` from a directory that holds LMCache's ``tests`` package.
What cannot be aimed at another backend is set to None, with the reason.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from tests.v1.storage_backend import (  # type: ignore[import-untyped]
    test_local_disk_backend as disk,
)
from tests.v1.storage_backend import test_storage_plugin as plugins

from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from support.inprocess import engine_config, free, settle, write_config


@pytest.fixture
def local_disk_backend(tmp_path: Path) -> Iterator[FX100StoragePlugin]:
    path = write_config(
        tmp_path,
        size="96MiB",
        io={"max_write_in_flight": "256MiB", "reader_threads": 4, "writer_threads": 2},
    )
    config = engine_config(path, max_local_cpu_size=0.5)
    told: LMCacheMetadata = disk.create_test_metadata()
    backend = LocalCPUBackend(config, told, "cpu")
    made = FX100StoragePlugin(config=config, metadata=told, local_cpu_backend=backend)
    yield made
    made.close()


class TestBatchedGetBlocking(disk.TestBatchedGetBlocking):
    """The rules of ``batched_get_blocking``."""

    test_cache_policy_updated_only_for_hits = None  # of LMCache's own eviction policy object
    test_single_key_delegates_to_get_blocking = None  # how, not what
    test_concurrent_reads_use_multiple_threads = None  # watches a method of the disk backend

    def _write_key(self, backend: FX100StoragePlugin, key: Any) -> bytes:
        obj = backend.local_cpu_backend.allocate(self._SHAPE, self._DTYPE, busy_loop=False)
        data = os.urandom(obj.get_size())
        memoryview(obj.byte_array).cast("B")[:] = data
        backend.batched_submit_put_task([key], [obj])
        free([obj])
        settle(backend)
        return data


class Stored:
    """What the tests of plugins see as a dictionary from hash to object."""

    def __init__(self, plugin: FX100StoragePlugin) -> None:
        self._plugin = plugin

    def __setitem__(self, chunk_hash: int, obj: Any) -> None:
        self._plugin.batched_submit_put_task([plugins.create_test_key(chunk_hash)], [obj])
        settle(self._plugin)

    def __contains__(self, chunk_hash: int) -> bool:
        return FX100StoragePlugin.contains(self._plugin, plugins.create_test_key(chunk_hash))


class MockStoragePlugin(FX100StoragePlugin):
    """Ours, with the notes that LMCache's tests look at."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.call_history: list[str] = []
        self.storage = Stored(self)

    def contains(self, key: Any, pin: bool = False) -> bool:
        self.call_history.append(f"contains:{key.chunk_hash}")
        return super().contains(key, pin)

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        self.call_history.append(f"contains:{keys[0].chunk_hash}")
        return super().batched_contains(keys, pin)

    def remove(self, key: Any, force: bool = True) -> bool:
        self.call_history.append(f"remove:{key.chunk_hash}")
        return super().remove(key, force)


class TestStoragePlugin(plugins.TestCreateDynamicBackends):
    """How the storage manager loads and calls a plugin."""

    # expects the very object that was put, which only memory can give back
    test_dynamic_backend_get_blocking_called_via_storage_manager = None

    @pytest.fixture(autouse=True)
    def ours(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        extra = {
            "storage_plugin.mock_backend.module_path": __name__,
            "storage_plugin.mock_backend.class_name": "MockStoragePlugin",
            "fx100.config": str(write_config(tmp_path)),
        }
        monkeypatch.setattr(plugins, "MOCK_BACKEND_EXTRA_CONFIG", extra)
