import importlib.metadata
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from demo import commands
from demo.commands import (
    Device,
    Ports,
    detect_device,
    lmcache_command,
    server_environment,
    vllm_arguments,
    vllm_command,
)
from fx100_lmcache.child import Ended

PORTS = Ports(lmcache=1001, lmcache_http=1002, vllm=1003)


def started(tmp_path: Path, *arguments: object) -> list[str]:
    """Run the shipped script with stand-ins for `fx100` and `lmcache`; return the words."""
    (tmp_path / "fx100").write_text('#!/bin/sh\necho "adapter of $2"\n')
    (tmp_path / "lmcache").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    for name in ("fx100", "lmcache"):
        (tmp_path / name).chmod(0o755)
    command = lmcache_command(PORTS, "cpu", *arguments, l1_gib=3)  # type: ignore[arg-type]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return said.stdout.splitlines()


def last_after(words: list[str], option: str) -> str:
    return [after for word, after in pairwise(words) if word == option][-1]


def test_lmcache_server_listens_on_loopback_only(tmp_path: Path) -> None:
    words = started(tmp_path)
    assert words[0] == "server"
    assert {after for word, after in pairwise(words) if word in ("--host", "--http-host")} == {
        "127.0.0.1"
    }
    assert last_after(words, "--port") == "1001"
    assert last_after(words, "--http-port") == "1002"


def test_lmcache_server_never_unpickles(tmp_path: Path) -> None:
    words = started(tmp_path)
    modes = [after for word, after in pairwise(words) if word == "--supported-transfer-mode"]
    assert modes == ["lmcache_driven"]
    assert "--run-script-api-enabled" not in words


def test_store_is_given_only_when_there_is_one(tmp_path: Path) -> None:
    assert "--l2-adapter" not in started(tmp_path)
    ours = started(tmp_path, Path("/our.yaml"))
    assert last_after(ours, "--l2-adapter") == "adapter of /our.yaml"


def test_several_stores_and_more_memory_can_be_asked_for(tmp_path: Path) -> None:
    words = started(tmp_path, None, ["{1}", "{2}"])
    assert [after for word, after in pairwise(words) if word == "--l2-adapter"] == ["{1}", "{2}"]
    assert last_after(words, "--l1-size-gb") == last_after(words, "--l1-init-size-gb") == "3"


def test_vllm_serves_as_many_at_once_as_asked_for() -> None:
    assert vllm_arguments(PORTS, "tiny", "cpu")["max-num-seqs"] == 2
    assert vllm_arguments(PORTS, "tiny", "cpu", 8)["max-num-seqs"] == 8


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_vllm_listens_on_loopback_and_finds_the_server(device: Device) -> None:
    arguments = vllm_arguments(PORTS, "tiny", device)
    assert (arguments["host"], arguments["port"]) == ("127.0.0.1", 1003)
    connector = arguments["kv-transfer-config"]
    extra = connector["kv_connector_extra_config"]
    assert connector["kv_connector"] == "LMCacheMPConnector"
    assert (extra["lmcache.mp.host"], extra["lmcache.mp.port"]) == ("tcp://127.0.0.1", 1001)
    assert extra["lmcache.mp.mp_transfer_mode"] == "lmcache_driven"


def test_vllm_starts_as_a_module_on_a_cpu_and_by_its_command_on_a_gpu(tmp_path: Path) -> None:
    arguments = vllm_arguments(PORTS, "tiny", "cpu")
    config = ["--config", str(tmp_path / "vllm.yaml")]
    on_cpu = vllm_command(arguments, "cpu", tmp_path)
    assert on_cpu[1:] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "tiny", *config]
    on_gpu = vllm_command(arguments, "gpu", tmp_path)
    assert on_gpu[0].endswith("/vllm")
    assert on_gpu[1:] == ["serve", "tiny", *config]
    assert yaml.safe_load((tmp_path / "vllm.yaml").read_text()) == {
        name: value for name, value in arguments.items() if name != "model"
    }


def test_caches_stay_in_the_directory_and_nothing_phones_home(tmp_path: Path) -> None:
    environment = server_environment({"PATH": "/bin"}, tmp_path, Path("/s"), "gpu")
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/bin"
    for name in ("HF_HOME", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        assert environment[name].startswith(str(tmp_path))
    assert environment["TMPDIR"] == environment["VLLM_RPC_BASE_PATH"] == "/s"
    assert environment["HF_HUB_OFFLINE"] == environment["DO_NOT_TRACK"] == "1"
    assert environment["LMCACHE_TRACK_USAGE"] == "false"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


def test_cpu_threads_are_bound_to_the_cores_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {5, 3})
    environment = server_environment({}, tmp_path, tmp_path, "cpu")
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "3,5"
    assert re.fullmatch(r"[1-9]\d*", environment["VLLM_CPU_KVCACHE_SPACE"])


def test_a_gpu_needs_the_vllm_package_and_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    async def no_program(*_arguments: object) -> Ended:
        raise FileNotFoundError("nvidia-smi")

    async def hangs(*_arguments: object) -> Ended:
        raise TimeoutError

    async def no_driver(*_arguments: object) -> Ended:
        return Ended(9, b"", b"couldn't communicate with the NVIDIA driver")

    async def there(*_arguments: object) -> Ended:
        return Ended(0, b"", b"")

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", no_package)
        patch.setattr(commands, "run_child", there)
        assert detect_device() == "cpu"
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda _name: "0.32.0")
        for answer in (no_program, hangs, no_driver):
            patch.setattr(commands, "run_child", answer)
            assert detect_device() == "cpu"
        patch.setattr(commands, "run_child", there)
        assert detect_device() == "gpu"
