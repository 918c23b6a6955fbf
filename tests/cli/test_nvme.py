"""``fx100 nvme``: with an nvme-cli and a kernel that are values in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fx100_lmcache.cli import nvme
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.causes import explain
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.parse import DISCOVERY_NQN
from fx100_lmcache.nvmf.resolve import find
from fx100_lmcache.nvmf.runner import NvmeCli, Output
from fx100_lmcache.nvmf.snapshot import Controller, Namespace, NamespacePath, Snapshot, Subsystem
from support.cli import Owner, Rig, fx100

HOST_ID = "f0100000-1ab0-4000-8000-000000000001"
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"
ARRAY, OTHER = "nqn.2024-01.io.fx100:array", "nqn.2024-01.io.fx100:other"
NGUID = "0123456789abcdef0123456789abcdef"
GIB = 1 << 30


def controller(name: str, address: str, state: str = "live") -> Controller:
    return Controller(
        name, ARRAY, "tcp", FabricAddress(address, "4420"), state, HOST_NQN, HOST_ID,
        io_queues=8, queue_size=128, keep_alive_s=5, reconnect_delay_s=2, ctrl_loss_timeout_s=600,
        fast_io_fail_s=2,
    )  # fmt: skip


def namespace(*controllers: str, name: str = "nvme0n1", nguid: str = NGUID) -> Namespace:
    paths = tuple(NamespacePath(f"{each}c0n1", each, "optimized", "none") for each in controllers)
    identity = NamespaceIdentity(ARRAY, 1, nguid)
    return Namespace(
        name, f"/dev/{name}", "259:1", identity, 10 * GIB, 512, 1024, 1024, None, paths
    )


class Machine:
    """What the kernel has, and an nvme-cli that changes it."""

    def __init__(self) -> None:
        self.controllers: list[Controller] = []
        self.namespaces = [namespace("nvme0")]
        self.offered = [ARRAY]
        self.dead: set[str] = set()
        self.others: tuple[Subsystem, ...] = ()
        self.ran: list[tuple[str, ...]] = []

    def snapshot(self) -> Snapshot:
        if not self.controllers:
            return Snapshot(self.others)
        array = Subsystem(
            "nvme-subsys0", ARRAY, "round-robin", "fx100", "s1",
            tuple(self.controllers), tuple(self.namespaces),
        )  # fmt: skip
        return Snapshot((array, *self.others))


def of_others() -> tuple[Subsystem, ...]:
    """Another team's array and a discovery controller that stays, neither as we would have it."""
    unbounded = replace(
        controller("nvme5", "10.0.0.5", "connecting"), fast_io_fail_s=-1, ctrl_loss_timeout_s=-1
    )
    disk = replace(namespace("nvme5", name="nvme5n1", nguid="e" * 32), lba_bytes=520)
    return (
        Subsystem("nvme-subsys5", OTHER, "numa", None, None, (unbounded,), (disk,)),
        Subsystem("nvme-subsys6", DISCOVERY_NQN, controllers=(replace(unbounded, name="nvme6"),)),
    )


class FakeSysfs:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    async def snapshot(self) -> Snapshot:
        return self.machine.snapshot()

    async def write(self, name: str, setting: str, value: int) -> None:
        assert setting == "fast_io_fail_tmo"
        self.machine.controllers = [
            replace(each, fast_io_fail_s=value) if each.name == name else each
            for each in self.machine.controllers
        ]


