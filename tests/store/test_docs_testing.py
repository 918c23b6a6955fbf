"""The examples in docs/testing.md run."""

import re
from pathlib import Path

import pytest

from fx100_lmcache import claim

DOC = Path(__file__).parents[2] / "docs" / "testing.md"


def test_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "SETTLE_S", 1.0)  # as it is where nobody changed it for tests
    examples = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, str(DOC), "exec"), {})
