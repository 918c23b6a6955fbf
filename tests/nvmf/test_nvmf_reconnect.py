"""Connecting again what the kernel has given up: when, how often, and what is said."""

import itertools
import logging
import subprocess
import sys
import threading

import pytest
from fake_sysfs import NQN

from fx100_lmcache.config import NvmeAddress, NvmeConfig, NvmeSubsystem
from fx100_lmcache.nvmf.connect import ConnectReport
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.nvmf.reconnect import FIRST_PAUSE_S, LONGEST_PAUSE_S, Reconnector

OTHER = NQN + ".other"


class World:
    """Subsystems that are lost or not, a target that is there or not, and a clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.lost = {NQN}
        self.target = False
        self.stopped = False
        self.calls: list[tuple[float, str]] = []
        self.counts: list[str] = []
        nvme = NvmeConfig(
            subsystems=tuple(
                NvmeSubsystem(subsystem_nqn=nqn, addresses=(NvmeAddress(traddr="10.0.0.1"),))
                for nqn in (NQN, OTHER)
            )
        )
        self.reconnector = Reconnector(
            nvme,
            self.lost.__contains__,
            self.connect,
            self.counts.append,
            lambda: self.stopped,
            lambda: self.now_s,
        )

    def connect(self, wanted: NvmeSubsystem) -> ConnectReport:
        nqn = wanted.subsystem_nqn
        self.calls.append((self.now_s, nqn))
        if not self.target:
            raise NvmeError(f"{nqn} does not answer")
        self.lost.discard(nqn)
        return ConnectReport(nqn, [], done=["nvme connect"])

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


def test_it_is_back_soon_after_the_target_is_and_pauses_start_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    world = World()
    world.run(10)
    world.target = True
    world.run(10)
    assert world.lost == set()
    assert world.counts[-1] == "nvme_reconnects"
    assert caplog.text.count("does not answer") == 1, "the same failure is said once"
    assert f"{NQN} was lost, reconnected: nvme connect" in caplog.text
    world.target, calls = False, len(world.calls)
    world.lost.add(NQN)
    world.run(5)
    at = [when for when, _ in world.calls[calls:]]
    assert at[1] - at[0] == FIRST_PAUSE_S


def test_one_attempt_at_a_time() -> None:
    world = World()
    entered, leave = threading.Event(), threading.Event()
    plain = world.connect

    def slow(wanted: NvmeSubsystem) -> ConnectReport:
        entered.set()
        assert leave.wait(30)
        return plain(wanted)

    world.reconnector._connect = slow
    first = threading.Thread(target=world.reconnector.attempt)
    first.start()
    assert entered.wait(30)
    world.reconnector.attempt()  # returns at once
    assert world.calls == []
    leave.set()
    first.join(30)
    assert len(world.calls) == 1


def test_sysfs_that_cannot_be_read_is_no_exception(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    world = World()

    def broken(_: str) -> bool:
        raise OSError("no sysfs")

    world.reconnector._lost = broken
    world.reconnector.attempt()
    assert "no sysfs" in caplog.text


def test_nothing_is_connected_while_the_store_closes() -> None:
    world = World()
    world.stopped = True
    world.run(60)
    assert world.calls == []


def test_an_attempt_that_takes_too_long_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fx100_lmcache")
    world = World()

    def endless(_: NvmeSubsystem) -> ConnectReport:
        raise TimeoutError

    world.reconnector._connect = endless
    world.reconnector.attempt()
    assert world.counts == ["nvme_reconnect_failures"]
    assert "not done within 30 s" in caplog.text


def test_a_process_that_ends_does_not_wait_for_a_connect() -> None:
    """In a process of its own, whose connect takes far longer than we wait."""
    script = (
        "import asyncio, threading, time\n"
        "from fx100_lmcache import access\n"
        "wait = lambda: access._off_loop(asyncio.sleep(600))\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
