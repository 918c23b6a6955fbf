"""LMCache's own tests against the plugin."""

import os
import re
from pathlib import Path

import pytest

from support import SUPPORT
from support.upstream import only_its_own, run, upstream_tests  # noqa: F401

SUITE = str(SUPPORT / "upstream_plugin_suite.py")
PASSED = 10


@only_its_own
@pytest.mark.timeout(300)
def test_lmcaches_own_tests_pass(upstream_tests: Path) -> None:  # noqa: F811
    alone = ["-p", "no:cacheprovider", "-c", os.devnull, "--confcutdir", str(upstream_tests)]
    done = run(
        ["-m", "pytest", "-q", *alone, f"--rootdir={SUPPORT}", SUITE],
        upstream_tests,
        PYTHONPATH=os.pathsep.join([str(upstream_tests), os.environ["PYTHONPATH"]]),
        PYTHONHASHSEED="0",  # their configurations leave the hash at its default
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(rf"^{PASSED} passed", done.stdout, re.M), done.stdout[-2000:]
