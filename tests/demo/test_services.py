import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="needs the httpx package (extra cpu or gpu)")

from demo import services as room
from demo.services import (
    Service,
    ServiceError,
    Services,
    free_ports,
    uninterrupted,
)
from fx100_lmcache.accept.processes import SHARED_MEMORY, session_processes, shared_memory_of

# A server that ignores SIGTERM, has a child and a grandchild in another process group, and holds
# a shared-memory segment and a named semaphore.
STUBBORN = """
import multiprocessing, pathlib, signal, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
segment = shared_memory.SharedMemory(name=sys.argv[2], create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
semaphore = multiprocessing.get_context("spawn").Semaphore(1)
subprocess.Popen(["bash", "-c", "set -m; sleep 1000 & sleep 1000"])
pathlib.Path(sys.argv[1]).touch()
time.sleep(1000)
"""
PATIENCE_S = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def start(services: Services, directory: Path, *command: str) -> Service:
    return services.start("dummy", command, os.environ, directory, directory / "dummy.log")


def start_stubborn(services: Services, directory: Path) -> tuple[Service, Path]:
    segment = SHARED_MEMORY / f"fx100-test-{os.getpid()}"
    ready = directory / "ready"
    service = start(services, directory, sys.executable, "-c", STUBBORN, str(ready), segment.name)
    wait_for(ready.exists)
    # The server, its resource tracker, bash and two sleeps.
    wait_for(lambda: len(session_processes(service.session_id)) >= 5)
    return service, segment


def mapped_files(service: Service) -> set[int]:
    return shared_memory_of(session_processes(service.session_id))


def test_kill_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    with Services() as services:
        service, segment = start_stubborn(services, tmp_path)
        mapped = mapped_files(service)
        assert segment.stat().st_ino in mapped
        assert len(mapped) == 2, "the segment and the semaphore"
        services.kill_all()
    assert session_processes(service.session_id) == set()
    assert not mapped & {path.stat().st_ino for path in SHARED_MEMORY.iterdir()}


def test_shared_memory_of_others_stays(tmp_path: Path) -> None:
    foreign = SHARED_MEMORY / f"fx100-foreign-{os.getpid()}"
    foreign.touch()
    try:
        with Services() as services:
            start_stubborn(services, tmp_path)
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_leaving_the_block_by_an_exception_kills(tmp_path: Path) -> None:
    started: list[Service] = []

    def fail() -> None:
        with Services() as services:
            started.append(start(services, tmp_path, "bash", "-c", "sleep 1000 & sleep 1000"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert session_processes(started[0].session_id) == set()


def test_one_failing_kill_does_not_spare_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = Services()
    spared = start(services, tmp_path, "sleep", "1000")
    stuck = start(services, tmp_path, "sleep", "1000")

    def fail() -> None:
        raise ServiceError("outlives SIGKILL")

    with monkeypatch.context() as patch:
        patch.setattr(stuck, "kill", fail)
        with pytest.raises(ServiceError, match="outlives SIGKILL"):
            services.kill_all()
    assert session_processes(spared.session_id) == set()
    stuck.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    script = f"""
import os, pathlib, signal, time
from demo.__main__ import stop_like_ctrl_c
from demo.services import Services
stop_like_ctrl_c()
here = pathlib.Path({str(tmp_path)!r})
with Services() as services:
    command = ["bash", "-c", "sleep 1000 & sleep 1000"]
    service = services.start("dummy", command, os.environ, here, here / "dummy.log")
    (here / "new").write_text(str(service.session_id))
    (here / "new").rename(here / "session")
    time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    wait_for((tmp_path / "session").exists)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors
    assert session_processes(int((tmp_path / "session").read_text())) == set()


def test_signals_wait_until_the_block_is_done() -> None:
    events: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    def interrupted_inside() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            events.append("end of the block")

    with pytest.raises(KeyboardInterrupt):
        interrupted_inside()
    assert events == ["end of the block"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    with Services() as services:
        service = start(services, tmp_path, "bash", "-c", "echo no such model; exit 3")
        with pytest.raises(ServiceError, match=r"dummy ended with code 3(.|\n)*no such model"):
            service.wait_ready(f"http://127.0.0.1:{free_ports(1)[0]}/")
        with pytest.raises(ServiceError, match="code 3"):
            services.check_alive()


def test_a_server_that_never_answers_is_reported(tmp_path: Path) -> None:
    with Services() as services:
        service = start(services, tmp_path, "sleep", "1000")
        with pytest.raises(ServiceError, match="dummy was not ready after 0 s"):
            service.wait_ready(f"http://127.0.0.1:{free_ports(1)[0]}/", timeout_s=0.01)


def test_wait_ready_returns_once_the_server_answers(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Services() as services:
        command = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port))
        start(services, tmp_path, *command).wait_ready(f"http://127.0.0.1:{port}/")


def test_outliving_sigkill_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services()
    service = start(services, tmp_path, "sleep", "1000")
    with monkeypatch.context() as patch:
        patch.setattr(room, "KILL_TIMEOUT_S", 0.0)
        patch.setattr(os, "kill", lambda *_arguments: None)
        with pytest.raises(
            ServiceError, match=f"outlives SIGKILL: processes .*{service.session_id}"
        ):
            service.kill()
    service.kill()
    assert session_processes(service.session_id) == set()


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(8))) == 8
