"""A test that hangs is ended, wherever it does so, and the others go on."""

import os
import subprocess
import sys
from pathlib import Path

HANGING = """
import signal
import threading

import pytest


@pytest.fixture
def never_gone():
    yield
    threading.Event().wait()


def test_that_hangs_and_so_does_its_teardown(never_gone):
    threading.Event().wait()


def test_that_does_not_hear_its_timer():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()


def test_after_these():
    pass
"""
LEAVING = """
import threading


def test_that_leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()
"""


def run_tests(folder: Path, source: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "conftest.py").write_text("from support.watchdog import *\n")
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 1\n")
    (folder / "test_these.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--tb=no", "-p", "pytest_timeout", *arguments],
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_what_hangs_ends_its_worker_and_the_next_test_runs(tmp_path: Path) -> None:
    found = run_tests(tmp_path, HANGING, "-p", "xdist", "-n", "1")
    assert found.returncode == 1
    assert " 1 passed" in found.stdout, found.stdout
    for name in ("test_that_hangs_and_so_does_its_teardown", "test_that_does_not_hear_its_timer"):
        assert f"FAILED test_these.py::{name} - worker" in found.stdout
    for function in ("never_gone", "test_that_does_not_hear_its_timer"):
        assert f"in {function}" in found.stderr  # all stacks


def test_a_thread_that_is_left_does_not_keep_the_process(tmp_path: Path) -> None:
    found = run_tests(tmp_path, LEAVING)
    assert "1 passed" in found.stdout
    assert found.returncode == 1
    assert "in _shutdown" in found.stderr
