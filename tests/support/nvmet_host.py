"""The host's side of the lab: what to ask for, and reading a device as the store does."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fx100_lmcache.config.nvme import NvmeAddress, NvmeSubsystem
from support.nvmet_target import ADDRESS, TargetPort, TargetSubsystem

BLOCK_BYTES = 4096
GIVE_UP_S = 40
"""Longer than any time-out under test, shorter than pytest's: hanging is a failure with a name."""


def wanted(subsystem: TargetSubsystem, *ports: TargetPort, **settings: object) -> NvmeSubsystem:
    """Ask for a subsystem over ports of the target, with quick reconnects."""
    addresses = tuple(
        NvmeAddress(traddr=ADDRESS, trsvcid=port.service)
        for port in ports
        if port.transport == "tcp"
    )
    return NvmeSubsystem(
        subsystem_nqn=subsystem.nqn,
        transport=ports[0].transport,  # type: ignore[arg-type]
        addresses=addresses,
        **{"reconnect_delay_s": 1, **settings},  # type: ignore[arg-type]
    )


@contextmanager
def opened(device: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a device with O_DIRECT."""
    descriptor = os.open(device, flags | os.O_DIRECT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_block(descriptor: int, offset: int = 0) -> bytes:
    """Read one block; fewer bytes, also none, if the device gives fewer."""
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        count = os.preadv(descriptor, [buffer], offset)
        return buffer[:count]


class Reading:
    """A read in a thread of its own, because it may block."""

    def __init__(self, descriptor: int) -> None:
        self.data: bytes | None = None
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.data = read_block(self._descriptor)
        except OSError as error:
            self.error = error

    def ended_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> bytes:
        """Return the bytes, or raise what the kernel said."""
        assert self.ended_within(GIVE_UP_S), f"the read still hangs after {GIVE_UP_S} s"
        if self.error is not None:
            raise self.error
        assert self.data is not None
        return self.data