class FakeCli(NvmeCli):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    async def run(self, *arguments: str) -> Output:
        self.machine.ran.append(arguments)
        options = dict(each.removeprefix("--").split("=", 1) for each in arguments if "=" in each)
        if options.get("traddr") in self.machine.dead:
            raise explain(f"nvme {arguments[0]}", 1, "connection refused")
        if arguments[0] == "connect":
            name = f"nvme{len(self.machine.controllers)}"
            made = controller(name, options["traddr"])
            self.machine.controllers.append(replace(made, fast_io_fail_s=-1))
        elif arguments[0] == "disconnect":
            self.machine.controllers.clear()
        elif arguments[0] == "discover":
            records = [{"subnqn": nqn, "trtype": "tcp", **options} for nqn in self.machine.offered]
            return Output(json.dumps({"records": records}), "")
        elif arguments[0] == "version":
            return Output("nvme version 2.3 (git 2.3)", "")
        return Output("", "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(nvme, "Sysfs", lambda: FakeSysfs(made))
    monkeypatch.setattr(nvme, "NvmeCli", lambda: FakeCli(made))

    async def resolve(
        identity: Any, sysfs: Any, timeout_s: float = 0.0
    ) -> Any:  # without its look at /dev
        return find(await sysfs.snapshot(), identity)

    monkeypatch.setattr(nvme, "resolve", resolve)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return made


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path / "fx100.yaml")


def write(path: Path, **changes: Any) -> Path:
    subsystem = {
        "subsystem_nqn": ARRAY,
        "addresses": [{"traddr": "10.0.0.1"}, {"traddr": "10.0.0.2"}],
    }
    document = {
        "volume": {"members": [{"nvme": {"nguid": NGUID}}]},
        "nvme": {"host_nqn": HOST_NQN, "host_id": HOST_ID, "subsystems": [subsystem]},
        **changes,
    }
    path.write_text(yaml.safe_dump({k: v for k, v in document.items() if v is not None}))
    return path


def test_discover_asks_every_address_and_marks_what_is_configured(
    machine: Machine, config: Path
) -> None:
    machine.offered = [ARRAY, OTHER]

    shown = fx100("nvme", "discover", config)
    told = json.loads(fx100("nvme", "discover", config, "--json").stdout)

    assert shown.exit_code == 0
    assert f"{ARRAY} at 10.0.0.2:4420 (configured)" in shown.stdout
    assert f"{OTHER} at 10.0.0.1:4420 (not configured)" in shown.stdout
    assert [each["address"] for each in told["addresses"]] == ["10.0.0.1:4420", "10.0.0.2:4420"]
    asked = [arguments for arguments in machine.ran if arguments[0] == "discover"]
    assert all(f"--hostnqn={HOST_NQN}" in arguments for arguments in asked)


def test_discover_fails_where_nobody_answers_or_the_subsystem_is_not_offered(
    machine: Machine, config: Path
) -> None:
    machine.dead = {"10.0.0.1"}
    machine.offered = [OTHER]

    result = fx100("nvme", "discover", config)
    told = json.loads(fx100("nvme", "discover", config, "--json").stdout)["addresses"]

    assert result.exit_code == 1
    assert "no NVMe target answers" in result.stderr
    assert f"not offered: {ARRAY}" in result.stdout
    assert "no NVMe target answers" in told[0]["error"]
    assert told[1]["error"] is None


def test_connect_twice_changes_nothing_the_second_time(machine: Machine, config: Path) -> None:
    first = fx100("nvme", "connect", config)
    ran = len(machine.ran)
    second = fx100("nvme", "connect", config)

    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert first.stdout.count("nvme connect --transport=tcp") == 2
    assert first.stdout.count("fast_io_fail_tmo") == 2
    assert f"/dev/nvme0n1 is nguid {NGUID}" in first.stdout
    assert "nothing to do" in second.stdout
    assert len(machine.ran) == ran


