"""The forward pass that vLLM is in, when something that was promised to it is not there.

LMCache tells vLLM of a failed load only where it loads whole chunks; layer by layer it looks at no
result, so here vLLM is told instead. And in either mode LMCache goes on to save what that pass
computes from KV that is missing; such chunks would be served to others as good ones.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from fx100_lmcache.errors import FX100Error
from fx100_lmcache.lmcache.inprocess.notices import Notices

log = logging.getLogger(__name__)


class LayerLoadError(FX100Error):
    """A layer was not loaded and vLLM could not be told: its worker must not go on."""


def find_connector() -> Any:
    """Return vLLM's connector to LMCache in this worker, None if there is none to talk to."""
    state = sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state")
    if state is None or not state.has_kv_transfer_group():
        return None
    group = state.get_kv_transfer_group()
    for each in (group, *getattr(group, "_connectors", ())):  # vLLM's MultiConnector holds several
        lmcache = getattr(each, "_lmcache_engine", None)
        if isinstance(getattr(lmcache, "_invalid_block_ids", None), set):
            return each
    return None


class ForwardPass:
    """Knows whether the current forward pass can be trusted. Thread-safe.

    Parameters
    ----------
    chunk_tokens : int
        Tokens of a chunk: LMCache loads from a whole chunk on, over what vLLM has already.
    notices : Notices or None
        Shared with the other ranks of the engine, if there are any.
    """

    def __init__(self, chunk_tokens: int, notices: Notices | None = None) -> None:
        self._chunk_tokens = chunk_tokens
        self._notices = notices
        self._tainted: Any = None

    @property
    def tainted_here(self) -> bool:
        """Whether something promised to this very pass is missing on this rank."""
        tainted = self._tainted
        return tainted is not None and tainted is _connector_metadata(find_connector())

    @property
    def tainted(self) -> bool:
        """Whether something promised to this very pass is missing on any rank.

        Raises
        ------
        OSError
            If the notices of the other ranks cannot be read.
        """
        if self.tainted_here:
            return True
        return self._notices is not None and self._notices.names(_loading_ids())

    def taint(self) -> None:
        """Note that something promised to the current pass is missing.

        Raises
        ------
        OSError
            If the other ranks cannot be told.
        """
        # kept whole, not by its id, which the next pass could have again
        self._tainted = _connector_metadata(find_connector())
        if self._notices is not None:
            self._notices.publish(_loading_ids())

    def invalidate(self) -> int:
        """Tell vLLM that nothing loaded in the current pass is good.

        Which request a layer belongs to is not known here, so all that load are computed anew
        (``kv_load_failure_policy: recompute``) or failed.

        Returns
        -------
        int
            KV blocks that vLLM will not use.

        Raises
        ------
        LayerLoadError
            If it cannot be told.
        """
        connector = find_connector()
        metadata = _connector_metadata(connector)
        try:
            blocks = self._loaded_blocks(connector._lmcache_engine, metadata)
            connector._lmcache_engine._invalid_block_ids.update(blocks)
        except (AttributeError, TypeError, ValueError) as problem:
            text = f"a layer is missing, and vLLM cannot be told: {problem}"
            raise LayerLoadError(text) from None
        if not blocks:
            raise LayerLoadError("a layer is missing, and vLLM has no request that loads")
        return len(blocks)

    def _loaded_blocks(self, lmcache: Any, metadata: Any) -> set[int]:
        blocks: set[int] = set()
        for request in _loading(metadata):
            load = request.load_spec
            start = load.vllm_cached_tokens // self._chunk_tokens * self._chunk_tokens
            slots = request.slot_mapping[start : load.lmcache_cached_tokens]
            blocks.update((slots[slots >= 0] // lmcache._block_size).tolist())
        return blocks


def _connector_metadata(connector: Any) -> Any:
    """Return what the scheduler told the current pass to do, None outside of a pass."""
    return getattr(connector, "_connector_metadata", None)


def _loading(metadata: Any) -> list[Any]:
    """Return the requests that load in a pass."""
    return [each for each in metadata.requests if each.load_spec and each.load_spec.can_load]


def _loading_ids() -> list[str]:
    """Return the names, alike on all ranks, of the requests that load in the current pass."""
    metadata = _connector_metadata(find_connector())
    if not hasattr(metadata, "requests"):  # no pass, or not LMCache's
        return []
    return [str(each.req_id) for each in _loading(metadata)]
