"""Discover, connect, disconnect with the real nvme-cli against a real target."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from fx100_lmcache.config import NvmeConfig
from fx100_lmcache.nvmf.connect import connect_subsystem, disconnect_subsystem
from fx100_lmcache.nvmf.errors import (
    AuthenticationError,
    CommandError,
    HostIdentityError,
    RefusedByTargetError,
    SecretError,
    UnreachableError,
)
from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.volume.opening import reconnect_obstacles
from support.nvmet_host import wanted
from support.nvmet_target import ADDRESS, Target, sh

NOBODY = 65534


def test_discover_lists_what_the_port_offers(target: Target, cli: NvmeCli) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    port.offer(subsystem)

    records = asyncio.run(cli.discover("-t", "tcp", "-a", ADDRESS, "-s", str(port.service)))

    offered = [record for record in records if not record.is_discovery]
    assert [record.subsystem_nqn for record in offered] == [subsystem.nqn]
    assert (offered[0].address.traddr, offered[0].address.trsvcid) == (ADDRESS, str(port.service))


@pytest.mark.parametrize("transport", ["tcp", "loop"])
def test_second_connect_does_nothing(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity, transport: str
) -> None:
    subsystem = target.subsystem()
    port = target.tcp_port() if transport == "tcp" else target.loop_port()
    port.offer(subsystem)
    request = wanted(subsystem, port, ctrl_loss_timeout_s=30, fast_io_fail_s=2)

    first = asyncio.run(connect_subsystem(request, host, cli, sysfs))
    second = asyncio.run(connect_subsystem(request, host, cli, sysfs))

    # nvme-cli cannot set fast_io_fail_tmo, and transport loop takes no time-outs at connect.
    assert len(first.done) == {"tcp": 2, "loop": 4}[transport]
    assert second.planned[0] == "nothing to do"
    assert second.done == []
    [controller] = asyncio.run(sysfs.snapshot()).controllers(subsystem.nqn)
    assert (controller.state, controller.transport) == ("live", transport)
    assert (controller.host_nqn, controller.host_id) == (host.nqn, host.id)
    assert controller.fast_io_fail_s == 2
    assert controller.ctrl_loss_timeout_s == 30
    assert controller.reconnect_delay_s == 1


def test_changed_time_outs_are_set_without_a_reconnect(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))
    changed = wanted(subsystem, port, reconnect_delay_s=4, ctrl_loss_timeout_s=30, fast_io_fail_s=5)

    report = asyncio.run(connect_subsystem(changed, host, cli, sysfs))
    again = asyncio.run(connect_subsystem(changed, host, cli, sysfs))

    assert len(report.done) == 3
    [controller] = asyncio.run(sysfs.snapshot()).controllers(subsystem.nqn)
    assert controller.reconnect_delay_s == 4
    assert controller.ctrl_loss_timeout_s == 32  # kept as 8 attempts, 4 s apart
    assert controller.fast_io_fail_s == 5
    assert again.done == []


def test_dry_run_touches_nothing(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    port.offer(subsystem)

    report = asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs, dry_run=True))

    assert report.planned[0].startswith("nvme connect --transport=tcp")
    assert not list(asyncio.run(sysfs.snapshot()).controllers(subsystem.nqn))


def test_planned_command_is_what_an_operator_can_type(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    port.offer(subsystem)
    request = wanted(subsystem, port)
    plan = asyncio.run(connect_subsystem(request, host, cli, sysfs, dry_run=True)).planned

    subprocess.run(plan[0], shell=True, check=True, timeout=60)

    after = asyncio.run(connect_subsystem(request, host, cli, sysfs))
    assert [step.partition(" >")[0] for step in after.done] == ["echo 2"]


def test_disconnect_twice(target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))

    first = asyncio.run(disconnect_subsystem(subsystem.nqn, cli, sysfs))
    second = asyncio.run(disconnect_subsystem(subsystem.nqn, cli, sysfs))

    assert len(first.done) == 1
    assert second.planned == ["nothing to do: not connected"]
    assert not list(asyncio.run(sysfs.snapshot()).controllers(subsystem.nqn))


def test_a_closed_port_is_unreachable(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()

    with pytest.raises(UnreachableError, match="no NVMe target answers"):
        asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))


def test_an_unknown_subsystem_is_refused(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    offered, missing, port = target.subsystem("a"), target.subsystem("b"), target.tcp_port()
    port.offer(offered)

    with pytest.raises(RefusedByTargetError, match="no such subsystem"):
        asyncio.run(connect_subsystem(wanted(missing, port), host, cli, sysfs))


def test_a_host_that_is_not_allowed_is_refused(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    subsystem.allow_only("nqn.2024-01.io.fx100:somebody-else")
    port.offer(subsystem)

    with pytest.raises(RefusedByTargetError, match="not allowed"):
        asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))


def test_one_dead_path_of_two_is_reported_and_the_other_serves(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, alive, dead = target.subsystem(), target.tcp_port(), target.tcp_port()
    alive.offer(subsystem)

    report = asyncio.run(connect_subsystem(wanted(subsystem, dead, alive), host, cli, sysfs))

    [(address, error)] = report.failures
    assert address.trsvcid == str(dead.service)
    assert isinstance(error, UnreachableError)
    assert len(list(asyncio.run(sysfs.snapshot()).controllers(subsystem.nqn))) == 1


def test_a_transport_without_driver_is_explained(
    target: Target, cli: NvmeCli, host: HostIdentity
) -> None:
    with pytest.raises(CommandError, match="modprobe"):
        asyncio.run(
            cli.run(
                "connect", "--transport=rdma", f"--traddr={ADDRESS}", "--trsvcid=4420",
                "--nqn=nqn.2024-01.io.fx100:none",
            )
        )  # fmt: skip


def test_half_a_host_pair_is_refused_before_the_kernel_does(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    port.offer(subsystem)
    request = wanted(subsystem, port)
    asyncio.run(connect_subsystem(request, host, cli, sysfs))
    other_id = HostIdentity(host.nqn, "f0100000-1ab0-4000-8000-00000000ffff")

    with pytest.raises(HostIdentityError, match="one to one"):
        asyncio.run(connect_subsystem(request, other_id, cli, sysfs))


def test_a_connection_under_another_host_name_is_told(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    port.offer(subsystem)
    request = wanted(subsystem, port)
    asyncio.run(connect_subsystem(request, host, cli, sysfs))
    other_id = "f0100000-1ab0-4000-8000-00000000eeee"
    other = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{other_id}", other_id)

    report = asyncio.run(connect_subsystem(request, other, cli, sysfs))

    assert report.done == []
    assert any(f"connected under host NQN {host.nqn}" in note for note in report.notes)


def test_what_keeps_a_process_from_connecting_is_told(target: Target, host: HostIdentity) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    section = NvmeConfig(subsystems=(wanted(subsystem, port),), host_nqn=host.nqn, host_id=host.id)
    assert reconnect_obstacles(section) == []

    os.seteuid(NOBODY)
    try:
        [found] = reconnect_obstacles(section)
    finally:
        os.seteuid(0)

    assert found.what == "/dev/nvme-fabrics cannot be opened (Permission denied)"
    assert found.do.startswith("run as root")


def test_secret_reaches_the_kernel_by_file_only(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity, tmp_path: Path
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    secret = sh("nvme", "gen-dhchap-key", "--hmac=1", "--nqn", host.nqn)
    subsystem.allow_only(host.nqn, dhchap_key=secret)
    subsystem.add_namespace(1)
    port.offer(subsystem)
    file = tmp_path / "secret"
    file.write_text(secret + "\n")
    request = wanted(subsystem, port, dhchap_secret_file=file)

    file.chmod(0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        asyncio.run(connect_subsystem(request, host, cli, sysfs))
    file.chmod(0o600)
    report = asyncio.run(connect_subsystem(request, host, cli, sysfs))

    assert len(list(asyncio.run(sysfs.snapshot()).controllers(subsystem.nqn))) == 1
    assert secret not in "".join(report.planned + report.done)


@pytest.mark.parametrize("given", ["none", "wrong"])
def test_without_the_right_secret_authentication_fails(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity, tmp_path: Path, given: str
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    right, wrong = (sh("nvme", "gen-dhchap-key", "--hmac=1", "--nqn", host.nqn) for _ in "rw")
    subsystem.allow_only(host.nqn, dhchap_key=right)
    port.offer(subsystem)
    file = tmp_path / "secret"
    file.write_text(wrong)
    file.chmod(0o600)
    request = wanted(subsystem, port, dhchap_secret_file=file if given == "wrong" else None)

    with pytest.raises((AuthenticationError, RefusedByTargetError)) as caught:
        asyncio.run(connect_subsystem(request, host, cli, sysfs))

    assert wrong not in str(caught.value)
    assert not list(asyncio.run(sysfs.snapshot()).controllers(subsystem.nqn))
