"""All tests here need LMCache, and leave no thread behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

from support.with_lmcache import import_quietly, mark_tests_in  # noqa: E402

import_quietly(
    "lmcache.v1.distributed.eviction_policy",
    "lmcache.v1.distributed.l2_adapters",
    "lmcache.v1.distributed.storage_controllers.eviction_controller",
    "lmcache.v1.memory_allocators.mixed_memory_allocator",
    "support.l2",
)

from support.l2 import Client  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests_in(HERE, items)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    while Client.made:
        Client.made.pop().stop()
