"""Connecting again what the kernel has given up, for a process that has members there.

While a controller exists the kernel tries by itself. After ``ctrl_loss_timeout`` (or when somebody
removes it) there is none, and nobody tries any more: a target that is back hours later would stay
away, and of several paths one less would be left, until an operator types ``fx100 nvme connect``.
This does what that command does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from fx100_lmcache.config.nvme import NvmeConfig, NvmeSubsystem
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.connect import (
    ConnectReport,
    connect_subsystem,
    host_identity,
    resolve_host,
)
from fx100_lmcache.nvmf.errors import AddressError, NvmeError
from fx100_lmcache.nvmf.plan import GOING_STATES, present_at, wanted_addresses
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.snapshot import Snapshot
from fx100_lmcache.nvmf.sysfs import Sysfs

log = logging.getLogger(__name__)

LOOK_S = 30.0
"""Between two looks for lost paths while all members are up; when one is not, at once."""
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
COMMAND_S = 15.0
"""For one nvme-cli command: a connect to a silent address gives up after 3 to 10 s."""
SETTLE_S = 15.0
"""For an attempt at one subsystem besides its commands: names, sysfs, controllers that get live."""
STOP_S = 1.0
"""How long `PathWatch.stop` waits for an attempt; what takes longer is left to itself."""

MissingPaths = Mapping[str, Sequence[FabricAddress]]
"""Configured paths without a controller, by the NQN of their subsystem."""


@dataclass
class _Attempts:
    """How one subsystem has been tried."""

    next_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    said: str = ""


class Reconnector:
    """Connects paths that have no controller, with growing pauses. For one thread.

    Parameters
    ----------
    look : callable
        Returns what is missing now, of all configured subsystems.
    connect : callable
        Connects all paths of one subsystem that are missing, or raises NvmeError.
    count : callable
        Told ``nvme_reconnects`` for each path, ``nvme_reconnect_failures`` for each attempt at a
        subsystem that left a path missing.
    stopped : callable
        Whether nothing is to be connected any more.
    clock : callable
        Seconds that never go back.
    longest_pause_s : float
        What the pauses between attempts at one subsystem grow to.
    at_start : bool
        Whether what is missing was not lost, but has not been connected yet; for the log.
    """

    def __init__(
        self,
        nvme: NvmeConfig,
        look: Callable[[], MissingPaths],
        connect: Callable[[NvmeSubsystem], ConnectReport],
        count: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        longest_pause_s: float = LONGEST_PAUSE_S,
        at_start: bool = False,
    ) -> None:
        self._subsystems = nvme.subsystems
        self._look = look
        self._connect = connect
        self._count = count
        self._stopped = stopped
        self._clock = clock
        self._longest_pause_s = longest_pause_s
        self._away = "is not connected yet" if at_start else "is lost and not connected again"
        self._back = "was not connected, is now" if at_start else "was lost, connected again"
        self._attempts = {each.subsystem_nqn: _Attempts() for each in nvme.subsystems}

    def attempt(self) -> None:
        """Connect what is missing and due, after one look. Blocks for as long as nvme-cli does."""
        now = self._clock()
        due = [
            each for each in self._subsystems if now >= self._attempts[each.subsystem_nqn].next_at
        ]
        if not due or self._stopped():
            return
        try:
            missing = self._look()
        except OSError as problem:  # sysfs; the next look may do better
            log.warning("cannot look for lost paths: %s", problem)
            return
        for wanted in due:
            if self._stopped():
                return
            if lost := missing.get(wanted.subsystem_nqn):
                self._try(wanted, lost)
            else:
                self._attempts[wanted.subsystem_nqn] = _Attempts()

    def _try(self, wanted: NvmeSubsystem, lost: Sequence[FabricAddress]) -> None:
        nqn = wanted.subsystem_nqn
        try:
            report = self._connect(wanted)
        except NvmeError as problem:
            self._failed(nqn, f"{_listed(lost)} {self._away}: {problem}")
            return
        for _ in report.connected:
            self._count("nvme_reconnects")
        if report.connected:
            done = "; ".join(report.done)
            log.warning("%s: %s %s: %s", nqn, _listed(report.connected), self._back, done)
        if report.failures:
            failures = [f"{path} {self._away}: {why}" for path, why in report.failures]
            self._failed(nqn, "; ".join(failures))
        else:
            self._attempts[nqn] = _Attempts(self._clock() + FIRST_PAUSE_S)

    def _failed(self, nqn: str, said: str) -> None:
        self._count("nvme_reconnect_failures")
        attempts = self._attempts[nqn]
        attempts.next_at = self._clock() + attempts.pause_s
        attempts.pause_s = min(2 * attempts.pause_s, self._longest_pause_s)
        if attempts.said != said:  # not again with every attempt
            attempts.said = said
            log.warning("%s: %s", nqn, said)


def _listed(paths: Sequence[FabricAddress]) -> str:
    return ", ".join(map(str, paths))


class PathWatch:
    """Calls `attempt` now and then, and at once when asked to, in a thread of its own.

    Parameters
    ----------
    attempt : callable
        Looks for lost paths and connects them; may block.
    interval_s : float
        Seconds between two calls that nobody asked for.
    """

    def __init__(self, attempt: Callable[[], None], interval_s: float) -> None:
        self._attempt = attempt
        self._interval_s = interval_s
        self._wanted = threading.Event()
        self._stopping = False
        # a daemon: a process that ends does not wait for nvme-cli
        self._thread = threading.Thread(target=self._run, name="fx100-paths", daemon=True)

    def start(self) -> None:
        """Begin; the first look comes after one interval."""
        self._thread.start()

    def look_now(self) -> None:
        """Ask for a look, without waiting for it."""
        self._wanted.set()

    def stop(self) -> None:
        """End the thread; an attempt that takes longer than `STOP_S` ends by itself."""
        self._stopping = True
        self._wanted.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while True:
            self._wanted.wait(self._interval_s)
            self._wanted.clear()
            if self._stopping:
                return
            try:
                self._attempt()
            except Exception:  # the next look may do better
                log.exception("looking for lost paths failed")


async def missing_paths(nvme: NvmeConfig, sysfs: Sysfs) -> dict[str, list[FabricAddress]]:
    """Return the configured paths that have no controller, by NQN, from one look at sysfs.

    A path that the kernel connects or resets has one. A host name is there with any of its
    addresses; one that has none now is left out, unless its subsystem has no controller at all.
    """
    snapshot = await sysfs.snapshot()
    return {
        each.subsystem_nqn: [path async for path in _missing(each, snapshot)]
        for each in nvme.subsystems
    }


async def _missing(wanted: NvmeSubsystem, snapshot: Snapshot) -> AsyncIterator[FabricAddress]:
    controllers = snapshot.controllers(wanted.subsystem_nqn)
    all_lost = all(controller.state in GOING_STATES for controller in controllers)
    for path in wanted_addresses(wanted):
        try:
            meant = [] if all_lost else await resolve_host(path)
        except AddressError:
            continue
        if not any(present_at(wanted, address, snapshot) for address in meant):
            yield path


async def connect_as_configured(nvme: NvmeConfig, wanted: NvmeSubsystem) -> ConnectReport:
    """Connect one subsystem as ``fx100 nvme connect`` does.

    Raises
    ------
    NvmeError
        If no path can be connected, this process may not, or it takes too long.
    """
    host = await host_identity(nvme.host_nqn, nvme.host_id)
    limit_s = SETTLE_S + COMMAND_S * len(wanted_addresses(wanted))
    try:
        async with asyncio.timeout(limit_s):
            return await connect_subsystem(wanted, host, NvmeCli(timeout_s=COMMAND_S), Sysfs())
    except TimeoutError:
        raise NvmeError(
            f"not done within {limit_s:g} s", remedy="nvme list-subsys; dmesg says what hangs"
        ) from None
