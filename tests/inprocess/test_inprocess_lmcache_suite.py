"""LMCache's own tests against the plugin."""

import os
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "lmcache"))
from test_l2_lmcache_suite import run, upstream_tests  # noqa: E402, F401

PASSED = 10


@pytest.mark.timeout(300)
def test_lmcaches_own_tests_pass(upstream_tests: Path) -> None:  # noqa: F811
    alone = ["-p", "no:cacheprovider", "-c", os.devnull, "--confcutdir", str(upstream_tests)]
    done = run(
        ["-m", "pytest", "-q", *alone, f"--rootdir={HERE}", str(HERE / "upstream_plugin_suite.py")],
        upstream_tests,
        PYTHONPATH=f"{upstream_tests}:{HERE}",
        PYTHONHASHSEED="0",  # their configurations leave the hash at its default
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(rf"^{PASSED} passed", done.stdout, re.M), done.stdout[-2000:]
