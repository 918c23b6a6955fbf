"""Namespaces keep their identity while the kernel gives them other names."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.findings import Severity
from fx100_lmcache.nvmf import parse
from fx100_lmcache.nvmf.check import check
from fx100_lmcache.nvmf.connect import connect_subsystem, disconnect_subsystem
from fx100_lmcache.nvmf.errors import NamespaceNotFoundError
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.nvmf.resolve import resolve
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.sysfs import Sysfs
from support.nvmet_host import BLOCK_BYTES, opened, read_block, wanted
from support.nvmet_target import Target


def marked(text: str) -> bytes:
    return text.encode().ljust(BLOCK_BYTES, b".")


def read_first_block(device: str) -> bytes:
    with opened(device) as descriptor:
        return read_block(descriptor)


def test_device_number_is_not_the_nsid(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    for nsid in (2, 3):
        subsystem.add_namespace(nsid, content=marked(f"namespace {nsid}"))
    port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))

    for nsid in (2, 3):
        identity = NamespaceIdentity(subsystem_nqn=subsystem.nqn, nsid=nsid)
        found = asyncio.run(resolve(identity, sysfs, timeout_s=10))
        assert read_first_block(found.device) == marked(f"namespace {nsid}")
        assert found.device.endswith(f"n{nsid - 1}")
    with pytest.raises(NamespaceNotFoundError, match="nsid is 2, not 1"):
        asyncio.run(resolve(NamespaceIdentity(subsystem.nqn, 1), sysfs))


def test_identities_survive_a_reconnect_in_another_order(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    port = target.tcp_port()
    identities = {}
    requests = []
    for name in "abc":
        subsystem = target.subsystem(name)
        namespace = subsystem.add_namespace(1, content=marked(name))
        port.offer(subsystem)
        identities[name] = NamespaceIdentity(uuid=namespace.uuid)
        requests.append(wanted(subsystem, port))

    devices = []
    for order in (requests, requests[::-1]):
        for request in order:
            asyncio.run(connect_subsystem(request, host, cli, sysfs))
        found = {
            name: asyncio.run(resolve(identity, sysfs, timeout_s=10)).device
            for name, identity in identities.items()
        }
        for name, device in found.items():
            assert read_first_block(device) == marked(name)
        devices.append(found)
        for request in order:
            asyncio.run(disconnect_subsystem(request.subsystem_nqn, cli, sysfs))

    assert devices[0] != devices[1]


def test_list_agrees_with_sysfs(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    for nsid, size_bytes, lba_bytes in ((2, 8 << 20, 512), (7, 12 << 20, 4096)):
        subsystem.add_namespace(nsid, size_bytes, lba_bytes)
    port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))
    for nsid in (2, 7):
        asyncio.run(resolve(NamespaceIdentity(subsystem.nqn, nsid), sysfs, timeout_s=10))

    def printed(*command: str) -> Any:
        return parse.find_json(asyncio.run(cli.run(*command, "-o", "json")).stdout, "nvme", "")

    listed = {
        (each["DevicePath"], int(each["PhysicalSize"]), int(each["SectorSize"]))
        for each in printed("list")["Devices"]
    }
    snapshot = asyncio.run(sysfs.snapshot())
    assert listed == {(n.device, n.size_bytes, n.lba_bytes) for n in snapshot.namespaces()}
    assert {n.identity.nsid for n in snapshot.namespaces()} >= {2, 7}
    hosts = printed("list-subsys")
    [path] = [
        path
        for host_entry in (hosts if isinstance(hosts, list) else [hosts])
        for each in host_entry["Subsystems"]
        if each["NQN"] == subsystem.nqn
        for path in each["Paths"]
    ]
    assert f"trsvcid={port.service}" in path["Address"]
    assert path["State"] == "live"


def test_nguid_from_the_target_is_seen(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    nguid = "0123456789abcdef0123456789abcdef"
    subsystem, port = target.subsystem(), target.tcp_port()
    namespace = subsystem.add_namespace(4, nguid=nguid)
    port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))

    found = asyncio.run(resolve(NamespaceIdentity(nguid=nguid), sysfs, timeout_s=10))

    assert found.identity == NamespaceIdentity(subsystem.nqn, 4, nguid, None, namespace.uuid)


def test_blocks_of_4096_bytes_are_seen_as_such(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, port = target.subsystem(), target.tcp_port()
    subsystem.add_namespace(1, lba_bytes=4096)
    port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))

    found = asyncio.run(resolve(NamespaceIdentity(subsystem.nqn, 1), sysfs, timeout_s=10))

    assert found.lba_bytes == 4096
    assert found.size_bytes == 8 << 20


def test_hidden_path_nodes_are_never_offered(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, ports = target.subsystem(), [target.tcp_port(), target.tcp_port()]
    subsystem.add_namespace(1)
    for port in ports:
        port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, *ports), host, cli, sysfs))

    found = asyncio.run(resolve(NamespaceIdentity(subsystem.nqn, 1), sysfs, timeout_s=10))

    hidden = [
        each.name
        for each in Path("/sys/class/block").glob("nvme*")
        if (each / "hidden").read_text().strip() == "1"
    ]
    assert sorted(path.name for path in found.paths) == sorted(hidden)
    assert len(hidden) == 2, "native multipath is off: this kernel cannot show the case"
    names = {each.name for each in asyncio.run(sysfs.snapshot()).namespaces()}
    assert names.isdisjoint(hidden)


def test_ana_states_are_seen_per_path(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, ports = target.subsystem(), [target.tcp_port(), target.tcp_port()]
    subsystem.add_namespace(1)
    ports[0].set_ana_state("inaccessible")
    ports[1].set_ana_state("non-optimized")
    for port in ports:
        port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, *ports), host, cli, sysfs))

    found = asyncio.run(resolve(NamespaceIdentity(subsystem.nqn, 1), sysfs, timeout_s=10))

    assert {path.ana_state for path in found.paths} == {"inaccessible", "non-optimized"}
    findings = check(asyncio.run(sysfs.snapshot()))
    assert any(each.what == "only non-optimized paths" for each in findings)


def test_what_check_says_to_type_helps(
    target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    subsystem, ports = target.subsystem(), [target.tcp_port(), target.tcp_port()]
    subsystem.add_namespace(1)
    for port in ports:
        port.offer(subsystem)
        # As an operator might: without any of our settings.
        asyncio.run(
            cli.run(
                "connect", "--transport=tcp", f"--nqn={subsystem.nqn}", "--traddr=127.0.0.1",
                f"--trsvcid={port.service}", f"--hostnqn={host.nqn}", f"--hostid={host.id}",
                "--ctrl-loss-tmo=20",
            )
        )  # fmt: skip
    asyncio.run(resolve(NamespaceIdentity(subsystem.nqn, 1), sysfs, timeout_s=10))

    before = check(asyncio.run(sysfs.snapshot()))
    advice = [finding.do.partition("  ")[0] for finding in before if finding.do.startswith("echo")]
    for command in advice:
        value, _, files = command.removeprefix("echo ").partition(" > ")
        Path(files.partition(" (")[0]).write_text(value)
    after = check(asyncio.run(sysfs.snapshot()))

    assert len(advice) >= 5  # 2 x fast_io_fail_tmo, 2 x ctrl_loss_tmo, iopolicy
    assert any(each.severity is Severity.PROBLEM for each in before)
    assert [each for each in after if each.severity in (Severity.WARNING, Severity.PROBLEM)] == []
