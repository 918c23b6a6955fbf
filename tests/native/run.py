"""Run the pools and the tests of the engine under sanitizers (``make test-native``).

NATIVE_ROUNDS: how long the stress goes on (100 takes a few seconds for each sanitizer).
NATIVE_ALL: if set, with the tests of engines that are not in C, and with those that do something at
every line of the engine, hundreds of engines each: what they ask of C is in ``tests/native``.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from native_build import (
    HERE,
    ROOT,
    fixed_addresses,
    package,
    runtime,
    sanitized_environment,
    too_random,
)

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "4"]
ENGINE_TESTS = ["tests/engine"]
AT_EVERY_LINE = [
    f"--ignore=tests/engine/test_{name}.py" for name in ("closing", "constructors", "failures")
]
IN_C = ["-k", "not inline and not python-disk and not python-shm"]  # kinds of engines
# a forked child finds locks of the sanitizers' allocators held that nobody gives back
NEVER = ["--ignore=tests/engine/test_fork.py"]
OWN_TESTS = [f"tests/native/test_{name}.py" for name in ("bounds", "memory", "lifetimes")]


def main() -> None:
    """Run all of it; the exit code says whether something was found."""
    if not (runtime("address") and runtime("thread")):
        sys.exit("no libasan and libtsan were found: install gcc (Debian: apt install gcc)")
    rounds = {"NATIVE_ROUNDS": os.environ.get("NATIVE_ROUNDS", "100")}
    stress = str(HERE / "test_sanitizers.py")
    failed = run("stress, planted faults", [*PYTEST, stress], os.environ | rounds)
    chosen = NEVER if os.environ.get("NATIVE_ALL") else [*NEVER, *AT_EVERY_LINE, *IN_C]
    for sanitizer in ("address", "thread"):
        if why := too_random(sanitizer):
            print(f"== tests, {sanitizer} sanitizer: NOT RUN: {why}", flush=True)
            continue
        environment = sanitized_environment(sanitizer)
        environment["PYTHONPATH"] = str(package(sanitizer))
        command = [*fixed_addresses(sanitizer), *PYTEST, *chosen, *ENGINE_TESTS, *OWN_TESTS]
        for old in reports(sanitizer):
            old.unlink()
        failed += run(f"tests, {sanitizer} sanitizer", command, environment)
        for report in reports(sanitizer):
            print(report.read_text(errors="replace"))
            failed += 1
    sys.exit(min(failed, 1))


def reports(sanitizer: str) -> list[Path]:
    """Find what a sanitizer has written."""
    return sorted((ROOT / "build" / f"native-{sanitizer}").glob("report.*"))


def run(what: str, command: Sequence[str], environment: dict[str, str]) -> int:
    print(f"== {what}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
