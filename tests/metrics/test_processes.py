"""Metrics of several processes, over HTTP, and beside those of LMCache's server."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from fx100_lmcache.cli.adapter import adapter_spec
from fx100_lmcache.config import load
from fx100_lmcache.testing.volumes import file_volume
from fx100_lmcache.volume.opening import open_volume

Start = Callable[..., "subprocess.Popen[str]"]


def volume(directory: Path, **metrics: Any) -> Path:
    told = {"object": "64KiB", "shards": 2}
    return file_volume(directory, volume=told, metrics=metrics)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start() -> Iterator[Start]:
    """Start workers; all end with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(config: Path, worker: int, directory: Path | None = None) -> "subprocess.Popen[str]":
        environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        if directory is not None:
            environment["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
        process = subprocess.Popen(
            [sys.executable, "-m", "support.metrics_worker", str(config), str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.communicate("", timeout=30)


def fetched(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def of(worker: int) -> dict[str, str]:
    return {
        "role": "worker",
        "model_name": "model",
        "worker_id": str(worker),
        "volume": "of-the-test",
        "shard": str(worker),
    }


def line(worker: int) -> str:
    who = f'role="worker",shard="{worker}",volume="of-the-test",worker_id="{worker}"'
    labels = f'model_name="model",outcome="stored",{who}'
    return f"fx100_put_objects_total{{{labels}}} 1.0"


def test_metrics_of_all_workers_are_collected_from_a_directory(
    tmp_path: Path, start: Start
) -> None:
    config, directory = volume(tmp_path), tmp_path / "prometheus"
    directory.mkdir()
    workers = [start(config, number, directory) for number in range(2)]
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))  # type: ignore[no-untyped-call]
    for number in range(2):
        labels = of(number)
        stored = {**labels, "outcome": "stored"}
        assert registry.get_sample_value("fx100_put_objects_total", stored) == 1
        assert registry.get_sample_value("fx100_healthy", labels) == 1
        assert registry.get_sample_value("fx100_evictions_total", labels) is None
        event = {**labels, "event": "checksum_failures"}
        assert registry.get_sample_value("fx100_events_total", event) == 0
    for worker in workers:
        worker.communicate("", timeout=30)
    assert registry.get_sample_value("fx100_healthy", of(0)) == 0


def test_one_worker_serves_the_metrics_of_all(tmp_path: Path, start: Start) -> None:
    port, directory = free_port(), tmp_path / "prometheus"
    directory.mkdir()
    config = volume(tmp_path, port=port)
    first = start(config, 0, directory)
    second = start(config, 1, directory)
    text = fetched(port)
    assert line(0) in text
    assert line(1) in text
    assert "no metrics at" in second.communicate("", timeout=30)[1]
    assert "no metrics at" not in first.communicate("", timeout=30)[1]


def test_without_a_directory_a_worker_serves_its_own(tmp_path: Path, start: Start) -> None:
    port = free_port()
    config = volume(tmp_path, port=port)
    start(config, 0)
    second = start(config, 1)
    text = fetched(port)
    assert line(0) in text
    assert 'worker_id="1"' not in text
    warned = second.communicate("", timeout=30)[1]
    assert f"no metrics at 127.0.0.1:{port}" in warned
    assert "PROMETHEUS_MULTIPROC_DIR" in warned


def test_without_a_port_nothing_listens(tmp_path: Path, start: Start) -> None:
    process = start(volume(tmp_path), 0)
    names = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert names
    assert not [name for name in names if name.startswith("socket:")]


@pytest.mark.lmcache
@pytest.mark.timeout(300)
def test_metrics_stand_beside_those_of_lmcache_server(tmp_path: Path) -> None:
    lmcache = shutil.which("lmcache", path=str(Path(sys.executable).parent))
    if lmcache is None:
        pytest.skip("needs the lmcache package")
    config = volume(tmp_path)
    port, http_port = free_port(), free_port()
    command = f"server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http_port}"
    options = "--l1-size-gb 1 --l1-init-size-gb 1 --eviction-policy LRU"
    adapter = json.dumps(adapter_spec(load(config), config))
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [lmcache, *command.split(), *options.split(), "--l2-adapter", adapter],
            stdout=log,
            stderr=log,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
        )
    try:
        text = answer_of(server, http_port)
    finally:
        server.terminate()
        server.wait(60)
    found = open_volume(load(config), read_only=True)
    for member in found.members:
        member.close()
    uuid = found.label.volume
    labels = f'role="mp",shard="",volume="{uuid}",worker_id=""'
    assert f'fx100_healthy{{model_name="",{labels}}} 1.0' in text, (tmp_path / "log").read_text()
    stored = f'model_name="",outcome="stored",{labels}'
    assert f"fx100_put_objects_total{{{stored}}} 0.0" in text


def answer_of(server: "subprocess.Popen[bytes]", port: int) -> str:
    until = time.monotonic() + 200
    while time.monotonic() < until:
        assert server.poll() is None, "the server has ended"
        try:
            return fetched(port)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError("the server does not answer")
