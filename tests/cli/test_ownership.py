"""One writer for each shard, proven with real processes."""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fx100_lmcache.errors import ClaimError
from fx100_lmcache.mount import mount
from fx100_lmcache.testing.harness import value_of
from support.cli import Owner, Rig, formatted, fx100, fx100_process, get, planned

StartOwner = Callable[..., Owner]
LENGTH = 200_000


def test_a_second_process_is_refused_and_told_who(rig: Rig, owner: StartOwner) -> None:
    first = owner(rig.config)
    assert first.opened == "open"
    second = owner(rig.config)
    assert second.opened.startswith("ClaimError: shard 0 is in use")
    assert f"pid={first.pid} " in second.opened
    assert first.tell("store", "a", LENGTH) == "stored"


def test_format_is_refused_under_a_living_store(rig: Rig, owner: StartOwner) -> None:
    first = owner(rig.config)
    assert first.tell("store", "a", LENGTH) == "stored"
    before = rig.unclaimed()
    for options in ((), ("--force",)):
        result = fx100_process("format", rig.config, "--yes", *options)
        assert result.returncode == 1
        assert f"pid={first.pid} " in result.stderr
        assert "stop that process first" in result.stderr
    assert rig.unclaimed() == before
    assert first.tell("check", "a", LENGTH) == "right"
    first.kill()
    assert fx100_process("format", rig.config, "--yes").returncode == 0


def test_format_is_refused_under_the_owner_of_one_shard(tmp_path: Path, owner: StartOwner) -> None:
    rig = formatted(tmp_path / "volume", volume={"shards": 2})
    ranks = [owner(rig.config, "--shard", str(rank)) for rank in range(2)]
    assert [rank.opened for rank in ranks] == ["open", "open"]
    ranks[0].kill()
    result = fx100_process("format", rig.config, "--yes")
    assert result.returncode == 1
    assert f"pid={ranks[1].pid} " in result.stderr
    states = {s["shard"]: s["state"] for s in rig.status()["shards"]}
    assert states == {0: "left behind", 1: "in use"}
    with pytest.raises(ClaimError, match="shard 1 is in use"):
        mount(rig.load())
    mount(rig.load(), shards=[0]).close()


def test_nothing_opens_during_a_format(rig: Rig) -> None:
    from fx100_lmcache.volume.opening import open_to_format

    with_lock = open_to_format(rig.load(), rig.members[0])
    try:
        with pytest.raises(ClaimError, match="is being formatted"):
            mount(rig.load())
        problem = rig.status()["problems"][0]
        assert "is being formatted" in problem["what"]
    finally:
        with_lock.close()
    mount(rig.load()).close()


def test_a_block_device_has_one_owner(
    tmp_path: Path, loop_device: Callable[..., Path], owner: StartOwner
) -> None:
    rig = planned(tmp_path / "volume")
    rig.rewrite([loop_device("a", sector=512), loop_device("b", sector=512)])
    assert fx100("format", rig.config, "--yes").exit_code == 0
    first = owner(rig.config)
    assert first.opened == "open"
    second = owner(rig.config)
    assert second.opened.startswith("ClaimError")
    assert f"pid={first.pid} " in second.opened
    twins = []
    for member in rig.members:  # the same devices under other nodes, as in a container
        twins.append(tmp_path / f"{member.name}-twin")
        os.mknod(twins[-1], 0o600 | 0o060000, member.stat().st_rdev)
    rig.rewrite(twins)
    assert f"pid={first.pid} " in owner(rig.config).opened
    result = fx100_process("format", rig.config, "--yes", "--force")
    assert result.returncode == 1
    assert f"pid={first.pid} " in result.stderr
    first.kill()
    assert owner(rig.config).opened == "open"


def test_after_sigkill_the_next_opens_at_once(rig: Rig, owner: StartOwner) -> None:
    first = owner(rig.config)
    assert first.tell("store", "a", LENGTH) == "stored"
    first.kill()
    assert rig.status()["shards"][0]["state"] == "left behind"
    second = owner(rig.config)
    assert second.opened == "open"
    assert second.tell("check", "a", LENGTH) == "right"
    assert second.tell("close") == 0
    assert rig.status()["shards"][0]["state"] == "free"


