"""LMCache's own tests, from its source distribution: downloaded once, then kept."""

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fx100_lmcache.lmcache.versions import installed_version
from support import ROOT

RELEASE = "0.5.6"
CACHE = ROOT / ".cache" / f"lmcache-{RELEASE}"
SDIST = f"lmcache-{RELEASE}.tar.gz"
SHA256 = "d6951e60ce8818a76aa42d0866a4ba85f1c95cd919355fff30ff24dcc3243f1e"

# without these, LMCache's setup.py looks for a CUDA compiler just to tell its name
DOWNLOAD_ENV = {"NO_NATIVE_EXT": "1", "NO_GPU_EXT": "1", "NO_CUDA_EXT": "1"}
QUIET_ENV = {"LMCACHE_TRACK_USAGE": "false"}


only_its_own = pytest.mark.skipif(
    installed_version("lmcache") != RELEASE, reason=f"these are the tests of LMCache {RELEASE}"
)


def run(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **QUIET_ENV, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def download() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    how = "--disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation"
    done = run(
        ["-m", "pip", "download", *how.split(), "--dest", str(CACHE), f"lmcache=={RELEASE}"],
        CACHE,
        **DOWNLOAD_ENV,
    )
    if done.returncode:
        pytest.fail(
            f"LMCache's source distribution (9 MB) could not be downloaded; this test needs a "
            f"package index, or {SDIST} in {CACHE}:\n{done.stderr[-2000:]}"
        )


@pytest.fixture(scope="module")
def upstream_tests() -> Path:
    """Directory with LMCache's `tests` package alone: its sources would hide the installed one."""
    archive = CACHE / SDIST
    if not archive.exists():
        download()
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found == SHA256, f"{archive} is not the release of LMCache {RELEASE}: delete it"
    unpacked = CACHE / "unpacked"
    if not (unpacked / "tests").exists():
        top = archive.name.removesuffix(".tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                member.name = member.name.removeprefix(f"{top}/")
                if member.name.startswith("tests/v1/") or member.name == "tests/__init__.py":
                    tar.extract(member, unpacked, filter="data")
    return unpacked
