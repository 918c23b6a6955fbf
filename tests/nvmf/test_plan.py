from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.config import NvmeAddress, NvmeSubsystem
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.errors import HostIdentityError
from fx100_lmcache.nvmf.plan import HostIdentity, plan_connect, wanted_addresses
from fx100_lmcache.nvmf.snapshot import NEVER, Controller, Snapshot, Subsystem

NQN = "nqn.2024-01.io.fx100:array"
HOST = HostIdentity("nqn.2014-08.org.nvmexpress:uuid:1", "f0100000-1ab0-4000-8000-000000000001")
WANTED = NvmeSubsystem(
    subsystem_nqn=NQN,
    addresses=(
        NvmeAddress(traddr="10.0.0.1", trsvcid=4420),
        NvmeAddress(traddr="10.0.1.1", trsvcid=4420, host_traddr="10.0.1.9", host_iface="eth1"),
    ),
    nr_io_queues=8,
)
LIVE = Controller(
    name="nvme4",
    subsystem_nqn=NQN,
    transport="tcp",
    address=FabricAddress("10.0.0.1", "4420", src_addr="10.0.0.9"),
    state="live",
    host_nqn=HOST.nqn,
    host_id=HOST.id,
    io_queues=8,
    queue_size=128,
    keep_alive_s=5,
    reconnect_delay_s=2,
    ctrl_loss_timeout_s=600,
    fast_io_fail_s=2,
)


def snapshot(*controllers: Controller) -> Snapshot:
    return Snapshot((Subsystem("nvme-subsys0", NQN, controllers=controllers),))


def plan(wanted: Any = WANTED, there: Any = None, host: Any = HOST) -> Any:
    return plan_connect(wanted, wanted_addresses(wanted), host, there or snapshot())


def test_nothing_is_connected() -> None:
    result = plan()

    assert [step.address.traddr for step in result.connects] == ["10.0.0.1", "10.0.1.1"]
    assert result.connects[1].arguments == (
        "connect",
        "--transport=tcp",
        f"--nqn={NQN}",
        "--traddr=10.0.1.1",
        "--trsvcid=4420",
        "--host-traddr=10.0.1.9",
        "--host-iface=eth1",
        f"--hostnqn={HOST.nqn}",
        f"--hostid={HOST.id}",
        "--nr-io-queues=8",
        "--queue-size=128",
        "--keep-alive-tmo=5",
        "--reconnect-delay=2",
        "--ctrl-loss-tmo=600",
    )
    assert result.connects[0].options == (
        f"transport=tcp,nqn={NQN},traddr=10.0.0.1,trsvcid=4420,hostnqn={HOST.nqn},"
        f"hostid={HOST.id},nr_io_queues=8,queue_size=128,keep_alive_tmo=5,reconnect_delay=2,"
        "ctrl_loss_tmo=600"
    )
    assert result.lines()[2] == (
        "then, for each new controller: echo 2 > /sys/class/nvme/(controller)/fast_io_fail_tmo"
    )


def test_host_names_always_come_as_a_pair() -> None:
    for step in plan().connects:
        assert sum(each.startswith(("--hostnqn", "--hostid")) for each in step.arguments) == 2


def test_what_is_connected_is_left_alone() -> None:
    second = replace(
        LIVE, name="nvme5", address=FabricAddress("10.0.1.1", "4420", "10.0.1.9", "eth1")
    )

    result = plan(there=snapshot(LIVE, second))

    assert (result.connects, result.tunes, result.notes) == ((), (), ())
    assert result.lines() == ["nothing to do"]


@pytest.mark.parametrize("state", ["connecting", "resetting"])
def test_a_path_that_reconnects_by_itself_is_there(state: str) -> None:
    result = plan(there=snapshot(replace(LIVE, state=state)))

    assert len(result.connects) == 1
    assert any("keeps trying" in note for note in result.notes)


@pytest.mark.parametrize("state", ["deleting", "dead", "deleting (no IO)"])
def test_a_path_that_goes_is_not_there(state: str) -> None:
    assert len(plan(there=snapshot(replace(LIVE, state=state))).connects) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"address": FabricAddress("10.0.0.2", "4420")},
        {"address": FabricAddress("10.0.0.1", "4421")},
        {"transport": "rdma"},
    ],
)
def test_another_path_is_not_this_one(change: dict[str, Any]) -> None:
    assert len(plan(there=snapshot(replace(LIVE, **change))).connects) == 2


