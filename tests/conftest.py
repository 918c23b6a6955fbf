"""What all tests need of the process that they run in."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fx100_lmcache.counters import Tally
from fx100_lmcache.volume import claim
from support.watchdog import (  # noqa: F401 - hooks
    pytest_configure,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_unconfigure,
)

# children find what tests share
_paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_paths)

# a shell starts background jobs with Ctrl-C ignored, and nohup without hang-ups; so would
# everything started from here
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

Tally.strict = True  # a counter that is not in the table fails the test that counts it


@pytest.fixture(scope="session", autouse=True)
def _claims_settle_at_once() -> Iterator[None]:
    """No other host opens the volumes of tests at the same moment; those with one say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claim, "SETTLE_S", 0.0)
        yield
