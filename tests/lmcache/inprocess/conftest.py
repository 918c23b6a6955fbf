"""All tests here need LMCache, and leave nothing open."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.with_lmcache import import_quietly, mark_tests_in

import_quietly(
    "lmcache.v1.storage_backend.storage_manager",
    "support.inprocess_engine",
    "fx100_lmcache.lmcache.plugin",
)

from fx100_lmcache.lmcache.inprocess import registry as inprocess_registry  # noqa: E402
from fx100_lmcache.lmcache.plugin import FX100StoragePlugin  # noqa: E402
from support.inprocess import plugin_on, write_config  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests_in(Path(__file__).parent, items)


@pytest.fixture(autouse=True)
def everything_is_closed() -> Iterator[None]:
    """No test may leave a store open: the next one would attach to it."""
    yield
    assert not inprocess_registry._open


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture
def plugin(config: Path) -> Iterator[FX100StoragePlugin]:
    with plugin_on(config) as opened:
        yield opened
