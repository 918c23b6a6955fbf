"""Batch reads through nvme-tcp: our engine against fio, on the same namespaces, in turns.

    tests/nvmet/run -m 4G .venv/bin/python -m benchmarks.nvmet.fio

prints one JSON object: GB/s of each round, and the ratio of ours to fio's. Over plain loopback the
only limit is the CPU, of which the guest has one; there our checksums, which fio does not make,
cost what `hash_gb_s` says. `--wire-gbit` makes loopback as slow as a network (the guest's own; on
another machine it would slow down everybody's).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import xxhash

from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.config import load
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.store import LoadItem, PutItem
from fx100_lmcache.store.types import LoadResult
from fx100_lmcache.testing.harness import META, digest_of
from support.nvmet_store import MIB, Array, bytes_of
from support.nvmet_target import Target, sh

CHUNK_BYTES = 8_126_464  # 256 tokens of Qwen3-Coder-480B in bf16 on one rank of eight
HOST_ID = "f0100000-1ab0-4000-8000-00000000be4c"
HOST = HostIdentity(f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}", HOST_ID)
DEPTHS = (4, 8, 16, 32)
LOOPS = 4  # every round of ours reads all chunks so often
FIO_S = 2
LIMIT_S = 120


def buffer_of(length: int) -> IoBuffer:
    """Make an empty buffer of so many bytes."""
    buffer = zero_buffer(-(-length // 4096) * 4096)
    buffer.length = length
    return buffer


def fill(mounted: Mounted, names: list[str]) -> None:
    """Store chunks under these names."""
    for name in names:
        buffer, done = buffer_of(CHUNK_BYTES), threading.Event()
        buffer.view[:CHUNK_BYTES] = bytes_of(name, CHUNK_BYTES)
        mounted.store.put([PutItem(digest_of(name), META, buffer)], partial(_set, done))
        assert done.wait(LIMIT_S)


def ours(mounted: Mounted, names: list[str], buffers: list[IoBuffer]) -> float:
    """Load all chunks in one batch, again and again; GB/s."""
    start = time.perf_counter()
    for _ in range(LOOPS):
        load_all(mounted, names, buffers)
    return LOOPS * len(names) * CHUNK_BYTES / (time.perf_counter() - start) / 1e9


def _set(done: threading.Event, _: object) -> None:
    done.set()


def load_all(mounted: Mounted, names: list[str], buffers: list[IoBuffer]) -> None:
    """Load them all at once, and check that all came."""
    results: list[LoadResult] = []
    done = threading.Event()

    def answered(found: list[LoadResult]) -> None:
        results.extend(found)
        done.set()

    items = [
        LoadItem(digest_of(name), buffer, lambda _m, _n: True)
        for name, buffer in zip(names, buffers, strict=True)
    ]
    mounted.store.load(items, answered, hold=True)
    assert done.wait(LIMIT_S)
    assert all(result.length == CHUNK_BYTES for result in results)


def fio(devices: list[str], total_bytes: int, depth: int) -> float:
    """Read the same range of the devices for some seconds, one job for each; GB/s.

    For a time, since jobs that read a number of bytes may run after one another, each reporting
    the speed that it had alone.
    """
    share = total_bytes // len(devices) // MIB * MIB
    command = [
        *("fio", "--output-format=json", "--direct=1", "--rw=read", "--bs=1M"),
        *("--ioengine=libaio", f"--iodepth={max(1, depth // len(devices))}", f"--size={share}"),
        *(f"--offset={MIB}", "--group_reporting", "--time_based", f"--runtime={FIO_S}"),
        *(part for each in devices for part in (f"--name={Path(each).name}", f"--filename={each}")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return float(job["io_bytes"]) / (float(job["runtime"]) / 1000) / 1e9


def hashing(buffers: list[IoBuffer]) -> float:
    """Checksum what was read, on one CPU; GB/s."""
    start = time.perf_counter()
    for buffer in buffers:
        xxhash.xxh3_64_intdigest(buffer.view)
    return len(buffers) * CHUNK_BYTES / (time.perf_counter() - start) / 1e9


@contextmanager
def wire(gbit: float) -> Iterator[None]:
    """Limit loopback to a rate, all connections together; 0 is no limit."""
    if not gbit:
        yield
        return
    rate = ("rate", f"{round(gbit * 1000)}mbit", "limit", "100000")
    sh("tc", "qdisc", "add", "dev", "lo", "root", "netem", *rate)
    try:
        yield
    finally:
        sh("tc", "qdisc", "del", "dev", "lo", "root")


def measure(array: Array, chunks: int, rounds: int) -> dict[str, object]:
    """Load in rounds, with fio between them; return the medians."""
    names = [f"chunk-{number}" for number in range(chunks)]
    mounted = mount(load(array.yaml))
    try:
        fill(mounted, names)
        devices = [state.name for state in mounted.engine.states()]
        buffers = [buffer_of(CHUNK_BYTES) for _ in names]
        total = chunks * CHUNK_BYTES
        ours(mounted, names, buffers)  # warm
        sweep = {depth: fio(devices, total, depth) for depth in DEPTHS}
        best = max(sweep, key=lambda depth: sweep[depth])
        pairs = [(ours(mounted, names, buffers), fio(devices, total, best)) for _ in range(rounds)]
        right = all(
            bytes(buffer.view[:CHUNK_BYTES]) == bytes_of(name, CHUNK_BYTES)
            for name, buffer in zip(names, buffers, strict=True)
        )
        assert right, "wrong bytes"
        return {
            "engine": mounted.engine.kind,
            "bytes": total,
            "cpus": os.cpu_count(),
            "hash_gb_s": round(hashing(buffers), 3),
            "fio_by_depth_gb_s": {depth: round(speed, 3) for depth, speed in sweep.items()},
            "fio_depth": best,
            "ours_gb_s": [round(one, 3) for one, _ in pairs],
            "fio_gb_s": [round(other, 3) for _, other in pairs],
            "ratio": round(
                statistics.median(one for one, _ in pairs)
                / statistics.median(other for _, other in pairs),
                3,
            ),
            "ratio_of_pairs": round(statistics.median(one / other for one, other in pairs), 3),
        }
    finally:
        mounted.close()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--readers", type=int, default=16, help="io.reader_threads")
    parser.add_argument("--wire-gbit", type=float, default=0.0, help="Gbit/s of loopback")
    asked = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("benchmarks.nvmet.fio: needs fio (apt install fio)")
    target = Target(f"bench{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            array = Array(target, HOST, Path(folder))
            size = -(-asked.chunks * CHUNK_BYTES * 5 // 4 // asked.members // MIB) * MIB
            for _ in range(asked.members):
                array.add(size)
            array.configure(
                volume={"object": CHUNK_BYTES},
                io={
                    "reader_threads": asked.readers,
                    "writer_threads": min(4, asked.readers),
                    "direct": "require",
                },
                deadlines={"load": "60s", "store": "60s"},
            )
            array.connect()
            array.format()
            with wire(asked.wire_gbit):
                result = measure(array, asked.chunks, asked.rounds)
            print(json.dumps({"wire_gbit": asked.wire_gbit, **result}, indent=2))
    finally:
        target.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
