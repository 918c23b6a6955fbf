"""What of a host is the volume's: named subsystems and members, with all of their controllers."""

from __future__ import annotations

from typing import Any

import pytest

from fx100_lmcache.nvmf.parse import DISCOVERY_NQN
from fx100_lmcache.nvmf.scope import part_of_volume, rest_of_host
from fx100_lmcache.nvmf.snapshot import Snapshot, Subsystem
from support.nvmf_parts import NQN, controller, namespace

OTHER_NQN = "nqn.2024-01.com.example:somebody"
MEMBER, SPARE = namespace(), namespace(name="nvme0n2", device="/dev/nvme0n2")
FOREIGN = namespace(name="nvme1n1", device="/dev/nvme1n1")
OURS = Subsystem("nvme-subsys0", NQN, None, None, None, (controller(1),), (MEMBER, SPARE))
OTHER = Subsystem("nvme-subsys1", OTHER_NQN, None, None, None, (controller(2),), (FOREIGN,))
DISCOVERY = Subsystem("nvme-subsys2", DISCOVERY_NQN, controllers=(controller(3),))
LOCAL = Subsystem("nvme-subsys3", "nqn.local", controllers=(controller(4, transport="pcie"),))
HOST = Snapshot((OURS, OTHER, DISCOVERY, LOCAL))


@pytest.mark.parametrize(
    ("devices", "nqns", "names", "members"),
    [
        ({"/dev/nvme0n1"}, set(), ["nvme-subsys0"], ["/dev/nvme0n1"]),
        ({"/dev/nvme0n1"}, {NQN}, ["nvme-subsys0"], ["/dev/nvme0n1"]),
        (set(), {NQN}, ["nvme-subsys0"], []),
        ({"/dev/nvme1n1"}, {NQN}, ["nvme-subsys0", "nvme-subsys1"], ["/dev/nvme1n1"]),
        ({"/srv/m0"}, set(), [], []),
        (set(), {DISCOVERY_NQN}, ["nvme-subsys2"], []),
    ],
)
def test_the_volume_is_what_the_configuration_names(
    devices: Any, nqns: Any, names: list[Any], members: list[Any]
) -> None:
    found = part_of_volume(HOST, devices, nqns)

    assert [each.name for each in found.subsystems] == names
    assert [each.device for each in found.namespaces()] == members
    there = {each.name: each.controllers for each in HOST.subsystems}
    assert all(each.controllers == there[each.name] for each in found.subsystems)


@pytest.mark.parametrize(
    ("devices", "nqns"),
    [({"/dev/nvme0n1"}, set()), (set(), {NQN}), ({"/srv/m0"}, set()), ({"/dev/nvme1n1"}, {NQN})],
)
def test_the_rest_of_the_host_is_everything_else_but_local_drives(devices: Any, nqns: Any) -> None:
    ours = part_of_volume(HOST, devices, nqns)
    rest = rest_of_host(HOST, ours)

    fabric = Snapshot((OURS, OTHER, DISCOVERY))
    for kind in (Snapshot.controllers, Snapshot.namespaces):
        names = sorted(each.name for each in (*kind(ours), *kind(rest)))
        assert names == sorted(each.name for each in kind(fabric))
