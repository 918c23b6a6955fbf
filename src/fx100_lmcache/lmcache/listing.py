"""Keys in pages, by their place on the media: stable while entries come and go."""

from __future__ import annotations

from lmcache.v1.distributed.api import KeyEntry, KeyListPage

from fx100_lmcache.lmcache.keys import KeyTranslator
from fx100_lmcache.store import Store

STEP_ROWS = 512
"""Entries copied out at once, under the store's lock."""

SCAN_ROWS = 16_384
"""Entries that one call looks at; a page of a rare model may be short and yet not the last."""


def list_keys(
    store: Store, keys: KeyTranslator, model_name: str | None, page_size: int, cursor: str | None
) -> KeyListPage:
    """List keys from the cursor on, which is the number of a row.

    An entry that stays is listed exactly once, whatever happens to others meanwhile.

    Raises
    ------
    ValueError
        If ``page_size`` is not positive or ``cursor`` is none of ours.
    """
    if page_size <= 0:
        raise ValueError(f"page_size must be positive, not {page_size}")
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise ValueError(f"not a cursor of this adapter: {cursor!r}")
    row = int(cursor or 0)
    page: list[KeyEntry] = []
    for _ in range(SCAN_ROWS // STEP_ROWS):
        found = store.entries(row, STEP_ROWS)
        for row, digest, length, meta in found:
            if len(page) == page_size:
                return KeyListPage(tuple(page), str(row))
            key = keys.key_of(digest, meta)
            if key is not None and model_name in (None, key.model_name):
                page.append(KeyEntry(key.to_encoded_object_key(), length))
        if len(found) < STEP_ROWS:
            return KeyListPage(tuple(page), None)
        row += 1
    return KeyListPage(tuple(page), str(row))
