"""Fixtures of the lab: a real Linux target and the real nvme-cli.

These tests run behind `tests/nvmet/run`, which finds or builds a kernel with nvmet. Anywhere else
they are deselected, by name and with the reason (under xdist they are only counted). Asking for
them there (`-m nvmet`) is an error: a suite that did not run must not look like one that passed.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.sysfs import Sysfs
from support.nvmet_target import CONFIGFS, Target

HERE = Path(__file__).parent
LAB = "FX100_NVMET_LAB"
HOST_ID = "f0100000-1ab0-4000-8000-000000000001"
HOST = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}", HOST_ID)

_deselected = pytest.StashKey[Counter[str]]()
_numbers = itertools.count(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.nvmet)
    if os.environ.get(LAB) == "1":
        return
    if mine and "nvmet" in config.getoption("markexpr", "").replace("not nvmet", ""):
        raise pytest.UsageError("tests marked nvmet need a kernel with nvmet: run tests/nvmet/run")
    config.stash[_deselected] = Counter(item.path.name for item in mine)
    config.hook.pytest_deselected(items=mine)
    items[:] = [item for item in items if item not in mine]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files = terminalreporter.config.stash.get(_deselected, Counter())
    if files:
        terminalreporter.write_line("not run here, as they need a kernel with nvmet:")
    for name, count in sorted(files.items()):
        terminalreporter.write_line(f"  tests/nvmet/{name}: {count} tests (tests/nvmet/run)")


@pytest.fixture
def target() -> Iterator[Target]:
    assert CONFIGFS.is_dir(), f"{CONFIGFS} is missing: start with tests/nvmet/run"
    made = Target(f"lab{os.getpid()}x{next(_numbers)}")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def cli() -> NvmeCli:
    return NvmeCli()


@pytest.fixture
def sysfs() -> Sysfs:
    return Sysfs()


@pytest.fixture
def host() -> HostIdentity:
    return HOST
