"""A process that runs out of one thing at a time: threads, descriptors, maps, locks, pools."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fx100_lmcache.engine import native_lane as native

PATIENCE_S = 10.0  # threads in C end a moment after they were told to


def _no_threads() -> Exception:
    return RuntimeError("can't start new thread")  # as Python says it


def _no_descriptors() -> Exception:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _no_memory() -> Exception:
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _no_locks() -> Exception:
    return OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


_SOURCES: dict[str, tuple[list[tuple[Any, str]], Callable[[], Exception]]] = {
    "threads": ([(threading.Thread, "start")], _no_threads),
    "descriptors": ([(os, "open"), (os, "eventfd"), (socket, "socket")], _no_descriptors),
    "maps": ([(mmap, "mmap")], _no_memory),
    "locks": ([(fcntl, "fcntl"), (fcntl, "lockf"), (fcntl, "flock")], _no_locks),
    "pools": ([(native._native(), "open_pool")] if native.native_available() else [], _no_memory),
}

RESOURCES = tuple(_SOURCES)


@contextlib.contextmanager
def lacking(resource: str, number: int) -> Iterator[list[str]]:
    """Have one request for a resource fail, counted from 0; the list then has its name."""
    places, failure = _SOURCES[resource]
    left, failed = [number], []

    def failing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                failed.append(name)
                raise failure()
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as undo:
        for owner, name in places:
            real = getattr(owner, name)
            setattr(owner, name, failing(real, name))
            undo.callback(setattr, owner, name, real)
        yield failed


@dataclass(frozen=True)
class Footprint:
    """What this process holds.

    Attributes
    ----------
    threads, tasks : int
        Of Python, and of the kernel.
    descriptors : frozenset of str
        What is open; several descriptors of one file count once each.
    locks : int
        Locks on files, of all processes, on the files given.
    maps : int
        Shared maps of memory.
    """

    threads: int
    tasks: int
    descriptors: tuple[str, ...]
    locks: int
    maps: int

    @classmethod
    def now(cls, *files: Path) -> Footprint:
        """Look."""
        gc.collect()
        inodes = {str(path.stat().st_ino) for path in files}
        locks = re.findall(r"\w+:\w+:(\d+) ", Path("/proc/locks").read_text())
        return cls(
            threading.active_count(),
            len(list(Path("/proc/self/task").iterdir())),
            tuple(sorted(_descriptors())),
            sum(inode in inodes for inode in locks),
            Path("/proc/self/maps").read_text().count("/dev/zero"),
        )

    def left_by(self, *files: Path) -> str:
        """Say what there is more of now; empty as soon as there is nothing."""
        until = time.monotonic() + PATIENCE_S
        while True:
            now = Footprint.now(*files)
            more = [
                name
                for name in ("threads", "tasks", "locks", "maps")
                if getattr(now, name) > getattr(self, name)
            ]
            extra = sorted(set(now.descriptors) - set(self.descriptors))
            if not more and not extra and len(now.descriptors) <= len(self.descriptors):
                return ""
            if time.monotonic() > until:
                return f"more {', '.join(more)}; open: {', '.join(extra)}: {self} -> {now}"
            time.sleep(0.005)


def _descriptors() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            yield f"{entry.name} {entry.readlink()}"


def each_lack(resource: str, attempt: Callable[[], None], *files: Path) -> Iterator[str]:
    """Make an attempt with one request for a resource failing, for each of them in turn.

    What there is more of after an attempt is an error, whether it raised or not.

    Yields
    ------
    str
        The function that failed.
    """
    number = 0
    before = Footprint.now(*files)
    while True:
        with lacking(resource, number) as failed:
            attempt()
        left = before.left_by(*files)
        assert not left, f"request {number} for {resource} failed: {left}"
        if not failed:
            return
        yield failed[0]
        number += 1
