"""Connecting again what the kernel has given up, for a process that has members there.

While a controller exists the kernel tries by itself. After ``ctrl_loss_timeout`` (or when somebody
removes it) there is none, and nobody tries any more; a target that is back hours later would stay
away until an operator types ``fx100 nvme connect``. This does what that command does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fx100_lmcache.config.nvme import NvmeConfig, NvmeSubsystem
from fx100_lmcache.nvmf.connect import ConnectReport, connect_subsystem, host_identity
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.sysfs import Sysfs

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
COMMAND_S = 15.0
"""For one nvme-cli command: a connect to a silent address gives up after 3 to 10 s."""
ATTEMPT_S = 30.0
"""For one subsystem with all its paths."""

Connect = Callable[[NvmeSubsystem], ConnectReport]


@dataclass
class _Attempts:
    """How one subsystem has been tried."""

    next_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    said: str = ""


class Reconnector:
    """Connects subsystems that have no controller, with growing pauses. Thread-safe.

    Parameters
    ----------
    lost : callable
        Given an NQN, whether the kernel has no controller of it.
    connect : callable
        Connects one subsystem, or raises NvmeError.
    count : callable
        Told ``nvme_reconnects`` or ``nvme_reconnect_failures``.
    stopped : callable
        Whether nothing is to be connected any more.
    """

    def __init__(
        self,
        nvme: NvmeConfig,
        lost: Callable[[str], bool],
        connect: Connect,
        count: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._subsystems = nvme.subsystems
        self._lost = lost
        self._connect = connect
        self._count = count
        self._stopped = stopped
        self._clock = clock
        self._attempts = {each.subsystem_nqn: _Attempts() for each in nvme.subsystems}
        self._busy = threading.Lock()

    def attempt(self) -> None:
        """Connect what is lost and due. Blocks for as long as nvme-cli does; never raises."""
        if not self._busy.acquire(blocking=False):
            return  # another member's probe is at it
        try:
            for wanted in self._subsystems:
                attempts = self._attempts[wanted.subsystem_nqn]
                if self._stopped():
                    return
                if self._clock() >= attempts.next_at and self._lost(wanted.subsystem_nqn):
                    self._try(wanted, attempts)
        except OSError as problem:  # sysfs; the next look may do better
            log.warning("cannot look for lost subsystems: %s", problem)
        finally:
            self._busy.release()

    def _try(self, wanted: NvmeSubsystem, attempts: _Attempts) -> None:
        try:
            report = self._connect(wanted)
        except (NvmeError, TimeoutError) as problem:
            self._count("nvme_reconnect_failures")
            attempts.next_at = self._clock() + attempts.pause_s
            attempts.pause_s = min(2 * attempts.pause_s, LONGEST_PAUSE_S)
            said = str(problem) or f"not done within {ATTEMPT_S:g} s"
            if attempts.said != said:  # not again with every attempt
                attempts.said = said
                log.warning("%s is lost and not reconnected: %s", wanted.subsystem_nqn, said)
            return
        self._count("nvme_reconnects")
        self._attempts[wanted.subsystem_nqn] = _Attempts(self._clock() + FIRST_PAUSE_S)
        log.warning("%s was lost, reconnected: %s", wanted.subsystem_nqn, "; ".join(report.done))


async def connect_as_configured(nvme: NvmeConfig, wanted: NvmeSubsystem) -> ConnectReport:
    """Connect one subsystem as ``fx100 nvme connect`` does.

    Raises
    ------
    NvmeError
        If no path can be connected, or this process may not.
    TimeoutError
        After :data:`ATTEMPT_S`.
    """
    host = await host_identity(nvme.host_nqn, nvme.host_id)
    async with asyncio.timeout(ATTEMPT_S):
        return await connect_subsystem(wanted, host, NvmeCli(timeout_s=COMMAND_S), Sysfs())
