"""LMCache's own tests of an L2 adapter, with ours in place of their mock.

Run by ``test_lmcache_suite.py`` from a directory that holds LMCache's ``tests`` package.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from tests.v1.distributed.test_mock_l2_adapter import (  # type: ignore[import-untyped]
    TestEndToEndWorkflow,
    TestEventFdInterface,
    TestEvictionInterface,
    TestLoadInterface,
    TestLookupAndLockInterface,
    TestStoreInterface,
    TestUnlockInterface,
)

from support.l2 import write_config

__all__ = [
    "TestEndToEndWorkflow",
    "TestEventFdInterface",
    "TestEvictionInterface",
    "TestLoadInterface",
    "TestLookupAndLockInterface",
    "TestStoreInterface",
    "TestUnlockInterface",
]


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[L2AdapterInterface]:
    made = create_l2_adapter(
        PluginL2AdapterConfig(
            module_path="fx100_lmcache.lmcache.l2_adapter",
            class_name="FX100L2Adapter",
            adapter_params={"config": str(write_config(tmp_path, members=2, size="2MiB"))},
        )
    )
    yield made
    made.close()
