"""What is handed out: a source distribution, and the wheel that is built from it.

The wheel is installed into an empty folder and used with no compiler to be found.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fx100_lmcache import __version__
from support import ROOT

SOURCES = ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"

pytest.importorskip("setuptools", minversion="77", reason="needs setuptools 77 to build")


def python(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as a packager does: from the source distribution alone."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("needs a C compiler to build")
    work = tmp_path_factory.mktemp("package")
    tree, out = work / "tree", work / "out"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
            shutil.copytree(source, tree / name, ignore=leave)
        else:
            shutil.copy(source, tree / name)
    python("-c", BUILD_SDIST, out, cwd=tree)
    [sdist] = out.glob("*.tar.gz")
    assert sdist.name == f"fx100_lmcache-{__version__}.tar.gz"
    how = "--quiet --disable-pip-version-check --no-build-isolation --no-deps --no-index"
    python("-m", "pip", "wheel", *how.split(), "--wheel-dir", out, sdist, cwd=work)
    [built] = out.glob("*.whl")
    return built


def test_one_wheel_serves_every_supported_python(wheel: Path) -> None:
    name, version, python_tag, abi, _platform = wheel.stem.split("-")
    assert (name, version, python_tag, abi) == ("fx100_lmcache", __version__, "cp311", "abi3")
    files = zipfile.ZipFile(wheel).namelist()
    assert "fx100_lmcache/engine/_native.abi3.so" in files
    assert "fx100_lmcache/py.typed" in files
    assert not [each for each in files if each.endswith((".c", ".h"))]


CONFIG = """\
volume:
  object: 64KiB
  members:
    - {path: m0, size: 4MiB}
    - {path: m1, size: 4MiB}
io: {engine: native}
"""


def test_it_works_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    home, empty = tmp_path / "home", tmp_path / "no programs"
    empty.mkdir()
    bare = {"PATH": str(empty), "PYTHONPATH": str(home), "CC": "/nonexistent"}
    how = "--quiet --disable-pip-version-check --no-deps --no-index"
    python("-m", "pip", "install", *how.split(), "--target", home, wheel, cwd=tmp_path, **bare)

    def fx100(*arguments: str) -> str:
        return python(home / "bin" / "fx100", *arguments, cwd=tmp_path, **bare)

    where = python("-c", "import fx100_lmcache as p; print(p.__file__)", cwd=tmp_path, **bare)
    assert Path(where.strip()).is_relative_to(home), "the one that was installed is looked at"
    told = fx100("--version").splitlines()
    assert told[0] == f"fx100 {__version__}"
    assert told[-1] == "engine here: native"
    (tmp_path / "fx100.yaml").write_text(CONFIG)
    fx100("format", "fx100.yaml", "--yes")
    assert "healthy" in fx100("status", "fx100.yaml")
    fx100("verify", "fx100.yaml")
    assert "fx100_lmcache.lmcache.l2_adapter" in fx100("l2-adapter", "fx100.yaml")
