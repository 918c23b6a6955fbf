"""The store on real namespaces: found by identity, whatever the kernel calls them today."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.config import load
from fx100_lmcache.errors import FX100Error, WrongVolumeError
from fx100_lmcache.mount import mount
from fx100_lmcache.nvmf.errors import NamespaceNotFoundError
from fx100_lmcache.nvmf.parse import DISCOVERY_NQN
from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.volume.arrival import wait_for_members
from support.nvmet_store import MIB, Array, bytes_of, fx100, get, promised, put
from support.nvmet_target import ADDRESS, Target

CHUNKS = 117  # of 256 tokens: a session of 29,800


@pytest.fixture
def array(
    target: Target, host: HostIdentity, tmp_path: Path, request: pytest.FixtureRequest
) -> Array:
    """Make an array without members; over tcp, unless a test asks for another transport."""
    return Array(target, host, tmp_path, getattr(request, "param", "tcp"))


@pytest.mark.parametrize("array", ["tcp", "loop"], indirect=True)
def test_session_survives_a_reconnect_under_other_names(array: Array) -> None:
    for _ in range(4):
        array.add()
    config = array.configure()
    asked = json.loads(fx100("nvme", "discover", config, "--json").stdout)["addresses"]
    assert [one["configured"] for each in asked for one in each["offered"]] == [True] * 4
    array.connect()
    again = fx100("nvme", "connect", config)
    assert again.exit_code == 0
    assert again.stdout.count("nothing to do") == 4

    before = devices(config)
    formatted = fx100("format", config, "--yes", "--json")
    assert formatted.exit_code == 0, formatted.output
    with array.mounted() as mounted:
        for number in range(CHUNKS):
            assert put(mounted, f"chunk-{number}").outcome == "stored"
    assert fx100("nvme", "disconnect", config).exit_code == 0
    with pytest.raises(NamespaceNotFoundError, match="namespace not found"):
        mount(load(config))

    array.connect(order=(3, 1, 0, 2))
    assert devices(config) != before
    status = fx100("status", config, "--json")
    assert status.exit_code == 0, status.output
    assert json.loads(status.stdout)["usage"]["entries"] == CHUNKS
    with array.mounted() as mounted:
        names = [f"chunk-{number}" for number in range(CHUNKS)]
        assert promised(mounted, names) == set(names)
        assert {get(mounted, name).outcome for name in names} == {"hit"}
    verified = fx100("verify", config, "--json")
    assert verified.exit_code == 0, verified.output
    assert json.loads(verified.stdout)["entries"] == CHUNKS


def test_a_server_that_starts_before_the_array_waits_and_connects(
    array: Array, caplog: pytest.LogCaptureFixture
) -> None:
    """At boot: nothing is connected, and the array's port opens only after a while."""
    for _ in range(2):
        array.add()
    config = load(array.configure(reconnect=True, deadlines={"start": "60s"}))
    array.connect()
    array.format()
    with array.mounted() as mounted:
        assert put(mounted, "before").outcome == "stored"
    array.disconnect()
    [late] = array.ports[1]
    late.take_away()
    opening = threading.Timer(3.0, late.give_back)
    opening.start()

    wait_for_members(config, config.deadlines.start_s)

    opening.join()
    assert "missing volume.members[0]" in caplog.text
    assert "not connected" in caplog.text  # yet, or: it was not, and is now
    assert "nothing is missing any more" in caplog.text
    assert {each.fast_io_fail_s for number in (0, 1) for each in array.controllers(number)} == {2}
    with array.mounted() as mounted:
        assert get(mounted, "before").outcome == "hit"


def test_a_command_may_wait_and_connect(array: Array) -> None:
    array.add()
    config = array.configure(reconnect=True)
    array.connect()
    array.format()
    array.disconnect()

    assert fx100("status", config).exit_code == 1
    assert fx100("status", config, "--wait", 30).exit_code == 0
    array.disconnect()
    array.configure(reconnect=False)
    assert fx100("status", config, "--wait", 1).exit_code == 1
    connected = fx100("nvme", "connect", config, "--wait", 30)
    assert connected.exit_code == 0, connected.output


