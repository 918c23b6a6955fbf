"""Executing a plan, with an nvme-cli that edits a sysfs tree in a folder."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.config import NvmeAddress, NvmeSubsystem
from fx100_lmcache.nvmf import connect
from fx100_lmcache.nvmf.causes import explain
from fx100_lmcache.nvmf.connect import (
    connect_subsystem,
    disconnect_subsystem,
    host_identity,
    with_numbers,
)
from fx100_lmcache.nvmf.errors import (
    AddressError,
    AlreadyConnectedError,
    CommandError,
    HostIdentityError,
    NvmeError,
    SettingError,
    UnreachableError,
)
from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.nvmf.runner import NvmeCli, Output
from fx100_lmcache.nvmf.snapshot import Snapshot
from fx100_lmcache.nvmf.sysfs import Sysfs
from support.fake_sysfs import HOST_ID, HOST_NQN, NQN, FakeSysfs

HOST = HostIdentity(HOST_NQN, HOST_ID)
WANTED = NvmeSubsystem(
    subsystem_nqn=NQN,
    addresses=(NvmeAddress(traddr="10.0.0.1"), NvmeAddress(traddr="10.0.0.2")),
)


class FakeCli(NvmeCli):
    """Connects by making a controller in a `FakeSysfs`; some addresses are dead."""

    def __init__(self, tree: FakeSysfs, dead: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.tree = tree
        self.dead = dead
        self.calls: list[str] = []

    async def run(self, *arguments: str) -> Output:
        self.calls.append(arguments[0])
        options = dict(each.removeprefix("--").split("=", 1) for each in arguments if "=" in each)
        if arguments[0] == "connect":
            if options["traddr"] in self.dead:
                raise explain("nvme connect", 1, "connection refused")
            if not self.tree.subsystems.joinpath("nvme-subsys0").exists():
                self.tree.subsystem()
            number = len(list(self.tree.controllers.iterdir()))
            self.tree.controller(
                f"nvme{number}",
                address=f"traddr={options['traddr']},trsvcid={options['trsvcid']}",
                fast_io_fail_tmo="off",
                kato=options["keep-alive-tmo"],
            )
        elif arguments[0] == "disconnect":
            for controller in self.tree.controllers.iterdir():
                (self.tree.subsystems / "nvme-subsys0" / controller.name).unlink()
        return Output("", "")


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    return FakeSysfs(tmp_path / "sys")


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_connects_and_sets_the_time_out_then_does_nothing(tree: Any) -> None:
    cli, sysfs = FakeCli(tree), Sysfs(tree.root)

    first = run(connect_subsystem(WANTED, HOST, cli, sysfs))
    second = run(connect_subsystem(WANTED, HOST, cli, sysfs))

    assert [step.split()[0] for step in first.done] == ["nvme", "nvme", "echo", "echo"]
    assert [each.traddr for each in first.connected] == ["10.0.0.1", "10.0.0.2"]
    assert {each.fast_io_fail_s for each in run(sysfs.snapshot()).controllers()} == {2}
    assert (second.done, second.connected) == ([], [])
    assert second.planned == ["nothing to do"]
    assert cli.calls == ["connect", "connect"]


def test_dry_run_runs_nothing(tree: Any) -> None:
    cli = FakeCli(tree)

    report = run(connect_subsystem(WANTED, HOST, cli, Sysfs(tree.root), dry_run=True))

    assert cli.calls == []
    assert len(report.planned) == 3
    assert report.done == []


def test_one_dead_path_does_not_stop_the_other(tree: Any) -> None:
    cli = FakeCli(tree, dead=("10.0.0.1",))

    report = run(connect_subsystem(WANTED, HOST, cli, Sysfs(tree.root)))

    [(address, error)] = report.failures
    assert address.traddr == "10.0.0.1"
    assert isinstance(error, UnreachableError)
    assert len(report.done) == 2


def test_all_paths_dead_is_an_error(tree: Any) -> None:
    cli = FakeCli(tree, dead=("10.0.0.1", "10.0.0.2"))

    with pytest.raises(UnreachableError):
        run(connect_subsystem(WANTED, HOST, cli, Sysfs(tree.root)))


# What a command says, and what is there. nvme-cli's words change from version to version.

WRITE = "Failed to write to /dev/nvme-fabrics: "
ALREADY = [
    # (version, exit code, what it said): connected already, whoever did it
    ("1.9", 114, f"{WRITE}Operation already in progress"),
    ("1.16", 114, ""),
    ("2.0", 1, f"{WRITE}Operation already in progress\nfailed to connect controller, error 1006"),
    ("2.0", 1, f"{WRITE}Operation already in progress\nno controller found: failed to write to "
     "nvme-fabrics device"),
    ("2.3", 1, "already connected"),
    ("2.10.2", 1, "failed to open slots dir /sys/bus/pci/slots\nalready connected"),
    ("2.16", 1, "could not add new controller: already connected"),
    ("3.0", 1, f"already connected to hostnqn={HOST_NQN},nqn={NQN},transport=tcp"),
    ("3.0", 1, "Operation already in progress"),
    ("3.x", 1, "failed to connect: connect attempt failed"),
    ("3.x", 1, "fabrics: nvme0 is in use by this host"),
    ("3.x", 117, "\ufffd"),
    ("killed", -9, ""),
]  # fmt: skip


class Odd(FakeCli):
    """Says what it is told to, whether it connects or not."""

    def __init__(self, tree: FakeSysfs, exit_code: int, said: str, does_it: bool) -> None:
        super().__init__(tree)
        self.exit_code, self.said, self.does_it = exit_code, said, does_it

    async def run(self, *arguments: str) -> Output:
        if self.does_it:
            await super().run(*arguments)
        else:
            self.calls.append(arguments[0])
        if self.exit_code:
            raise explain(f"nvme {arguments[0]}", self.exit_code, self.said)
        return Output(self.said, "")


@pytest.mark.parametrize(("version", "exit_code", "said"), ALREADY)
def test_connected_is_connected_whatever_the_command_says(
    tree: Any, version: Any, exit_code: Any, said: Any
) -> None:
    cli = Odd(tree, exit_code, said, does_it=True)

    report = run(connect_subsystem(WANTED, HOST, cli, Sysfs(tree.root)))

    assert report.failures == []
    assert [each.traddr for each in report.connected] == ["10.0.0.1", "10.0.0.2"]
    assert [each.split()[0] for each in report.done] == ["echo", "echo"], "not ours to claim"


@pytest.mark.parametrize(("version", "exit_code", "said"), ALREADY)
def test_what_is_not_there_is_not_connected_whatever_the_command_says(
    tree: Any, version: Any, exit_code: Any, said: Any
) -> None:
    cli = Odd(tree, exit_code, said, does_it=False)

    with pytest.raises(CommandError) as caught:
        run(connect_subsystem(WANTED, HOST, cli, Sysfs(tree.root)))

    assert caught.value.exit_code == exit_code
    assert caught.value.remedy


def test_a_success_without_a_controller_is_a_failure(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "SETTLE_S", 0.05)
    cli = Odd(tree, 0, "connecting to device: nvme0", does_it=False)

    with pytest.raises(NvmeError, match="there is no controller for 10") as caught:
        run(connect_subsystem(WANTED, HOST, cli, Sysfs(tree.root)))

    assert "dmesg" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("attributes", "connected"),
    [
        ({}, True),
        ({"state": "connecting"}, True),
        ({"state": "resetting"}, True),
        ({"state": "new"}, False),
        ({"state": "deleting"}, False),
        ({"state": "dead"}, False),
        ({"address": "traddr=10.0.0.9,trsvcid=4420"}, False),
        ({"address": "traddr=10.0.0.1,trsvcid=4421"}, False),
        ({"transport": "rdma"}, False),
        ({"hostnqn": "nqn.2014-08.org.nvmexpress:uuid:other", "hostid": "other"}, False),
    ],
)
def test_only_the_wanted_controller_counts(
    tree: Any, monkeypatch: pytest.MonkeyPatch, attributes: dict[str, Any], connected: bool
) -> None:
    """Somebody connects between our look and our step; it may be something else."""
    monkeypatch.setattr(connect, "SETTLE_S", 0.05)
    wanted = NvmeSubsystem(subsystem_nqn=NQN, addresses=(NvmeAddress(traddr="10.0.0.1"),))

    class Racing(FakeCli):
        async def run(self, *arguments: str) -> Output:
            self.tree.subsystem()
            self.tree.controller(**attributes)
            raise explain("nvme connect", 1, "already connected")

    attempt = connect_subsystem(wanted, HOST, Racing(tree), Sysfs(tree.root))
    if connected:
        assert run(attempt).failures == []
        return
    with pytest.raises(AlreadyConnectedError):
        run(attempt)


def test_one_that_is_being_made_is_waited_for(tree: Any) -> None:
    wanted = NvmeSubsystem(subsystem_nqn=NQN, addresses=(NvmeAddress(traddr="10.0.0.1"),))
    looks = []

    class Racing(FakeCli):
        async def run(self, *arguments: str) -> Output:
            self.tree.subsystem()
            self.tree.controller(state="new")
            raise explain("nvme connect", 1, "already connected")

    class Watched(Sysfs):
        async def snapshot(self) -> Snapshot:
            looks.append(1)
            if len(looks) == 4:
                (tree.controllers / "nvme0" / "state").write_text("live\n")
            return await super().snapshot()

    assert run(connect_subsystem(wanted, HOST, Racing(tree), Watched(tree.root))).failures == []
    assert len(looks) == 4


def test_a_time_out_that_cannot_be_set_is_an_error(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_arguments: Any) -> None:
        raise SettingError("cannot write")

    sysfs = Sysfs(tree.root)
    monkeypatch.setattr(sysfs, "write", refuse)

    with pytest.raises(SettingError):
        run(connect_subsystem(WANTED, HOST, FakeCli(tree), sysfs))


def test_controllers_that_do_not_become_live_are_noted(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "SETTLE_S", 0.2)
    tree.subsystem()
    for number, address in enumerate(("10.0.0.1", "10.0.0.2")):
        tree.controller(
            f"nvme{number}", state="connecting", address=f"traddr={address},trsvcid=4420"
        )

    report = run(connect_subsystem(WANTED, HOST, FakeCli(tree), Sysfs(tree.root)))

    assert report.done == []
    assert sum("is connecting" in note for note in report.notes) == 2


def test_host_names_are_resolved_before_comparing(tree: Any) -> None:
    tree.subsystem()
    tree.controller(address="traddr=127.0.0.1,trsvcid=4420")
    wanted = NvmeSubsystem(subsystem_nqn=NQN, addresses=(NvmeAddress(traddr="localhost"),))

    cli = FakeCli(tree)
    run(connect_subsystem(wanted, HOST, cli, Sysfs(tree.root)))

    assert cli.calls == []


def test_a_check_compares_numbers_with_numbers(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is connected with one of its addresses is no missing path."""

    async def resolve_host(address: Any) -> Any:
        if address.traddr == "unknown":
            raise AddressError("resolve unknown", "no address", "correct it")
        return [replace(address, traddr=f"10.0.0.{number}") for number in (7, 1)]

    monkeypatch.setattr(connect, "resolve_host", resolve_host)
    tree.subsystem()
    tree.controller(address="traddr=10.0.0.1,trsvcid=4420")
    names = ("array", "unknown")
    wanted = NvmeSubsystem(
        subsystem_nqn=NQN, addresses=tuple(NvmeAddress(traddr=each) for each in names)
    )
    snapshot = run(Sysfs(tree.root).snapshot())

    [numbered] = run(with_numbers([wanted], snapshot))

    assert [each.traddr for each in numbered.addresses] == ["10.0.0.1", "unknown"]
    [other] = run(with_numbers([wanted], Snapshot()))
    assert other.addresses[0].traddr == "10.0.0.7"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "x" * 64, "a..invalid"])
