"""What the rooms' tests share."""

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def counted_steps() -> Iterator[list[int]]:
    """Count the lines of Python that are run."""
    taken, before = [0], sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        taken[0] += event == "line"
        return trace

    sys.settrace(trace)
    try:
        yield taken
    finally:
        sys.settrace(before)
