"""The machine that we run on: what a claim says of it, and the clock that claims are timed with."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True, slots=True)
class Machine:
    """A kernel and its clock. Tests make others.

    Attributes
    ----------
    boot_id : str
        The kernel's own, random with every boot and the same in all containers; empty if unknown.
        The only proof that two processes run on one kernel. Host names and ``/etc/machine-id`` are
        none: cloned images share them, and containers have names of their own.
    host, machine_id : str
        For people.
    clock : callable
        Seconds that go on while the process is stopped and while the machine sleeps.
    sleep : callable
        Let so many seconds pass.
    nonce : callable
        Make a random word that tells two opens apart.
    """

    boot_id: str
    host: str = ""
    machine_id: str = ""
    clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    sleep: Callable[[float], None] = time.sleep
    nonce: Callable[[], str] = lambda: os.urandom(6).hex()

    def words(self) -> dict[str, str]:
        """Return what identifies this process on this machine."""
        return {"host": self.host, "boot": self.boot_id, "pid": str(os.getpid())}


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    host = re.sub(r"[^\x21-\x7e]", "?", socket.gethostname())[:64]
    return Machine(_read(_BOOT_ID), host, _read(_MACHINE_ID))


def _read(path: Path) -> str:
    try:
        return "".join(path.read_text(errors="replace").split())[:64]
    except OSError:
        return ""
