"""The native engine: built, or why not."""

from __future__ import annotations

import importlib.util

from fx100_lmcache.config import Config
from fx100_lmcache.engine.native_lane import native_available
from fx100_lmcache.findings import Finding, ok, warning

EXTENSION = "fx100_lmcache.engine._native"


def check_engine(
    config: Config, *, built: bool | None = None, works: bool | None = None
) -> Finding:
    """Say which engine moves the bytes.

    Parameters
    ----------
    built, works : bool or None
        Whether the extension is there, and can be used; by default what is installed.
    """
    if config.io.engine == "python":
        return ok("engine", "Python threads, as io.engine asks for")
    built = importlib.util.find_spec(EXTENSION) is not None if built is None else built
    works = native_available() if works is None else works
    if works:
        return ok("engine", "native")
    reason = "found no libxxhash" if built else "was not built"
    remedy = (
        "apt-get install libxxhash0"
        if built
        else (
            "install a C compiler and Python's headers, then: "
            "pip install --force-reinstall --no-deps fx100-lmcache"
        )
    )
    return warning(
        "engine",
        f"the native engine {reason}: Python threads are used",
        "in a process that is busy with other Python threads they move about half as much",
        remedy,
    )