def test_a_forked_child_does_not_keep_the_volume(rig: Rig, owner: StartOwner) -> None:
    first = owner(rig.config)
    child = first.tell("fork")
    try:
        first.kill()
        os.kill(child, 0)  # it lives on
        second = owner(rig.config)
        assert second.opened == "open"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_stopped_process_of_this_host_is_not_replaced(rig: Rig, owner: StartOwner) -> None:
    first = owner(rig.config)
    os.kill(first.pid, signal.SIGSTOP)
    result = fx100_process("take-over", rig.config, "--yes")
    assert result.returncode == 1
    assert f"pid={first.pid} " in result.stderr
    first.kill()
    assert owner(rig.config).opened == "open"


def test_a_living_server_of_another_host_is_not_replaced(tmp_path: Path, owner: StartOwner) -> None:
    """Although both have one host name and one machine id: cloned images, pods, localhost."""
    rig = formatted(tmp_path / "volume", claim={"heartbeat": "200ms", "watch": "5s"})
    first = owner(rig.config, "--other-host", "--name", socket.gethostname())
    assert first.tell("store", "a", LENGTH) == "stored"
    second = owner(rig.config)
    assert second.opened.startswith("ClaimError: shard 0 is claimed by another host")
    assert f"pid={first.pid} " in second.opened
    assert first.tell("store", "b", LENGTH) == "stored"
    report = json.loads(fx100("status", rig.config, "--watch", "20", "--json").stdout)["shards"][0]
    assert (report["state"], report["same_boot"]) == ("claimed by another host", False)
    assert report["still_s"] < 5
    assert first.tell("close") == 0
    assert owner(rig.config).opened == "open"


def test_a_dead_server_of_another_host_is_replaced_without_an_operator(
    tmp_path: Path, owner: StartOwner
) -> None:
    """As after a reboot of the same machine, or of a pod that moved; and it wakes once more."""
    rig = formatted(tmp_path / "volume", claim={"heartbeat": "200ms", "watch": "5s"})
    first = owner(rig.config, "--other-host")
    assert first.tell("store", "a", LENGTH) == "stored"
    os.kill(first.pid, signal.SIGSTOP)
    second = owner(rig.config)
    assert second.opened == "open"
    assert second.tell("check", "a", LENGTH) == "right"
    os.kill(first.pid, signal.SIGCONT)
    assert first.tell("close") == 0  # its last words change nothing
    assert second.tell("store", "b", LENGTH) == "stored"
    assert f"pid={second.pid} " in rig.status()["shards"][0]["holder"]


def test_a_holder_stopped_replaced_and_woken_causes_misses_at_most(
    tmp_path: Path, owner: StartOwner
) -> None:
    rig = formatted(tmp_path / "volume", deadlines={"claim_check": "50ms"})
    old = owner(rig.config, "--other-host")
    assert old.opened == "open"
    names = [f"old{number}" for number in range(10)]
    assert {old.tell("store", name, LENGTH) for name in names} == {"stored"}
    old.tell("churn", LENGTH)
    os.kill(old.pid, signal.SIGSTOP)

    assert rig.status()["shards"][0]["state"] == "claimed by another host"
    assert fx100_process("take-over", rig.config).returncode == 1  # nobody said yes
    assert fx100_process("take-over", rig.config, "--yes").returncode == 0

    new = owner(rig.config)
    assert new.opened == "open"
    for name in names:
        new.tell("remove", name)
    fresh = [f"new{number}" for number in range(40)]  # more than there is room for
    assert {new.tell("store", name, LENGTH) for name in fresh} == {"stored"}

    os.kill(old.pid, signal.SIGCONT)
    assert old.tell("churned") in ("claim_lost", "claim_stale")  # it stops by itself, or is told
    seen_by_old = {old.tell("check", name, LENGTH) for name in names}
    seen_by_new = {new.tell("check", name, LENGTH) for name in fresh}
    assert "WRONG" not in seen_by_old | seen_by_new
    assert "right" in seen_by_new
    assert new.tell("store", "later", LENGTH) == "stored"
    new.kill()

    mounted = mount(rig.load())
    for name in [*names, *fresh, "later"]:
        assert get(mounted, name, LENGTH) in (None, value_of(name, 1, LENGTH))
    mounted.close()
    # what the old one still wrote over live pieces is found, and nothing else is bad
    result = fx100("verify", rig.config)
    assert result.exit_code in (0, 1)
    assert "Traceback" not in result.output
