"""Builds of the C sources for tests: with sanitizers, and with what can fail counted.

Everything goes below ``build/``, and is built again when a source is newer.
"""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "src" / "fx100_lmcache"
ENGINE = PACKAGE / "engine"

FLAGS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
_RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
_WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow")
# builtins that the compiler expands in line are not seen by a sanitizer
_COMMON = ("-std=gnu11", "-g", "-O1", "-pthread", "-fno-builtin", "-fno-omit-frame-pointer")
_FAULTS = ("-D_GNU_SOURCE=", "-include", str(HERE / "faults.h"))
_HEADERS = (ENGINE / "_pool.h", HERE / "faults.h")


def compiler() -> str | None:
    """Path of gcc, whose sanitizers are used."""
    return shutil.which("gcc")


def runtime(sanitizer: str) -> Path | None:
    """Shared library of a sanitizer, or None if the compiler has none."""
    cc = compiler()
    if cc is None:
        return None
    name = _RUNTIMES[sanitizer]
    found = subprocess.run(
        [cc, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Path(found).resolve() if Path(found).is_absolute() else None


def _compile(target: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    newest = max(path.stat().st_mtime for path in (*sources, *_HEADERS, Path(__file__)))
    if target.exists() and target.stat().st_mtime > newest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    cc = compiler()
    assert cc is not None
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # others may build it, too
        made = Path(folder) / target.name
        command = [cc, *_COMMON, *_WARNINGS, *flags, *map(str, sources), "-o", str(made)]
        subprocess.run(command, check=True)
        made.replace(target)
    return target


def program(name: str, sanitizer: str) -> Path:
    """Build ``name.c`` with the pools and a device in memory."""
    sources = [HERE / f"{name}.c", ENGINE / "_pool.c", HERE / "faults.c"]
    flags = [*_FAULTS, "-DFAULTS_DEVICE", *FLAGS[sanitizer]]
    return _compile(ROOT / "build" / f"native-{sanitizer}" / name, sources, flags)


def library(name: str, sanitizer: str) -> Path:
    """Build a program as a library that Python can load."""
    sources = [HERE / f"{name}.c", ENGINE / "_pool.c", HERE / "faults.c"]
    flags = [*_FAULTS, "-DFAULTS_DEVICE", "-shared", "-fPIC", *FLAGS[sanitizer]]
    return _compile(ROOT / "build" / f"native-{sanitizer}" / f"{name}.so", sources, flags)


def faulty_extension(sanitizer: str) -> Path:
    """Build the extension with allocations, Python's too, that fail when told to."""
    sources = [ENGINE / "_native.c", ENGINE / "_pool.c", HERE / "faults.c"]
    flags = [*_FAULTS, "-DFAULTS_PYTHON", *_extension_flags(sanitizer)]
    target = ROOT / "build" / f"native-{sanitizer}" / "faulty" / "_native.abi3.so"
    return _compile(target, sources, flags)


def _extension_flags(sanitizer: str) -> list[str]:
    headers = sysconfig.get_path("include")
    return ["-isystem", headers, "-shared", "-fPIC", *FLAGS[sanitizer]]


def warnings_of(name: str) -> str:
    """Return what the compiler says of a source of the product, as that is compiled."""
    cc = compiler()
    assert cc is not None
    headers = ["-isystem", sysconfig.get_path("include")]
    source = str(ENGINE / f"{name}.c")
    command = [cc, "-c", "-O2", *_WARNINGS, *headers, source, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def package(sanitizer: str) -> Path:
    """Copy the package to a folder of its own, with an extension that has the sanitizer."""
    folder = ROOT / "build" / f"native-{sanitizer}" / "package"
    copy = folder / PACKAGE.name
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(PACKAGE, copy, ignore=ignored)
    sources = [ENGINE / "_native.c", ENGINE / "_pool.c"]
    _compile(copy / "engine" / "_native.abi3.so", sources, _extension_flags(sanitizer))
    return folder


def sanitized_environment(sanitizer: str) -> dict[str, str]:
    """Return the environment of a Python whose extensions have a sanitizer.

    What it finds ends the process, and is in a file ``report.*`` below ``build/``.
    """
    found = runtime(sanitizer)
    assert found is not None
    reports = f"halt_on_error=1:log_path={ROOT / 'build' / f'native-{sanitizer}' / 'report'}"
    environment = os.environ | {
        "LD_PRELOAD": str(found),
        "FX100_SANITIZER": sanitizer,
        # CPython leaves much to the end of the process; what the pools leave is counted
        "ASAN_OPTIONS": f"detect_leaks=0:{reports}",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # children of tests start threads. Python's own code, which is not instrumented, is not to
        # be ignored: then what an extension does on its threads would be, too
        "TSAN_OPTIONS": f"die_after_fork=0:{reports}",
    }
    if sanitizer == "address":
        environment["PYTHONMALLOC"] = "malloc"
    return environment


_FIXED = ["setarch", "-R"]


def fixed_addresses(sanitizer: str) -> list[str]:
    """Return what a command begins with: libtsan knows no memory maps that are very random."""
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    random = sanitizer == "thread" and bits.exists() and int(bits.read_text()) > 28
    return _FIXED if random else []


def too_random(sanitizer: str) -> str:
    """Say why a sanitizer cannot be used on this machine; empty if it can."""
    fixed = fixed_addresses(sanitizer)
    if (
        not fixed
        or subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode == 0
    ):
        return ""
    return (
        f"the {sanitizer} sanitizer needs less random addresses, which this container may not "
        "choose: docker run --security-opt seccomp=unconfined, or sysctl vm.mmap_rnd_bits=28"
    )
