"""What LMCache itself says of an adapter: its own test suite, and its basic check."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from l2_tools import write_config

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "lmcache-0.5.6"
SDIST = "lmcache-0.5.6.tar.gz"
SHA256 = "d6951e60ce8818a76aa42d0866a4ba85f1c95cd919355fff30ff24dcc3243f1e"
PASSED = 40

# without these, LMCache's setup.py looks for a CUDA compiler just to tell its name
DOWNLOAD_ENV = {"NO_NATIVE_EXT": "1", "NO_GPU_EXT": "1", "NO_CUDA_EXT": "1"}
QUIET_ENV = {"LMCACHE_TRACK_USAGE": "false"}


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
        ["-m", "pip", "download", *how.split(), "--dest", str(CACHE), "lmcache==0.5.6"],
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
    assert found == SHA256, f"{archive} is not the release of LMCache 0.5.6: delete it"
    unpacked = CACHE / "unpacked"
    if not (unpacked / "tests").exists():
        top = archive.name.removesuffix(".tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                member.name = member.name.removeprefix(f"{top}/")
                if member.name.startswith("tests/v1/") or member.name == "tests/__init__.py":
                    tar.extract(member, unpacked, filter="data")
    return unpacked


@pytest.mark.timeout(300)
def test_lmcaches_own_suite_passes(upstream_tests: Path) -> None:
    suite = [str(HERE), str(HERE / "upstream_suite.py")]
    done = run(
        ["-m", "pytest", "-q", "-pno:cacheprovider", "-c/dev/null", "--rootdir", *suite],
        upstream_tests,
        PYTHONPATH=f"{upstream_tests}:{HERE}",
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(rf"^{PASSED} passed", done.stdout, re.M), done.stdout[-2000:]


def test_lmcaches_basic_check_passes(tmp_path: Path) -> None:
    spec = {
        "type": "plugin",
        "module_path": "fx100_lmcache.lmcache.l2_adapter",
        "class_name": "FX100L2Adapter",
        "adapter_params": {"config": str(write_config(tmp_path))},
    }
    how = "--mode test_l2_adapter --model test/model --num-keys 16 --obj-size 16384 --l2-adapter"
    done = run(
        ["-m", "lmcache.v1.basic_check", *how.split(), json.dumps(spec)],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in ("correctly absent", "found", "(loaded)", "(content)"):
        assert "16/16" in next(part for part in done.stdout.splitlines() if line in part)
    assert "Batch store OK" in done.stdout
