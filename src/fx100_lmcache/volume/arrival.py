"""Waiting for members that are not there yet, and connecting them meanwhile.

A server that is started at boot may be earlier than udev, the network or the array. Whoever opens a
volume may wait here first; what is still missing at the limit is told by the open itself, as ever.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fx100_lmcache.config import Config
from fx100_lmcache.config.model import MemberConfig
from fx100_lmcache.config.nvme import NvmeConfig
from fx100_lmcache.nvmf.errors import NamespaceNotFoundError, NvmeError, StaleNodeError
from fx100_lmcache.nvmf.reconnect import PathWatch
from fx100_lmcache.nvmf.resolve import identity_of
from fx100_lmcache.volume.opening import locate, paths_without_controller, reconnector

log = logging.getLogger(__name__)

POLL_S, MIN_PAUSE_S = 0.5, 0.001
PROGRESS_S = 5.0
"""Between two lines that say what is missing."""
LONGEST_PAUSE_S = 5.0
"""Between two attempts to connect: shorter than later, since somebody waits."""


def wait_for_members(
    config: Config,
    wait_s: float,
    say: Callable[[str], None] = log.warning,
    *,
    missing: Callable[[], Sequence[str]] | None = None,
    connect: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until nothing is missing, at most `wait_s` seconds; return in either case.

    Parameters
    ----------
    say : callable
        Told every few seconds how long it takes already and what is missing.
    missing : callable or None
        Names what is missing now; by default `missing_members`.
    connect : bool or None
        Whether to connect the configured subsystems meanwhile; by default as ``nvme.reconnect``.
    clock, pause : callable
        Time in seconds, and sleeping; simulated in tests.
    """
    look = missing or (lambda: missing_members(config))
    if wait_s <= 0 or not look():
        return
    wanted = config.nvme is not None and config.nvme.reconnect if connect is None else connect
    started = clock()
    next_line_s = 0.0
    with _connecting(config.nvme if wanted else None) as try_now:
        while away := look():
            waited_s = clock() - started
            if waited_s >= wait_s:
                return
            if waited_s >= next_line_s:
                say(f"waiting, {waited_s:.0f} of {wait_s:g} s: missing {'; '.join(away)}")
                next_line_s = waited_s + PROGRESS_S
            try_now()
            pause(max(MIN_PAUSE_S, min(POLL_S, wait_s - waited_s)))
    say(f"nothing is missing any more, after {clock() - started:.0f} s")


def missing_members(config: Config, *, creating: bool = False) -> list[str]:
    """Name the members that are not there but may come; what else is wrong the open will say.

    Parameters
    ----------
    creating : bool
        Whether files with a `size` will be created, so that they are not missing.
    """
    members = config.volume.members
    return [
        f"volume.members[{place}] ({_name(member)})"
        for place, (member, found) in enumerate(zip(members, locate(members), strict=True))
        if _may_come(found) and not (creating and _will_be_created(member))
    ]


def missing_paths(nvme: NvmeConfig) -> list[str]:
    """Name the configured paths that have no controller."""
    lost = paths_without_controller(nvme)
    return [f"path {path} to {nqn}" for nqn, paths in lost.items() for path in paths]


def _name(member: MemberConfig) -> str:
    return str(identity_of(member.nvme) if member.nvme is not None else member.path)


def _may_come(found: Path | NvmeError) -> bool:
    if isinstance(found, NvmeError):
        return isinstance(found, NamespaceNotFoundError | StaleNodeError)
    try:
        found.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _will_be_created(member: MemberConfig) -> bool:
    return member.size_bytes is not None


@contextlib.contextmanager
def _connecting(nvme: NvmeConfig | None) -> Iterator[Callable[[], None]]:
    """Connect in another thread for as long as the block lasts; give what asks for an attempt."""
    if nvme is None:
        yield lambda: None
        return
    over = False
    attempts = reconnector(
        nvme,
        count=lambda _name: None,
        stopped=lambda: over,
        longest_pause_s=LONGEST_PAUSE_S,
        at_start=True,
    )
    watch = PathWatch(attempts.attempt, PROGRESS_S)
    watch.start()
    try:
        yield watch.look_now
    finally:
        over = True
        watch.stop()
