"""The last resort against a test that hangs: its process ends, with all stacks shown.

pytest-timeout has one timer for a whole test. What hangs after that has fired, in the teardown of a
fixture of the test that failed so, it does not see, and what catches every exception, or holds the
GIL, gets past it. So each phase has a limit of its own here, twice the test's time. Under xdist
the test is reported as the one in which its worker crashed, and the others go on.
"""

import contextlib
import faulthandler
import os
from collections.abc import Generator, Iterator

import pytest

FACTOR = 2.0  # pytest-timeout comes first: it fails the test alone, and says where
_stderr = pytest.StashKey[int]()


def limit_s(config: pytest.Config, item: pytest.Item | None = None) -> float:
    """How long a phase may take; 0 if there is no limit."""
    marker = item.get_closest_marker("timeout") if item is not None else None
    seconds = config.getoption("timeout", None)
    if seconds is None:
        seconds = config.getini("timeout") or 0
    if marker is not None:
        seconds = marker.args[0]
    return FACTOR * float(seconds)


@contextlib.contextmanager
def watched(config: pytest.Config, seconds: float) -> Iterator[None]:
    if not seconds or config.getoption("usepdb"):
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_stderr])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # not what output is captured in later


def _phase(item: pytest.Item) -> Generator[None, object, object]:
    with watched(item.config, limit_s(item.config, item)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _phase(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _phase(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _phase(item))


def pytest_unconfigure(config: pytest.Config) -> None:
    """From here on threads that are left have so long to end."""
    if seconds := limit_s(config):
        faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_stderr])
