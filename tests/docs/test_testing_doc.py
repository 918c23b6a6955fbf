"""The examples in docs/testing.md run."""

import re

from support import ROOT

DOC = ROOT / "docs" / "testing.md"


def test_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, str(DOC), "exec"), {})
