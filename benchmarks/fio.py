"""Runs fio, the number that operators trust as the ceiling of a device."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

DEPTHS = (1, 2, 4, 8, 16, 32)


def available() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def read_gb_per_s(paths: Sequence[Path], total_bytes: int, depth: int, offset_bytes: int) -> float:
    """Read so many bytes, spread over the files, in 1 MiB direct reads with io_uring.

    Parameters
    ----------
    depth : int
        Reads in flight over all files together.
    offset_bytes : int
        Where to start in each file: past what was never written with data.
    """
    share = total_bytes // len(paths) // (1 << 20) * (1 << 20)
    command = [
        *("fio", "--output-format=json", "--ioengine=io_uring", "--direct=1", "--bs=1M"),
        *("--rw=read", f"--iodepth={depth}", f"--size={share}", f"--offset={offset_bytes}"),
        *(
            "--name=all",
            f"--filename={':'.join(map(str, paths))}",
            f"--io_size={share * len(paths)}",
        ),
        *("--file_service_type=roundrobin", "--invalidate=1", "--allow_file_create=0"),
        f"--filesize={offset_bytes + share}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    job = found["jobs"][0]["read"]
    return float(job["io_bytes"]) / (float(job["runtime"]) / 1000) / 1e9


def lay_out(paths: Sequence[Path], total_bytes: int) -> None:
    """Write files of random bytes for fio to read."""
    share = total_bytes // len(paths) // (1 << 20) * (1 << 20)
    for path in paths:
        command = [
            *("fio", "--name=fill", f"--filename={path}", f"--size={share}", "--rw=write"),
            *("--bs=1M", "--direct=1", "--ioengine=io_uring", "--iodepth=8", "--refill_buffers"),
        ]
        subprocess.run(command, capture_output=True, check=True, timeout=600)


def best_depth(paths: Sequence[Path], total_bytes: int, offset_bytes: int) -> int:
    """Find the depth at which fio is fastest here."""
    speeds = {d: read_gb_per_s(paths, total_bytes, d, offset_bytes) for d in DEPTHS}
    return max(speeds, key=lambda depth: speeds[depth])
