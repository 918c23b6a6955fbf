"""The examples in docs/testing.md run."""

import re

import pytest

from fx100_lmcache.volume import claim
from support import ROOT

DOC = ROOT / "docs" / "testing.md"


def test_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "SETTLE_S", 1.0)  # as it is where nobody changed it for tests
    examples = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, str(DOC), "exec"), {})
