"""Block devices of stated latency and bandwidth: nbdkit behind nbdfuse behind loop devices."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_S = 10.0


@dataclass(frozen=True)
class Emulation:
    """What every member of an emulated array is like.

    Attributes
    ----------
    delay_ms : float
        Added to each read that the device gets; the layers above may split or merge reads.
    mbit_per_s : int
        Bandwidth of a member, in 1e6 bits per second.
    """

    size_bytes: int
    delay_ms: int
    mbit_per_s: int


def missing() -> str:
    """Say what the emulation lacks on this machine; empty if nothing."""
    if os.geteuid() != 0:
        return "the emulated array needs root, for loop devices"
    tools = [tool for tool in ("nbdkit", "nbdfuse", "losetup") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not installed (apt install nbdkit libnbd-bin util-linux)"
    if not Path("/dev/fuse").exists() or not Path("/dev/loop-control").exists():
        return "the kernel has no FUSE or no loop devices"
    return ""


@contextlib.contextmanager
def emulated_array(home: Path, count: int, like: Emulation) -> Iterator[list[str]]:
    """Make so many devices; yield their paths, and take everything down at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_device(home / f"nbd-{n}", like)) for n in range(count)]


@contextlib.contextmanager
def _device(mount: Path, like: Emulation) -> Iterator[str]:
    mount.mkdir(parents=True)
    target = mount / "disk"
    command = [
        *("nbdfuse", str(target), "--command", "nbdkit", "-s", "--exit-with-parent"),
        *("--filter=rate", "--filter=delay", "memory", f"size={like.size_bytes}"),
        *(f"rdelay={like.delay_ms}ms", f"rate={like.mbit_per_s}M", "burstiness=0.05"),
    ]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_for(target, server)
        attach = ["losetup", "--direct-io=on", "--find", "--show", str(target)]
        done = subprocess.run(attach, check=True, capture_output=True, text=True, timeout=30)
        device = done.stdout.strip()
        try:
            yield device
        finally:
            subprocess.run(["losetup", "--detach", device], check=False, timeout=30)
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=False, timeout=30)
        server.terminate()
        server.wait(timeout=30)


def _wait_for(target: Path, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while not target.exists():
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"nbdfuse did not start (exit code {server.poll()})")
        time.sleep(0.05)