def test_path_of_another_subsystem_is_not_this_one() -> None:
    other = replace(LIVE, subsystem_nqn="nqn.2024-01.io.fx100:b")
    there = Snapshot((Subsystem("nvme-subsys0", other.subsystem_nqn, controllers=(other,)),))

    assert len(plan(there=there).connects) == 2


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ({"fast_io_fail_s": NEVER}, [("fast_io_fail_tmo", 2)]),
        ({"fast_io_fail_s": 5}, [("fast_io_fail_tmo", 2)]),
        ({"ctrl_loss_timeout_s": NEVER}, [("ctrl_loss_tmo", 600)]),
        ({"ctrl_loss_timeout_s": 0}, [("ctrl_loss_tmo", 600)]),
        # The kernel keeps a number of attempts: with another delay the loss time-out is another.
        (
            {"reconnect_delay_s": 10, "ctrl_loss_timeout_s": 600},
            [("reconnect_delay", 2), ("ctrl_loss_tmo", 600)],
        ),
        (
            {"reconnect_delay_s": 10, "ctrl_loss_timeout_s": 30},
            [("reconnect_delay", 2), ("ctrl_loss_tmo", 600)],
        ),
        ({"fast_io_fail_s": None}, []),
    ],
)
def test_time_outs_are_set_on_what_is_connected(change: dict[str, Any], steps: list[Any]) -> None:
    result = plan(there=snapshot(replace(LIVE, **change)))

    assert [(step.setting, step.value) for step in result.tunes] == steps
    assert all(step.controller == "nvme4" for step in result.tunes)


def test_loss_time_out_is_a_multiple_of_the_delay() -> None:
    wanted = WANTED.model_copy(update={"reconnect_delay_s": 7, "ctrl_loss_timeout_s": 600})
    there = snapshot(replace(LIVE, reconnect_delay_s=7, ctrl_loss_timeout_s=602))

    assert plan(wanted, there).tunes == ()


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"io_queues": 1}, "has 1 I/O queues, not 8"),
        ({"queue_size": 32}, "has 32 commands per queue, not 128"),
        ({"keep_alive_s": 30}, "has 30 s keep-alive, not 5"),
        ({"fast_io_fail_s": None}, "stalled I/O is not bounded"),
        ({"host_nqn": "nqn.other", "host_id": "other"}, "under host NQN nqn.other"),
    ],
)
def test_what_only_a_reconnect_changes_is_noted(change: dict[str, Any], note: str) -> None:
    assert any(note in each for each in plan(there=snapshot(replace(LIVE, **change))).notes)


@pytest.mark.parametrize("change", [{"host_id": "other"}, {"host_nqn": "nqn.other"}])
def test_half_a_pair_in_use_elsewhere_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(HostIdentityError, match=r"nvme4 to .* one to one\n.*do: use that pair"):
        plan(there=snapshot(replace(LIVE, **change)))


def test_local_controllers_have_no_host_names() -> None:
    local = replace(LIVE, transport="pcie", host_nqn=None, host_id=None)

    assert len(plan(there=snapshot(local)).connects) == 2


def test_loop_has_no_address_and_no_time_outs_at_connect() -> None:
    wanted = NvmeSubsystem(subsystem_nqn=NQN, transport="loop")

    [step] = plan(wanted).connects
    there = plan(wanted, snapshot(replace(LIVE, transport="loop", address=FabricAddress("port"))))

    assert not any(word in step.options for word in ("traddr", "reconnect", "ctrl_loss"))
    assert "--queue-size=128" in step.arguments
    assert there.connects == ()


def test_secret_is_named_by_its_file(tmp_path: Path) -> None:
    wanted = WANTED.model_copy(update={"dhchap_secret_file": tmp_path / "secret"})

    lines = plan(wanted).lines()

    assert lines[0].startswith("write to /dev/nvme-fabrics: transport=tcp,")
    assert lines[0].endswith(f"dhchap_secret=(from {tmp_path}/secret)")
