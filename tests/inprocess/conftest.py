"""All tests here need LMCache, whose import warns of its own dependencies."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lmcache", reason="needs the lmcache package")
    import lmcache.v1.storage_backend.storage_manager  # noqa: F401
    from lmcache.v1.cache_engine import LMCacheEngine  # noqa: F401

    from fx100_lmcache.lmcache import inprocess_registry, plugin  # noqa: F401

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("lmcache")
            # LMCache's logger does this whenever a module of it is loaded
            ignore = "ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning"
            item.add_marker(pytest.mark.filterwarnings(ignore))


@pytest.fixture(autouse=True)
def everything_is_closed() -> Iterator[None]:
    """No test may leave a store open: the next one would attach to it."""
    yield
    assert not inprocess_registry._open
