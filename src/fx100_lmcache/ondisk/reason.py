"""Why an inode with a right checksum is not taken. Pure."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """What an inode says that cannot be, or that a newer one denies.

    A checksum proves that the bytes are those that were written, not that what they say is true:
    another program, a defect of ours or somebody's intent may have written them.
    """

    FORMAT = "format"
    RECORD = "record"
    MISPLACED = "misplaced"
    ORDER = "order"
    GENERATION = "generation"
    PIECES = "pieces"
    LENGTH = "length"
    METADATA = "metadata"
    DIGEST = "digest"
    DUPLICATE = "duplicate"
    OVERLAP = "overlap"


TEXTS = {
    Reason.FORMAT: "a version or flags that this package does not know; left alone",
    Reason.RECORD: "its pieces and metadata do not fill the bytes that it says it has",
    Reason.MISPLACED: "it says that it belongs in another slot",
    Reason.ORDER: "an epoch or counter that no writer reaches",
    Reason.GENERATION: "a generation far beyond that of the claim",
    Reason.PIECES: "pieces that do not lie where the allocator would put them",
    Reason.LENGTH: "a length that is not that of its pieces",
    Reason.METADATA: "metadata that cannot be read",
    Reason.DIGEST: "a digest that does not belong to its metadata",
    Reason.DUPLICATE: "older than another of the same digest",
    Reason.OVERLAP: "a newer one has some of its blocks",
}
"""In words, for operators."""

LOST = frozenset({Reason.DUPLICATE, Reason.OVERLAP})
"""What a power cut may leave behind."""

IMPOSSIBLE = frozenset(Reason) - LOST
"""What no sound server of this version ever wrote."""
