"""The store beside LMCache's own adapters in the lab, each as `lmcache server` opens it.

Every contender has four namespaces of its own, and a process of its own: ours is a volume of them,
the file adapters are on XFS over md-RAID0 of them, `raw_block` is on that md device itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.backends import BACKENDS, MODEL, Sizing
from benchmarks.child import Child, Setup
from benchmarks.nvmet.fio import CHUNK_BYTES, HOST
from fx100_lmcache.config import load
from fx100_lmcache.volume.opening import locate
from support.nvmet_store import MIB, Array
from support.nvmet_target import BACKING, Target, TargetPort, sh

MEMBERS = 4


@dataclass
class Contender:
    """One adapter, open on namespaces of its own."""

    name: str
    child: Child
    subsystems: range
    array: Array

    @property
    def port(self) -> TargetPort:
        """The only way to one of its namespaces."""
        return self.array.ports[self.subsystems[1]][0]

    def live(self) -> bool:
        """Whether all its controllers are."""
        return all(
            controller.state == "live"
            for number in self.subsystems
            for controller in self.array.controllers(number)
        )

    def use_kernel_timers(self) -> None:
        """Let I/O on a lost path wait as long as it does without ``fast_io_fail_tmo``."""
        for number in self.subsystems:
            for controller in self.array.controllers(number):
                attribute = Path("/sys/class/nvme", controller.name, "fast_io_fail_tmo")
                attribute.write_text("-1")  # it reads as "off"


@contextmanager
def contenders(names: list[str], chunks: int) -> Iterator[list[Contender]]:
    """Make an array, connect it, and open a contender for each name; `ours` has to be the first."""
    sizing = Sizing(CHUNK_BYTES, chunks * CHUNK_BYTES * 5 // 4)
    with ExitStack() as stack:
        target = Target(f"rivals{os.getpid()}")
        stack.callback(target.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=BACKING)))
        array = Array(target, HOST, folder)
        for _ in range(MEMBERS * len(names)):
            array.add(sizing.capacity_bytes * 5 // 4 // MEMBERS // MIB * MIB + 64 * MIB)
        array.configure()
        array.connect()
        devices = [str(each) for each in locate(load(array.yaml).volume.members)]
        found = []
        for place, name in enumerate(names):
            part = range(place * MEMBERS, (place + 1) * MEMBERS)
            home = folder / name
            home.mkdir()
            made = (
                _ours(array, home, sizing)
                if name == "ours"
                else _rival(name, devices[part.start : part.stop], home, sizing)
            )
            child = Child(Setup(name, home, stack.enter_context(made), folder / "l1", chunks))
            stack.callback(child.close)
            found.append(Contender(name, child, part, array))
        yield found


@contextmanager
def _ours(array: Array, home: Path, sizing: Sizing) -> Iterator[Sizing]:
    array.configure(
        members=MEMBERS,
        volume={"object": CHUNK_BYTES},
        identity={"model_tags": {MODEL: "lab"}},
        io={"direct": "require"},
        deadlines={"load": "10s", "store": "60s", "probe_interval": "1s"},  # the defaults
    )
    array.format()
    array.yaml.rename(home / "fx100.yaml")
    yield sizing


@contextmanager
def _rival(name: str, devices: list[str], home: Path, sizing: Sizing) -> Iterator[Sizing]:
    md = f"/dev/md/{name}"
    raid = ("--run", "--level=0", f"--raid-devices={len(devices)}", *devices)
    sh("mdadm", "--create", md, *raid)
    try:
        if name.startswith("raw_block"):
            sizing = replace(sizing, devices=(md,))
            BACKENDS[name].prepare(home, sizing)
            yield sizing
            return
        sh("mkfs.xfs", "-q", "-f", md)
        sh("mount", md, str(home))
        try:
            BACKENDS[name].prepare(home, sizing)
            yield sizing
        finally:
            sh("umount", str(home))
    finally:
        sh("mdadm", "--stop", md)


def available(names: str) -> list[str]:
    """Check names of contenders, and end with what is missing; `ours` comes first."""
    for program in ("mdadm", "mkfs.xfs"):
        if shutil.which(program) is None:
            sys.exit(f"needs {program} (apt install mdadm xfsprogs)")
    listed = ["ours", *(name for name in names.split(",") if name != "ours")]
    if unknown := [name for name in listed if name not in BACKENDS]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(BACKENDS)}")
    for name in listed:
        if gone := BACKENDS[name].missing():
            print(f"left out: {gone}", file=sys.stderr)
    return [name for name in listed if not BACKENDS[name].missing()]