def test_connect_tries_again_for_as_long_as_it_may_wait(
    machine: Machine, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.dead = {"10.0.0.1", "10.0.0.2"}
    asked = []

    def wait_for_members(
        settings: Any, wait_s: Any, say: Any, *, missing: Any, connect: Any
    ) -> None:
        asked.append((wait_s, connect, missing()))
        machine.dead.clear()

    monkeypatch.setattr(nvme, "wait_for_members", wait_for_members)
    monkeypatch.setattr(nvme, "missing_paths", lambda _section: ["path 10.0.0.1:4420"])
    monkeypatch.setattr(nvme, "missing_members", lambda _settings: ["volume.members[0]"])

    assert fx100("nvme", "connect", config, "--dry-run", "--wait", 60).exit_code == 0
    assert asked == []
    result = fx100("nvme", "connect", config, "--wait", 60)

    assert result.exit_code == 0, result.output
    assert asked == [(60, True, ["path 10.0.0.1:4420", "volume.members[0]"])]
    assert len(machine.controllers) == 2


@pytest.mark.parametrize("command", ["connect", "disconnect"])
def test_dry_run_only_says_what_it_would_do(machine: Machine, config: Path, command: str) -> None:
    if command == "disconnect":
        machine.controllers = [controller("nvme0", "10.0.0.1")]

    result = fx100("nvme", command, config, "--dry-run")

    assert result.exit_code == 0
    assert f"would: nvme {command}" in result.stdout
    assert machine.ran == []


def test_one_dead_path_is_an_exit_code_but_the_other_is_connected(
    machine: Machine, config: Path
) -> None:
    machine.dead = {"10.0.0.1"}

    result = fx100("nvme", "connect", config)

    assert result.exit_code == 1
    assert "no path to 10.0.0.1:4420" in result.stdout
    assert [each.address.traddr for each in machine.controllers] == ["10.0.0.2"]


def test_connect_fails_when_a_member_does_not_appear(machine: Machine, config: Path) -> None:
    machine.namespaces = []

    result = fx100("nvme", "connect", config)

    assert result.exit_code == 1
    assert f"namespace not found: nguid {NGUID}" in result.stderr


def test_disconnect_removes_and_then_has_nothing_to_do(machine: Machine, config: Path) -> None:
    machine.controllers = [controller("nvme0", "10.0.0.1")]

    first, second = (fx100("nvme", "disconnect", config) for _ in range(2))

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert f"nvme disconnect -n {ARRAY}" in first.stdout
    assert "nothing to do" in second.stdout


def test_disconnect_refuses_a_volume_in_use_unless_forced(
    machine: Machine, tmp_path: Path, rig: Rig, owner: Callable[..., Owner]
) -> None:
    config = write(
        tmp_path / "nvme.yaml", volume={"members": [{"path": str(m)} for m in rig.members]}
    )
    machine.controllers = [controller("nvme0", "10.0.0.1")]
    assert owner(rig.config).opened == "open"

    refused = fx100("nvme", "disconnect", config)
    assert refused.exit_code == 1
    assert "in use" in refused.stderr
    assert machine.controllers

    assert fx100("nvme", "disconnect", config, "--force").exit_code == 0
    assert not machine.controllers


def test_list_names_members_and_paths(machine: Machine, config: Path) -> None:
    machine.controllers = [
        controller("nvme0", "10.0.0.1"),
        controller("nvme1", "10.0.0.2", "connecting"),
    ]
    machine.namespaces = [
        namespace("nvme0", "nvme1"),
        namespace("nvme0", name="nvme0n2", nguid="f" * 32),
    ]

    shown = fx100("nvme", "list", config)
    told = json.loads(fx100("nvme", "list", config, "--json").stdout)

    assert shown.exit_code == 0
    assert "nvme1 tcp 10.0.0.2:4420 connecting" in shown.stdout
    assert [(row["device"], row["member"]) for row in told["namespaces"]] == [
        ("/dev/nvme0n1", 0),
        ("/dev/nvme0n2", None),
    ]
    assert told["namespaces"][0]["paths"][1]["state"] == "connecting"
    assert told["missing"] == []


def test_list_says_which_member_is_missing(machine: Machine, config: Path) -> None:
    result = fx100("nvme", "list", config, "--json")

    assert result.exit_code == 1
    [missing] = json.loads(result.stdout)["missing"]
    assert missing["member"] == 0
    assert "no namespace is attached" in missing["problem"]
    assert "volume.members[0]" in fx100("nvme", "list", config).stdout


def test_check_is_content_with_good_settings(machine: Machine, config: Path) -> None:
    machine.controllers = [controller("nvme0", "10.0.0.1"), controller("nvme1", "10.0.0.2")]
    machine.namespaces = [namespace("nvme0", "nvme1")]

    result = fx100("nvme", "check", config, "--json")

    told = json.loads(result.stdout)
    assert (result.exit_code, told["worst"]) == (0, "ok")
    assert any("fails after 2 s" in each["what"] for each in told["findings"])


def test_check_explains_a_stall_that_nothing_bounds(machine: Machine, config: Path) -> None:
    unbounded = replace(controller("nvme0", "10.0.0.1"), fast_io_fail_s=-1)
    machine.controllers = [unbounded, controller("nvme1", "10.0.0.2")]

    result = fx100("nvme", "check", config)

    assert result.exit_code == 1
    assert "waits until the controller is dropped (600 s)" in result.stdout
    assert "do: echo 5 > /sys/class/nvme/nvme0/fast_io_fail_tmo" in result.stdout


def test_check_counts_a_missing_member_as_a_problem(machine: Machine, config: Path) -> None:
    machine.controllers = [controller("nvme0", "10.0.0.1"), controller("nvme1", "10.0.0.2")]
    machine.namespaces = []

    told = json.loads(fx100("nvme", "check", config, "--json").stdout)

    [finding] = [each for each in told["findings"] if each["subject"] == "volume.members[0]"]
    assert finding["severity"] == "problem"
    assert "connect its subsystem" in finding["do"]


def test_check_does_not_judge_what_the_configuration_does_not_name(
    machine: Machine, config: Path
) -> None:
    machine.controllers = [controller("nvme0", "10.0.0.1"), controller("nvme1", "10.0.0.2")]
    spare = replace(namespace("nvme0", name="nvme0n2", nguid="f" * 32), lba_bytes=520)
    machine.namespaces = [namespace("nvme0", "nvme1"), spare]
    machine.others = of_others()

    told = json.loads(fx100("nvme", "check", config, "--json").stdout)
    shown = fx100("nvme", "check", config)

    assert shown.exit_code == 0
    assert told["worst"] == "ok"
    judged = {each["subject"].split()[0] for each in told["findings"]}
    assert judged == {"nvme-subsys0", "nvme0", "nvme1", "/dev/nvme0n1"}
    assert [(each["subsystem_nqn"], each["namespaces"]) for each in told["others"]] == [
        (ARRAY, ["/dev/nvme0n2"]),
        (OTHER, ["/dev/nvme5n1"]),
        (DISCOVERY_NQN, []),
    ]
    assert f"not judged, as not of this volume: nvme-subsys5 ({OTHER}): nvme5 tcp" in shown.stdout


def test_check_judges_the_subsystem_of_a_member_that_no_section_names(
    machine: Machine, tmp_path: Path
) -> None:
    machine.controllers = [replace(controller("nvme0", "10.0.0.1"), fast_io_fail_s=-1)]
    config = write(tmp_path / "found.yaml", nvme=None)

    assert fx100("nvme", "check", config).exit_code == 1

    by_number = {"nvme": {"subsystem_nqn": ARRAY, "nsid": 9}}
    named = write(tmp_path / "missing.yaml", nvme=None, volume={"members": [by_number]})
    assert "waits until the controller is dropped" in fx100("nvme", "check", named).stdout


@pytest.mark.parametrize("command", ["discover", "connect", "disconnect"])
def test_without_a_section_nvme_there_is_nothing_to_do(
    machine: Machine, tmp_path: Path, command: str
) -> None:
    config = write(tmp_path / "plain.yaml", nvme=None)

    result = fx100("nvme", command, config)

    assert result.exit_code == 1
    assert "no section nvme" in result.stderr


def test_check_without_nvme_of_says_so(machine: Machine, tmp_path: Path) -> None:
    config = write(tmp_path / "files.yaml", nvme=None, volume={"members": [{"path": "/tmp/x"}]})

    result = fx100("nvme", "check", config)

    assert result.exit_code == 0
    assert "no NVMe-oF controllers of this volume" in result.stdout
    machine.others = of_others()
    assert fx100("nvme", "check", config).exit_code == 0
