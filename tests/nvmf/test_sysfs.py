import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.errors import (
    AmbiguousNamespaceError,
    NamespaceNotFoundError,
    SettingError,
    StaleNodeError,
)
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.resolve import MAX_SEEN, find, resolve
from fx100_lmcache.nvmf.snapshot import NEVER, NamespacePath, Snapshot, Subsystem
from fx100_lmcache.nvmf.sysfs import Sysfs
from support.fake_sysfs import NQN, FakeSysfs, write


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    return FakeSysfs(tmp_path / "sys")


def snapshot_of(tree: Any) -> Snapshot:
    return asyncio.run(Sysfs(tree.root).snapshot())


def test_no_nvme_driver_is_an_empty_snapshot(tmp_path: Path) -> None:
    assert asyncio.run(Sysfs(tmp_path).snapshot()) == Snapshot()


def test_controller_attributes(tree: Any) -> None:
    tree.subsystem()
    tree.controller()

    [controller] = snapshot_of(tree).controllers()

    assert controller.name == "nvme0"
    assert controller.subsystem_nqn == NQN
    assert controller.address == FabricAddress("10.0.0.1", "4420", src_addr="10.0.0.9")
    assert (controller.io_queues, controller.queue_size) == (8, 128)
    assert (controller.keep_alive_s, controller.reconnect_delay_s) == (5, 2)
    assert (controller.ctrl_loss_timeout_s, controller.fast_io_fail_s) == (600, 2)


def test_off_and_missing_time_outs_differ(tree: Any) -> None:
    tree.subsystem()
    folder = tree.controller(fast_io_fail_tmo="off", ctrl_loss_tmo="off")
    (folder / "reconnect_delay").unlink()

    [controller] = snapshot_of(tree).controllers()

    assert controller.fast_io_fail_s == NEVER
    assert controller.ctrl_loss_timeout_s == NEVER
    assert controller.reconnect_delay_s is None


def test_numbers_in_names_mean_nothing(tree: Any) -> None:
    """Controllers, subsystems and namespaces are numbered apart (nvme0 serves nvme1n2)."""
    tree.subsystem("nvme-subsys1")
    tree.subsystem("nvme-subsys0", nqn="nqn.2024-01.io.fx100:other")
    tree.controller("nvme0", "nvme-subsys1")
    tree.controller("nvme1", "nvme-subsys0")
    tree.head("nvme1n2", 1, "nvme-subsys1")
    tree.head("nvme0n1", 2, "nvme-subsys0")
    tree.path("nvme1c0n2", 1, "nvme0")

    found = find(snapshot_of(tree), NamespaceIdentity(NQN, 1))

    assert found.device == "/dev/nvme1n2"
    assert found.paths == (NamespacePath("nvme1c0n2", "nvme0", "optimized", "none"),)
    assert found.size_bytes == 64 << 20


def test_hidden_nodes_are_paths_and_never_namespaces(tree: Any) -> None:
    tree.subsystem()
    for number in (0, 1, 2):
        tree.controller(f"nvme{number}")
        tree.path(f"nvme0c{number}n1", 7, f"nvme{number}")
    tree.head("nvme0n1", 7)
    tree.path("nvme0c0n2", 8, "nvme0", uuid="00000000-0000-4000-8000-00000000ffff")

    [namespace] = snapshot_of(tree).namespaces()

    assert namespace.device == "/dev/nvme0n1"
    assert [path.controller for path in namespace.paths] == ["nvme0", "nvme1", "nvme2"]


def test_a_hidden_node_is_no_namespace_wherever_it_lies(tree: Any) -> None:
    tree.subsystem()
    tree.head("nvme0c0n1", 1, hidden="1")

    assert list(snapshot_of(tree).namespaces()) == []


def test_without_multipath_the_namespace_lies_below_its_controller(tree: Any) -> None:
    tree.subsystem()
    tree.controller()
    tree.path("nvme0n1", 1, "nvme0", hidden="0", uevent="DEVNAME=nvme0n1")

    [namespace] = snapshot_of(tree).namespaces()

    assert namespace.device == "/dev/nvme0n1"
    assert [path.name for path in namespace.paths] == ["nvme0n1"]


def test_character_devices_are_no_namespaces(tree: Any) -> None:
    tree.subsystem()
    write(tree.subsystems / "nvme-subsys0" / "ng0n1", {"nsid": "1", "dev": "235:0"})

    assert list(snapshot_of(tree).namespaces()) == []


def test_identity_attributes_as_kernels_print_them(tree: Any) -> None:
    tree.subsystem()
    tree.head(
        "nvme0n1",
        4,
        nguid="01234567-89ab-cdef-0123-456789abcdef",
        eui="00 25 38 b4 71 00 12 34",
        **{"queue/scheduler": "mq-deadline [kyber] none", "queue/logical_block_size": "4096"},
    )

    [namespace] = snapshot_of(tree).namespaces()

    assert namespace.identity == NamespaceIdentity(
        NQN,
        4,
        "0123456789abcdef0123456789abcdef",
        "002538b471001234",
        "00000000000040008000000000000004",
    )
    assert namespace.lba_bytes == 4096