def test_a_host_name_without_address(tree: Any, name: str) -> None:
    wanted = NvmeSubsystem(subsystem_nqn=NQN, addresses=(NvmeAddress(traddr=name),))

    with pytest.raises(AddressError, match=f"resolve {name}"):
        run(connect_subsystem(wanted, HOST, FakeCli(tree), Sysfs(tree.root)))


def test_disconnect_twice(tree: Any) -> None:
    cli, sysfs = FakeCli(tree), Sysfs(tree.root)
    run(connect_subsystem(WANTED, HOST, cli, sysfs))

    dry = run(disconnect_subsystem(NQN, cli, sysfs, dry_run=True))
    first = run(disconnect_subsystem(NQN, cli, sysfs))
    second = run(disconnect_subsystem(NQN, cli, sysfs))

    assert dry.planned == [f"nvme disconnect -n {NQN}  (nvme0, nvme1)"]
    assert dry.done == []
    assert first.done == dry.planned
    assert second.planned == ["nothing to do: not connected"]


@pytest.mark.parametrize(
    ("exit_code", "said"),
    [
        (0, f"NQN:{NQN} disconnected 2 controller(s)"),
        (0, f"NQN:{NQN} disconnected 0 controller(s)"),
        (19, ""),
        (1, "Failed to write to delete_controller: No such device"),
        (1, "no controller found"),
        (1, "something that a later version says"),
    ],
)
@pytest.mark.parametrize("does_it", [True, False])
def test_gone_is_gone_whatever_the_command_says(
    tree: Any, monkeypatch: pytest.MonkeyPatch, exit_code: int, said: str, does_it: bool
) -> None:
    monkeypatch.setattr(connect, "SETTLE_S", 0.05)
    tree.subsystem()
    tree.controller()
    attempt = disconnect_subsystem(NQN, Odd(tree, exit_code, said, does_it), Sysfs(tree.root))

    if does_it:
        assert len(run(attempt).done) == 1
        return
    with pytest.raises(NvmeError, match="still there" if exit_code == 0 else "nvme disconnect"):
        run(attempt)


