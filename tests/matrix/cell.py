"""One run of the tests of both faces in one environment."""

from __future__ import annotations

import os
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matrix.environments import ROOT, Interpreter

LIMIT_S = 1800
FACES = {"mp": "tests/lmcache/mp", "in-process": "tests/lmcache/inprocess"}

SHORT = {
    "mp": ("test_compat.py", "test_interface.py", "test_identity.py", "test_scarce.py"),
    "in-process": ("test_plugin.py", "test_layerwise.py", "test_engine.py", "test_versions.py"),
}
"""What calls every method of a face with LMCache's own objects, in seconds."""


@dataclass
class Outcome:
    """How the tests of one face went.

    Attributes
    ----------
    names : list of str
        Tests that failed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    names: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether some passed, and none failed."""
        return self.counts["passed"] > 0 and not self.counts["failed"]

    def __str__(self) -> str:
        """Give the counts that are not zero."""
        kinds = ("passed", "failed", "skipped")
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in kinds if self.counts[kind])


def run(
    python: Interpreter, overlay: Path, faces: Sequence[str], *, short: bool
) -> dict[str, Outcome]:
    """Run the tests; a face without any outcome did not even start, and counts as failed."""
    paths = [
        f"{FACES[face]}/{name}" if short else FACES[face]
        for face in faces
        for name in (SHORT[face] if short else [""])
    ]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        how = ["-q", "-p", "no:cacheprovider", "-n", "auto", "--junitxml", str(report)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(overlay)]),
            "LMCACHE_TRACK_USAGE": "false",
        }
        done = subprocess.run(
            [python.program, "-m", "pytest", *how, *paths],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        found = read(report) if report.exists() else {}
    if not set(faces) <= set(found):
        print(done.stdout[-3000:] + done.stderr[-3000:])
    failed = Outcome(Counter(failed=1), ["(the tests could not be started)"])
    return {face: found.get(face, failed) for face in faces}


def read(report: Path) -> dict[str, Outcome]:
    """Read pytest's report; by face."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        where = case.get("classname", "")
        face = "in-process" if ".inprocess." in where else "mp"
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "passed"
        kind = "skipped" if "skipped" in kinds else kind
        outcome = found.setdefault(face, Outcome())
        outcome.counts[kind] += 1
        if kind == "failed":
            outcome.names.append(f"{where}::{case.get('name')}")
    return found