def test_check_does_not_judge_what_others_have_connected(
    array: Array, target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity
) -> None:
    array.add()
    config = array.configure()
    array.connect()
    other, port = target.subsystem("others"), target.tcp_port()
    other.add_namespace(1)
    port.offer(other)
    address = ("-t", "tcp", "-a", ADDRESS, "-s", str(port.service))
    asyncio.run(cli.run("connect", *address, "-n", other.nqn))
    asyncio.run(cli.run("discover", *address, "--persistent"))
    try:
        assert len(asyncio.run(sysfs.snapshot()).subsystems) >= 3
        result = fx100("nvme", "check", config, "--json")
    finally:
        asyncio.run(cli.run("disconnect", "-n", DISCOVERY_NQN))

    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["worst"] != "problem"
    assert {each["subsystem_nqn"] for each in told["others"]} >= {other.nqn, DISCOVERY_NQN}


def devices(config: Any) -> dict[int, str]:
    """Return the device of each member, as ``fx100 nvme list`` tells it."""
    listed = fx100("nvme", "list", config, "--json")
    assert listed.exit_code == 0, listed.output
    rows = json.loads(listed.stdout)["namespaces"]
    return {row["member"]: row["device"] for row in rows if row["member"] is not None}


@pytest.mark.parametrize("lba_bytes", [512, 4096])
def test_members_of_unequal_size_hold_what_they_can(array: Array, lba_bytes: int) -> None:
    for size in (24, 32, 40, 48):
        array.add(size * MIB, lba_bytes)
    array.configure()
    array.connect()
    array.format()

    lengths = {f"object-{number}": 1 + number * 5_003 for number in range(100)}
    with array.mounted() as mounted:
        for name, length in lengths.items():
            assert put(mounted, name, length).outcome == "stored"
        assert mounted.volume.geometry.io_align_bytes == lba_bytes
        assert all(state.io_mode == "direct" for state in mounted.engine.states())
    with array.mounted() as mounted:
        assert {get(mounted, name, length).outcome for name, length in lengths.items()} == {"hit"}
    assert len(bytes_of("object-99", lengths["object-99"])) == lengths["object-99"]


def test_full_volume_of_4096_byte_blocks_evicts_and_serves(array: Array) -> None:
    for _ in range(2):
        array.add(16 * MIB, 4096)
    array.configure()
    array.connect()
    array.format()

    with array.mounted() as mounted:
        names = [f"object-{number}" for number in range(200)]
        assert {put(mounted, name).outcome for name in names} == {"stored"}
        kept = promised(mounted, names)
        assert 60 < len(kept) < 128
        assert {get(mounted, name).outcome for name in kept} == {"hit"}


def test_member_of_another_volume_is_named(array: Array) -> None:
    for _ in range(4):
        array.add(16 * MIB)
    config = array.configure()
    array.connect()
    array.format()
    array.subsystems.reverse()
    array.ports.reverse()
    array.configure(members=1)
    assert fx100("format", config, "--yes").exit_code == 0  # the last one is a volume of its own
    array.configure()

    with pytest.raises(WrongVolumeError, match="belongs to volume") as caught:
        mount(load(config))

    device = devices(config)[0]
    assert device in str(caught.value)
    status = fx100("status", config, "--json")
    assert status.exit_code == 1
    assert any(
        "belongs to volume" in each["what"] for each in json.loads(status.stdout)["problems"]
    )


def test_namespace_that_is_not_connected_is_named(array: Array) -> None:
    for _ in range(2):
        array.add(16 * MIB)
    config = array.configure()
    array.connect()
    array.format()
    array.disconnect(1)

    with pytest.raises(FX100Error, match=r"namespace not found: uuid .*"):
        mount(load(config))

    status = fx100("status", config)
    assert status.exit_code == 1
    assert "fx100 nvme connect" in status.stdout
    checked = json.loads(fx100("nvme", "check", config, "--json").stdout)
    assert checked["worst"] == "problem"
    assert fx100("nvme", "list", config).exit_code == 1


def test_disconnect_refuses_a_volume_in_use(array: Array) -> None:
    array.add()
    config = array.configure()
    array.connect()
    array.format()

    with array.mounted() as mounted:
        refused = fx100("nvme", "disconnect", config)
        assert refused.exit_code == 1
        assert "in use" in refused.stderr
        assert put(mounted, "still there").outcome == "stored"
    assert fx100("nvme", "disconnect", config).exit_code == 0
