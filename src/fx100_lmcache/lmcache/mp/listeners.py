"""LMCache's listeners, each kept from costing others what they are to hear."""

from __future__ import annotations

from fx100_lmcache.lmcache.compat.mp import L2AdapterListener, ObjectKey
from fx100_lmcache.lmcache.error_boundary import Caught, ErrorBoundary


class PatientListener(L2AdapterListener):  # type: ignore[misc]
    """Passes on what a listener of LMCache is to hear; if that one fails, nobody else notices.

    Parameters
    ----------
    listener : L2AdapterListener
        May raise; its defects are counted and logged, and it goes on hearing of everything.
    """

    def __init__(self, listener: L2AdapterListener, boundary: ErrorBoundary) -> None:
        self._listener = listener
        self._boundary = boundary

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        """Tell of keys that were stored."""
        with self._caught("stored", keys):
            self._listener.on_l2_keys_stored(keys, sizes)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Tell of keys that were loaded."""
        with self._caught("loaded", keys):
            self._listener.on_l2_keys_accessed(keys)

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        """Tell of keys that are gone."""
        with self._caught("deleted", keys):
            self._listener.on_l2_keys_deleted(keys)

    def _caught(self, what: str, keys: list[ObjectKey]) -> Caught:
        name = type(self._listener).__name__
        text = f"{name} did not take {len(keys)} keys {what}"
        return self._boundary.caught("listener_errors", text)
