"""Whether lost paths come back by themselves."""

from typing import Any

import pytest

from fx100_lmcache.config import NvmeAddress, NvmeConfig, NvmeSubsystem
from fx100_lmcache.doctor.nvme import check_reconnect
from fx100_lmcache.findings import Finding, warning
from support.doctor import NOTE, OK, WARNING

SUBSYSTEM = NvmeSubsystem(subsystem_nqn="nqn.x", addresses=(NvmeAddress(traddr="192.0.2.1"),))
OBSTACLES = [
    warning("nvme", "no device", "why", "make one"),
    warning("nvme", "no program", "why", "install it"),
]


@pytest.mark.parametrize(
    ("reconnect", "obstacles", "severity", "told"),
    [
        (True, [], OK, "can connect"),
        (True, OBSTACLES, WARNING, "no device; no program"),
        (False, OBSTACLES, NOTE, "nvme.reconnect is off"),
    ],
)
def test_it_is_told_whether_lost_paths_come_back(
    reconnect: bool, obstacles: list[Finding], severity: Any, told: str
) -> None:
    found = check_reconnect(NvmeConfig(subsystems=(SUBSYSTEM,), reconnect=reconnect), obstacles)
    assert found.severity is severity
    assert told in found.what
    assert bool(found.do) is (severity is not OK)


def test_a_warning_says_what_to_do_about_each() -> None:
    found = check_reconnect(NvmeConfig(subsystems=(SUBSYSTEM,)), OBSTACLES)
    assert found.do == "make one; install it"
