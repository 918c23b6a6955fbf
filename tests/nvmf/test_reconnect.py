"""Connecting again what the kernel has given up: when, how often, and what is said."""

import asyncio
import itertools
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fx100_lmcache.config import NvmeAddress, NvmeConfig, NvmeSubsystem
from fx100_lmcache.nvmf import reconnect
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.connect import ConnectReport
from fx100_lmcache.nvmf.errors import NvmeError, UnreachableError
from fx100_lmcache.nvmf.reconnect import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PathWatch,
    Reconnector,
    connect_as_configured,
    missing_paths,
)
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.volume import opening as access
from support.fake_sysfs import NQN, FakeSysfs

OTHER = NQN + ".other"
PORTS = ("10.0.0.1", "10.0.0.2")


def configured(*names: str, nqns: tuple[str, ...] = (NQN, OTHER)) -> NvmeConfig:
    """Configure the same addresses for some subsystems."""
    addresses = tuple(NvmeAddress(traddr=name) for name in names or PORTS)
    return NvmeConfig(
        subsystems=tuple(NvmeSubsystem(subsystem_nqn=nqn, addresses=addresses) for nqn in nqns)
    )


def path(traddr: str) -> FabricAddress:
    return FabricAddress(traddr=traddr, trsvcid="4420")


