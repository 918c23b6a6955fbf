"""What LMCache itself says of an adapter: its own test suite, and its basic check."""

import json
import os
import re
from pathlib import Path

import pytest

from fx100_lmcache.lmcache.compat.inprocess import HOME
from support import SUPPORT
from support.l2 import write_config
from support.upstream import only_its_own, run, upstream_tests  # noqa: F401

PASSED = 40


@only_its_own
@pytest.mark.timeout(300)
def test_lmcaches_own_suite_passes(upstream_tests: Path) -> None:  # noqa: F811
    suite = [str(SUPPORT), str(SUPPORT / "upstream_suite.py")]
    done = run(
        ["-m", "pytest", "-q", "-pno:cacheprovider", "-c/dev/null", "--rootdir", *suite],
        upstream_tests,
        PYTHONPATH=os.pathsep.join([str(upstream_tests), os.environ["PYTHONPATH"]]),
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
        ["-m", f"{HOME}.basic_check", *how.split(), json.dumps(spec)],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in ("correctly absent", "found", "(loaded)", "(content)"):
        assert "16/16" in next(part for part in done.stdout.splitlines() if line in part)
    assert "Batch store OK" in done.stdout
