"""Runs something from outside at each line that an operation executes, one line per run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fx100_lmcache

SOURCE = Path(fx100_lmcache.__file__).parent
YIELD_S = 0.002  # for what is run beside the operation; longer only while it waits for our lock

Line = tuple[str, int]
"""Path and number."""
Scenario = Callable[["Interposed"], None]


class Interposed:
    """Traces every thread of an operation, and acts once, when a line is reached first.

    Parameters
    ----------
    folders : tuple of str
        The packages of ours whose lines count.
    at : (path, line) or None
        Where to act; None only notes the lines.

    Attributes
    ----------
    lines : dict
        Lines executed so far, in the order of their first execution.
    armed : bool
        Lines count from when the operation has set it.
    """

    def __init__(self, folders: tuple[str, ...], at: Line | None = None) -> None:
        self._folders = tuple(str(SOURCE / folder) for folder in folders)
        self._at = at
        self._act: Callable[[], None] = lambda: None
        self._actor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ours: dict[CodeType, bool] = {}
        self.lines: dict[Line, None] = {}
        self.armed = False

    def run(self, operate: Callable[[], None], act: Callable[[], None]) -> None:
        """Call ``operate``, and ``act`` beside it, or after it where its line is not reached.

        Raises
        ------
        AssertionError
            If ``act`` does not come to an end.
        """
        self._act = act
        before = sys.gettrace()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            operate()
        finally:
            sys.settrace(before)
            threading.settrace(before)
        self._interpose()
        assert self._actor is not None
        self._actor.join(30.0)
        assert not self._actor.is_alive(), "it never came to an end"

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._actor is not None:
            sys.settrace(None)
            return None
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = code.co_filename.startswith(self._folders)
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._actor is not None:
            return None
        if event == "line" and self.armed:
            line = (frame.f_code.co_filename, frame.f_lineno)
            self.lines.setdefault(line)
            if line == self._at:
                self._interpose()
        return self._line

    def _interpose(self) -> None:
        with self._lock:
            if self._actor is not None:
                return
            self._actor = threading.Thread(target=self._untraced, name="beside")
            self._actor.start()
        self._actor.join(YIELD_S)

    def _untraced(self) -> None:
        sys.settrace(None)
        self._act()


def at_every_line(folders: tuple[str, ...], scenario: Scenario) -> Iterator[Line]:
    """Run a scenario once to find its lines, then once for each of them; yield each after it."""
    found = Interposed(folders)
    scenario(found)
    assert found.lines, "nothing is traced any more"
    for line in found.lines:
        scenario(Interposed(folders, line))
        yield line