def test_one_that_is_about_to_go_counts_as_gone(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "SETTLE_S", 0.05)
    tree.subsystem()
    tree.controller(state="deleting")

    cli = Odd(tree, 1, "no controller found", does_it=False)
    assert len(run(disconnect_subsystem(NQN, cli, Sysfs(tree.root))).done) == 1


def test_host_pair_from_the_configuration() -> None:
    assert run(host_identity("nqn.a", "id")) == HostIdentity("nqn.a", "id")


@pytest.mark.parametrize("half", [{"nqn": "nqn.a"}, {"host_id": "id"}])
def test_half_a_host_pair_is_refused(half: dict[str, Any]) -> None:
    with pytest.raises(HostIdentityError, match="go together"):
        run(host_identity(**half))


def test_host_pair_from_files(tmp_path: Path) -> None:
    (tmp_path / "hostnqn").write_text(f"{HOST_NQN}\n")
    (tmp_path / "hostid").write_text(f"{HOST_ID}\n")

    assert run(host_identity(etc=tmp_path)) == HostIdentity(HOST_NQN, HOST_ID, str(tmp_path))


@pytest.mark.parametrize(
    ("hostnqn", "hostid", "message"),
    [
        (None, None, "hostnqn is missing or empty"),
        (HOST_NQN, None, "hostid is missing or empty"),
        (HOST_NQN, "\n", "hostid is missing or empty"),
        (f"{HOST_NQN},traddr=10.0.0.1", HOST_ID, "hostnqn must hold one name"),
        (f"{HOST_NQN}\n{HOST_NQN}", HOST_ID, "hostnqn must hold one name"),
    ],
)
def test_host_files_that_cannot_be_used(
    tmp_path: Path, hostnqn: Any, hostid: Any, message: str
) -> None:
    for name, text in (("hostnqn", hostnqn), ("hostid", hostid)):
        if text is not None:
            (tmp_path / name).write_text(text)

    with pytest.raises(HostIdentityError, match=message):
        run(host_identity(etc=tmp_path))
