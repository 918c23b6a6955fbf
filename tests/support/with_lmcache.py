"""What the folders whose tests need LMCache have in common."""

import importlib
import os
import warnings
from pathlib import Path

import pytest


def import_quietly(*modules: str) -> None:
    """Import modules that need LMCache, whose import warns; skip where it is not installed."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lmcache", reason="needs the lmcache package")
        for module in modules:
            importlib.import_module(module)


def mark_tests_in(folder: Path, items: list[pytest.Item]) -> None:
    """Mark the tests of a folder as those that need LMCache."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker("lmcache")
            # LMCache's logger does this whenever a module of it is loaded
            ignore = "ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning"
            item.add_marker(pytest.mark.filterwarnings(ignore))
