"""All tests here need LMCache, and leave nothing open."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from with_lmcache import import_quietly, mark_tests_in

import_quietly(
    "lmcache.v1.storage_backend.storage_manager",
    "lmcache.v1.cache_engine",
    "fx100_lmcache.lmcache.plugin",
)

from fx100_lmcache.lmcache import inprocess_registry  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests_in(Path(__file__).parent, items)


@pytest.fixture(autouse=True)
def everything_is_closed() -> Iterator[None]:
    """No test may leave a store open: the next one would attach to it."""
    yield
    assert not inprocess_registry._open
