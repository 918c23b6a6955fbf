"""The pools under sanitizers; and that these find a planted fault each, else silence means nothing.

NATIVE_ROUNDS and NATIVE_SEED: how long the stress goes on, and with which random numbers.
"""

import os
import subprocess
import sys

import pytest

from native.native_build import (
    FLAGS,
    compiler,
    fixed_addresses,
    library,
    program,
    runtime,
    sanitized_environment,
    too_random,
    warnings_of,
)

pytestmark = pytest.mark.skipif(
    compiler() is None or not (runtime("address") and runtime("thread")),
    reason="needs gcc with libasan and libtsan",
)

ROUNDS = os.environ.get("NATIVE_ROUNDS", "30")
SEED = os.environ.get("NATIVE_SEED", "1")

PLANTED = [
    ("address", "overflow", "heap-buffer-overflow"),
    ("address", "use_after_free", "heap-use-after-free"),
    ("address", "misaligned", "misaligned address"),
    ("address", "signed_overflow", "signed integer overflow"),
    ("thread", "race", "data race"),
    ("plain", "leak", "1 allocations left"),
]


def run(
    sanitizer: str, *command: object, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    if why := too_random(sanitizer):
        pytest.skip(why)
    return subprocess.run(
        [*fixed_addresses(sanitizer), *map(str, command)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(("sanitizer", "fault", "report"), PLANTED)
def test_a_planted_fault_is_found(sanitizer: str, fault: str, report: str) -> None:
    found = run(sanitizer, program("planted", sanitizer), fault)
    assert found.returncode != 0
    assert report in found.stderr


@pytest.mark.parametrize(("sanitizer", "fault", "report"), [PLANTED[0], PLANTED[2], PLANTED[4]])
def test_a_fault_planted_in_an_extension_of_python_is_found(
    sanitizer: str, fault: str, report: str
) -> None:
    """As the tests of the engine are run by ``make test-native``."""
    environment = sanitized_environment(sanitizer)
    for name in ("ASAN_OPTIONS", "TSAN_OPTIONS"):
        environment[name] = environment[name].partition(":log_path")[0]  # to stderr
    load = f"import ctypes; ctypes.CDLL({str(library('planted', sanitizer))!r}).plant(b{fault!r})"
    found = run(sanitizer, sys.executable, "-c", load, environment=environment)
    assert found.returncode != 0
    assert report in found.stderr


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizer", FLAGS)
def test_the_pools_stand_a_stress(sanitizer: str) -> None:
    found = run(sanitizer, program("stress", sanitizer), SEED, ROUNDS)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(f"{ROUNDS} rounds")


@pytest.mark.parametrize("name", ["_native", "_pool"])
def test_the_sources_compile_without_a_warning(name: str) -> None:
    assert warnings_of(name) == ""
