"""Loads through nvme-tcp: our store beside LMCache's `fs_native` on XFS over md-RAID0, in turns.

    PYTHONPATH=. tests/nvmet/run -m 4G python tests/nvmet/bench_rivals.py

Eight namespaces of one size behind ports of their own: four are members of our volume, four are
striped by md (512 KiB chunks) under XFS. Prints one JSON object: GB/s of each round. See
`bench_fio.py` for the guest's one CPU and for `--wire-gbit`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench_fio import CHUNK_BYTES, HOST, MIB, wire
from benchmarks.subjects import Arena, FsNative, StoreSubject, Subject
from nvmet_store import Array
from nvmet_target import Target, sh

from fx100_lmcache.access import locate
from fx100_lmcache.config import load
from fx100_lmcache.mount import mount

MD = "/dev/md/fx100bench"
MEMBERS = 4


@contextmanager
def xfs_over_md(devices: list[str], home: Path) -> Iterator[Path]:
    """Stripe devices with md, put XFS on it as mkfs chooses for the stripe, and mount it."""
    sh("mdadm", "--create", MD, "--run", "--level=0", f"--raid-devices={len(devices)}", *devices)
    try:
        sh("mkfs.xfs", "-q", "-f", MD)
        home.mkdir()
        sh("mount", MD, str(home))
        try:
            yield home
        finally:
            sh("umount", str(home))
    finally:
        sh("mdadm", "--stop", MD)


def measure(subjects: list[Subject], total_bytes: int, rounds: int) -> dict[str, object]:
    """Store everything, then load it in turns."""
    speeds: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for subject in subjects:
        subject.store_all()
        subject.load_all()
    for _ in range(rounds):
        for subject in subjects:
            start = time.perf_counter()
            subject.load_all()
            speeds[subject.name].append(total_bytes / (time.perf_counter() - start) / 1e9)
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    ours, *rivals = medians.values()
    return {
        "gb_s": {name: [round(one, 3) for one in each] for name, each in speeds.items()},
        "median_gb_s": {name: round(one, 3) for name, one in medians.items()},
        "ours_to_best_rival": round(ours / max(rivals), 3),
    }


def run(target: Target, chunks: int, rounds: int, wire_gbit: float) -> dict[str, object]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        array = Array(target, HOST, folder)
        size = -(-chunks * CHUNK_BYTES * 3 // 2 // MEMBERS // MIB) * MIB + 64 * MIB
        for _ in range(2 * MEMBERS):
            array.add(size)
        array.configure(members=2 * MEMBERS, volume={"object": CHUNK_BYTES})
        array.connect()
        both = locate(load(array.yaml).volume.members)
        array.configure(
            members=MEMBERS,
            volume={"object": CHUNK_BYTES},
            io={"direct": "require"},
            deadlines={"load": "60s", "store": "60s"},
        )
        array.format()
        rivals = [str(each) for each in both[MEMBERS:]]
        xfs = stack.enter_context(xfs_over_md(rivals, folder / "xfs"))
        source, loaded = Arena(chunks, CHUNK_BYTES), Arena(chunks, CHUNK_BYTES)
        source.fill()
        mounted = mount(load(array.yaml))
        stack.callback(mounted.close)
        subjects: list[Subject] = [
            StoreSubject("ours, 4 members", mounted.store, source, loaded),
            FsNative(xfs, source, loaded, 4),
            FsNative(xfs, source, loaded, 32),
        ]
        stack.enter_context(wire(wire_gbit))
        result = measure(subjects, chunks * CHUNK_BYTES, rounds)
        assert loaded.view == source.view, "wrong bytes"
        for rival in subjects[1:]:
            rival.close()
        return {"cpus": os.cpu_count(), "chunks": chunks, "wire_gbit": wire_gbit, **result}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wire-gbit", type=float, default=0.0, help="Gbit/s of loopback")
    asked = parser.parse_args()
    for program in ("mdadm", "mkfs.xfs"):
        if shutil.which(program) is None:
            sys.exit(f"bench_rivals: needs {program} (apt install mdadm xfsprogs)")
    target = Target(f"rivals{os.getpid()}")
    try:
        print(json.dumps(run(target, asked.chunks, asked.rounds, asked.wire_gbit), indent=2))
    finally:
        target.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