def test_a_device_that_goes_meanwhile_is_left_out(tree: Any) -> None:
    tree.subsystem()
    tree.head("nvme0n1", 1, nguid="garbage")
    tree.head("nvme0n2", 2)
    (tree.head("nvme0n3", 3) / "size").unlink()
    tree.controller("nvme0")
    (tree.controller("nvme1") / "state").unlink()
    (tree.subsystems / "nvme-subsys9").mkdir()

    snapshot = snapshot_of(tree)

    assert [each.name for each in snapshot.namespaces()] == ["nvme0n2"]
    assert [each.name for each in snapshot.controllers()] == ["nvme0"]


def test_write_changes_a_setting(tree: Any) -> None:
    tree.subsystem()
    folder = tree.controller(fast_io_fail_tmo="off")

    asyncio.run(Sysfs(tree.root).write("nvme0", "fast_io_fail_tmo", 3))

    assert (folder / "fast_io_fail_tmo").read_text() == "3\n"


def test_write_to_a_controller_that_is_gone(tree: Any) -> None:
    with pytest.raises(SettingError, match=r"nvme7/fast_io_fail_tmo.*\n.*the controller is gone"):
        asyncio.run(Sysfs(tree.root).write("nvme7", "fast_io_fail_tmo", 3))


def test_not_found_tells_what_is_there_likeliest_first(tree: Any) -> None:
    tree.subsystem()
    for nsid in (1, 2):
        tree.head(f"nvme0n{nsid}", nsid)
    wanted = NamespaceIdentity(NQN, 2, uuid="00000000-0000-4000-8000-0000000000aa")

    with pytest.raises(NamespaceNotFoundError) as caught:
        find(snapshot_of(tree), wanted)

    assert len(caught.value.seen) == 2
    assert caught.value.seen[0].startswith("/dev/nvme0n2 (")
    assert "uuid is 00000000-0000-4000-8000-000000000002, not " in caught.value.seen[0]


def test_not_found_on_a_bare_host() -> None:
    with pytest.raises(NamespaceNotFoundError, match="no namespace is attached"):
        find(Snapshot(), NamespaceIdentity(NQN, 2))


def test_not_found_lists_at_most_a_page(tree: Any) -> None:
    tree.subsystem()
    tree.head("nvme0n1", 1)
    [one] = snapshot_of(tree).namespaces()
    many = tuple(
        replace(one, name=f"nvme0n{nsid}", identity=NamespaceIdentity(NQN, nsid))
        for nsid in range(2, 40)
    )

    with pytest.raises(NamespaceNotFoundError) as caught:
        find(Snapshot((Subsystem("s", NQN, namespaces=many),)), NamespaceIdentity(NQN, 1))

    assert len(caught.value.seen) == MAX_SEEN + 1
    assert caught.value.seen[-1] == f"and {38 - MAX_SEEN} more"


def test_two_nodes_of_one_identity_are_ambiguous(tree: Any) -> None:
    tree.subsystem()
    for number in (0, 1):
        tree.controller(f"nvme{number}")
        tree.path(f"nvme{number}n1", 1, f"nvme{number}", hidden="0", uevent="")

    with pytest.raises(AmbiguousNamespaceError, match="turn native multipath on") as caught:
        find(snapshot_of(tree), NamespaceIdentity(NQN, 1))
    assert len(caught.value.candidates) == 2


def test_resolve_waits_for_a_namespace_that_comes(tree: Any, tmp_path: Path) -> None:
    tree.subsystem()
    node = tmp_path / "nvme0n1"
    node.touch()
    wanted = NamespaceIdentity(NQN, 5)

    async def come_late() -> Any:
        found = asyncio.create_task(resolve(wanted, Sysfs(tree.root), tmp_path, timeout_s=30))
        await asyncio.sleep(0.05)
        tree.head("nvme0n1", 5, dev="0:0")  # a plain file has device number 0:0
        return await found

    assert asyncio.run(come_late()).device == "/dev/nvme0n1"


def test_resolve_gives_up(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(NamespaceNotFoundError):
        asyncio.run(resolve(NamespaceIdentity(NQN, 5), Sysfs(tree.root), tmp_path, timeout_s=0.3))


@pytest.mark.parametrize("node", ["missing", "another device"])
def test_stale_nodes_in_dev_are_refused(tree: Any, tmp_path: Path, node: str) -> None:
    tree.subsystem()
    tree.head("nvme0n1", 5)
    if node == "another device":
        (tmp_path / "nvme0n1").symlink_to(os.devnull)

    with pytest.raises(StaleNodeError, match="mount the host's /dev"):
        asyncio.run(resolve(NamespaceIdentity(NQN, 5), Sysfs(tree.root), tmp_path))
