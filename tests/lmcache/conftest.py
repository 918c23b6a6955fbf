"""All tests here need LMCache, whose import warns of its own dependencies."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lmcache", reason="needs the lmcache package")
    import lmcache.v1.distributed.eviction_policy
    import lmcache.v1.distributed.l2_adapters
    import lmcache.v1.memory_allocators.mixed_memory_allocator  # noqa: F401
    from l2_tools import Client

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("lmcache")
            # LMCache's logger does this whenever a module of it is loaded
            ignore = "ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning"
            item.add_marker(pytest.mark.filterwarnings(ignore))


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    while Client.made:
        Client.made.pop().stop()
