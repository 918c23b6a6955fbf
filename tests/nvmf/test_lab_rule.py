"""The lab's tests never look as if they had passed where they cannot run."""

import os
import subprocess
import sys

import pytest

from support import ROOT


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "FX100_NVMET_LAB"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_elsewhere_they_are_deselected_by_name_and_with_the_reason() -> None:
    done = run_pytest("tests/nvmet")

    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "not run here, as they need a kernel with nvmet" in done.stdout
    assert "tests/nvmet/test_faults.py" in done.stdout
    assert " deselected" in done.stdout
    assert "passed" not in done.stdout


def test_asking_for_them_elsewhere_is_an_error() -> None:
    done = run_pytest("-m", "nvmet", "tests/nvmet")

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "run tests/nvmet/run" in done.stderr