class World:
    """Paths that are lost or not, ports that answer or not, and a clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.lost: dict[str, list[FabricAddress]] = {NQN: [path(each) for each in PORTS]}
        self.answering: set[str] = set()
        self.stopped = False
        self.looks = 0
        self.calls: list[tuple[float, str]] = []
        self.counts: list[str] = []
        self.reconnector = Reconnector(
            configured(),
            self.look,
            self.connect,
            self.counts.append,
            lambda: self.stopped,
            lambda: self.now_s,
        )

    def look(self) -> dict[str, list[FabricAddress]]:
        self.looks += 1
        return {nqn: list(paths) for nqn, paths in self.lost.items()}

    def connect(self, wanted: NvmeSubsystem) -> ConnectReport:
        nqn = wanted.subsystem_nqn
        self.calls.append((self.now_s, nqn))
        back = [each for each in self.lost[nqn] if each.traddr in self.answering]
        self.lost[nqn] = [each for each in self.lost[nqn] if each not in back]
        if len(self.lost[nqn]) == len(PORTS):
            raise NvmeError(f"{nqn} does not answer")
        silent = UnreachableError("nvme connect", "no NVMe target answers", "check the port")
        return ConnectReport(
            nqn,
            [],
            done=[f"nvme connect {each.traddr}" for each in back],
            connected=back,
            failures=[(each, silent) for each in self.lost[nqn]],
        )

    def run(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(int(seconds / step_s)):
            self.reconnector.attempt()
            self.now_s += step_s


def test_what_is_not_lost_is_left_alone() -> None:
    world = World()
    world.lost.clear()
    world.run(60)
    assert (world.calls, world.counts) == ([], [])


def test_pauses_grow_up_to_a_limit_and_only_the_lost_one_is_tried() -> None:
    world = World()
    world.run(600)
    assert {nqn for _, nqn in world.calls} == {NQN}
    at = [when for when, _ in world.calls]
    pauses = [after - before for before, after in itertools.pairwise(at)]
    assert pauses[:5] == [FIRST_PAUSE_S * 2**n for n in range(5)]
    assert set(pauses[6:]) == {LONGEST_PAUSE_S}
    assert world.counts == ["nvme_reconnect_failures"] * len(at)


def test_one_look_serves_all_subsystems_and_none_is_taken_while_all_pause() -> None:
    world = World()
    world.lost[OTHER] = list(world.lost[NQN])
    world.run(1.5, step_s=0.5)
    assert [nqn for _, nqn in world.calls] == [NQN, OTHER]
    assert world.looks == 1


def test_it_is_back_soon_after_the_target_is_and_pauses_start_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    world = World()
    world.run(10)
    world.answering = set(PORTS)
    world.run(10)
    assert world.lost[NQN] == []
    assert world.counts[-2:] == ["nvme_reconnects"] * 2
    assert caplog.text.count("does not answer") == 1, "the same failure is said once"
    assert f"{NQN}: 10.0.0.1:4420, 10.0.0.2:4420 was lost, connected again" in caplog.text
    world.answering, calls = set(), len(world.calls)
    world.lost[NQN] = [path(each) for each in PORTS]
    world.run(5)
    at = [when for when, _ in world.calls[calls:]]
    assert at[1] - at[0] == FIRST_PAUSE_S


def test_one_lost_path_of_two_is_connected_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    world = World()
    world.answering = set(PORTS)
    world.lost = {NQN: [path(PORTS[1])]}
    world.run(60)
    assert world.calls == [(1000.0, NQN)]
    assert world.counts == ["nvme_reconnects"]
    assert f"{NQN}: 10.0.0.2:4420 was lost, connected again: nvme connect" in caplog.text


def test_a_path_that_stays_away_is_told_once_and_tried_with_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    world = World()
    world.answering = {PORTS[0]}
    world.run(600)
    assert world.lost[NQN] == [path(PORTS[1])]
    failures = world.counts.count("nvme_reconnect_failures")
    assert world.counts.count("nvme_reconnects") == 1
    assert 10 < failures == len(world.calls) < 20
    assert caplog.text.count("10.0.0.2:4420 is lost and not connected again") == 1


def test_a_path_that_somebody_else_connects_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    world = World()
    world.run(300)
    lost, world.lost = world.lost, {}
    world.run(LONGEST_PAUSE_S + 1)
    calls, world.lost = len(world.calls), lost
    world.run(5)
    at = [when for when, _ in world.calls[calls:]]
    assert at[1] - at[0] == FIRST_PAUSE_S
    assert caplog.text.count("does not answer") == 2, "a new loss is said anew"


def test_sysfs_that_cannot_be_read_is_no_exception(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    world = World()

    def broken() -> dict[str, list[FabricAddress]]:
        raise OSError("no sysfs")

    world.reconnector._look = broken
    world.reconnector.attempt()
    assert "no sysfs" in caplog.text


def test_nothing_is_connected_while_the_store_closes() -> None:
    world = World()
    world.stopped = True
    world.run(60)
    assert (world.looks, world.calls) == (0, [])


def test_a_store_that_closes_meanwhile_ends_the_round() -> None:
    world = World()
    world.lost[OTHER] = list(world.lost[NQN])
    plain = world.connect

    def closing(wanted: NvmeSubsystem) -> ConnectReport:
        world.stopped = True
        return plain(wanted)

    world.reconnector._connect = closing
    world.run(60)
    assert [nqn for _, nqn in world.calls] == [NQN]


def test_an_attempt_that_takes_too_long_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(*_: object) -> ConnectReport:
        await asyncio.sleep(600)
        raise AssertionError

    monkeypatch.setattr(reconnect, "connect_subsystem", endless)
    monkeypatch.setattr(reconnect, "COMMAND_S", 0.05)
    monkeypatch.setattr(reconnect, "SETTLE_S", 0.1)
    nvme = configured().model_copy(update={"host_nqn": NQN, "host_id": "some"})
    with pytest.raises(NvmeError, match=r"not done within 0\.2 s"):
        asyncio.run(connect_as_configured(nvme, nvme.subsystems[0]))


# What is missing


@pytest.fixture
def tree(tmp_path: Path) -> FakeSysfs:
    made = FakeSysfs(tmp_path / "sys")
    made.subsystem()
    return made


def missing(tree: FakeSysfs, *names: str) -> list[str]:
    nvme = configured(*names, nqns=(NQN,))
    found = asyncio.run(missing_paths(nvme, Sysfs(tree.root)))
    assert found.keys() == {NQN}
    return [each.traddr for each in found[NQN]]


def controller(tree: FakeSysfs, number: int, traddr: str, state: str = "live") -> None:
    address = f"traddr={traddr},trsvcid=4420"
    tree.controller(f"nvme{number}", address=address, state=state)


@pytest.mark.parametrize("state", ["live", "connecting", "resetting", "new"])
def test_paths_that_the_kernel_cares_for_are_not_missing(tree: FakeSysfs, state: str) -> None:
    controller(tree, 0, PORTS[0])
    controller(tree, 1, PORTS[1], state)
    assert missing(tree, *PORTS) == []


@pytest.mark.parametrize("state", ["deleting", "deleting (no IO)", "dead"])
def test_paths_that_go_for_good_are_missing(tree: FakeSysfs, state: str) -> None:
    controller(tree, 0, PORTS[0])
    controller(tree, 1, PORTS[1], state)
    assert missing(tree, *PORTS) == [PORTS[1]]


def test_without_a_controller_all_paths_are_missing(tree: FakeSysfs) -> None:
    assert missing(tree, *PORTS) == list(PORTS)
    empty = FakeSysfs(tree.root / "empty")
    assert missing(empty, *PORTS) == list(PORTS)


def test_paths_that_nobody_configured_do_not_count(tree: FakeSysfs) -> None:
    controller(tree, 0, PORTS[0])
    controller(tree, 1, "10.0.0.9")
    assert missing(tree, *PORTS) == [PORTS[1]]


def test_a_host_name_is_there_with_any_of_its_addresses(
    tree: FakeSysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve_host(wanted: FabricAddress) -> list[FabricAddress]:
        names = {"array": ["10.0.0.1", "10.0.0.2"], "other": ["10.0.0.3"]}
        return [path(each) for each in names.get(wanted.traddr, [wanted.traddr])]

    monkeypatch.setattr(reconnect, "resolve_host", resolve_host)
    controller(tree, 0, "10.0.0.2")
    assert missing(tree, "array", "other") == ["other"]


def test_a_name_without_an_address_is_not_judged_while_another_path_is_there(
    tree: FakeSysfs,
) -> None:
    name = "no-such-host.invalid"
    assert missing(tree, name) == [name]
    controller(tree, 0, PORTS[0])
    assert missing(tree, PORTS[0], name) == []


def test_a_loop_subsystem_has_one_path(tree: FakeSysfs) -> None:
    nvme = NvmeConfig(subsystems=(NvmeSubsystem(subsystem_nqn=NQN, transport="loop"),))
    assert asyncio.run(missing_paths(nvme, Sysfs(tree.root))) == {NQN: [FabricAddress()]}
    tree.controller(transport="loop", address="")
    assert asyncio.run(missing_paths(nvme, Sysfs(tree.root))) == {NQN: []}


# The thread


class Attempts:
    """Counts calls, and can wait for them."""

    def __init__(self) -> None:
        self.done = threading.Semaphore(0)
        self.hold = threading.Event()
        self.hold.set()

    def __call__(self) -> None:
        self.done.release()
        assert self.hold.wait(30)


def test_the_watch_looks_now_and_then() -> None:
    attempts = Attempts()
    watch = PathWatch(attempts, 0.01)
    watch.start()
    for _ in range(3):
        assert attempts.done.acquire(timeout=30)
    watch.stop()
    assert not watch._thread.is_alive()


def test_the_watch_looks_when_asked_and_not_before() -> None:
    attempts = Attempts()
    watch = PathWatch(attempts, 600)
    watch.start()
    assert not attempts.done.acquire(timeout=0.1)
    watch.look_now()
    assert attempts.done.acquire(timeout=30)
    watch.stop()
    assert not watch._thread.is_alive()
    assert not attempts.done.acquire(blocking=False)


def test_whatever_goes_wrong_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts()

    def broken() -> None:
        attempts()
        raise ValueError("unexpected")

    watch = PathWatch(broken, 0.01)
    watch.start()
    for _ in range(3):
        assert attempts.done.acquire(timeout=30)
    watch.stop()
    assert "looking for lost paths failed" in caplog.text
    assert "unexpected" in caplog.text


def test_stopping_does_not_wait_for_a_connect_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "STOP_S", 0.05)
    attempts = Attempts()
    attempts.hold.clear()
    watch = PathWatch(attempts, 0.01)
    watch.start()
    assert attempts.done.acquire(timeout=30)
    watch.stop()
    assert watch._thread.is_alive()
    attempts.hold.set()
    watch._thread.join(30)
    assert not watch._thread.is_alive()
    assert not attempts.done.acquire(blocking=False)


@pytest.mark.parametrize("nvme", [None, configured().model_copy(update={"reconnect": False})])
def test_nothing_is_watched_where_nothing_is_configured(nvme: NvmeConfig | None) -> None:
    assert access.watch_paths(nvme, list[str]().append, lambda: False) is None


def test_a_process_that_ends_does_not_wait_for_a_connect() -> None:
    """In a process of its own, whose connect takes far longer than we wait."""
    script = (
        "import asyncio, time\n"
        "from fx100_lmcache.volume import opening as access\n"
        "from fx100_lmcache.nvmf.reconnect import PathWatch\n"
        "PathWatch(lambda: access._off_loop(asyncio.sleep(600)), 0.01).start()\n"
        "time.sleep(0.2)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
