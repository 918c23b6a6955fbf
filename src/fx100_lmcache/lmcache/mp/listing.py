"""Keys in pages, by their place on the media: stable while entries come and go."""

from __future__ import annotations

from fx100_lmcache.lmcache.compat.mp import KeyEntry, KeyListPage
from fx100_lmcache.lmcache.mp.keys import KeyNamer
from fx100_lmcache.store import Store

STEP_ROWS = 512
"""Entries copied out at once, under the store's lock."""

CURSOR_DIGITS = 18
"""No row has a number of more digits."""

SCAN_ROWS = 16_384
"""Entries that one call looks at; a page of a rare model may be short and yet not the last."""


def check_page(page_size: object, cursor: object) -> None:
    """Check what a caller asks for.

    Raises
    ------
    ValueError
        If ``page_size`` is not positive or ``cursor`` is none of ours.
    """
    if not isinstance(page_size, int) or page_size <= 0:
        raise ValueError(f"page_size must be a positive number, not {page_size!r}")
    if cursor is None:
        return
    number = isinstance(cursor, str) and cursor.isascii() and cursor.isdigit()
    if not number or len(str(cursor)) > CURSOR_DIGITS:
        raise ValueError(f"not a cursor of this adapter: {cursor!r}")


def list_keys(
    store: Store, keys: KeyNamer, model_name: str | None, page_size: int, cursor: str | None
) -> KeyListPage:
    """List keys from the cursor on, which is the number of a row.

    An entry that stays is listed exactly once, whatever happens to others meanwhile. What is asked
    for must have passed `check_page`.
    """
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
