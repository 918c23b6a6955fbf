"""Names that LMCache has moved, for the tests: where the release that is installed has them."""

import importlib
from typing import Any

from fx100_lmcache.lmcache.compat.inprocess import HOME, MOVED

CONNECTOR_IMPL = (
    "lmcache.inprocess.integration.vllm.vllm_v1_adapter"
    if MOVED
    else "lmcache.integration.vllm.vllm_v1_adapter"
)
"""What vLLM's connectors hand everything to, inside vLLM."""


def inprocess(name: str) -> Any:
    """Import a module of LMCache inside vLLM."""
    return importlib.import_module(f"{HOME}.{name}")


def places(bitmap: Any) -> int:
    """Return how many bits a bitmap has."""
    if hasattr(bitmap, "size"):  # 0.5.6 on
        return int(bitmap.size())
    return len(str(bitmap))
