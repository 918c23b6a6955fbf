"""The inode: one object, where its pieces lie and what they must hash to.

One function packs an inode; :func:`parse_table` reads a whole table at once with numpy, because
a million inodes must be recovered in seconds. An inode is bound to its place (volume, shard,
member, slot), so a misdirected write is never taken for a valid one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from fx100_lmcache.errors import TooLargeError
from fx100_lmcache.ondisk.chunk_meta import DIGEST_BYTES
from fx100_lmcache.ondisk.reason import Reason

MAGIC = b"FXIN"
VERSION = 1
HEAD_BYTES = 128
PIECE_BYTES = 16

_HEAD = struct.Struct("<4sHH 16s HBBI IHH QQ 48s QQ")
_PIECE = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<Q")
assert _CHECKSUM.size + _HEAD.size == HEAD_BYTES

_HEAD_DTYPE = np.dtype(
    {
        "names": [
            *("checksum", "magic", "version", "used", "volume", "shard", "member", "flags"),
            *("slot", "generation", "pieces", "meta", "epoch", "counter", "digest", "length"),
            "reserved",
        ],
        "formats": [
            *("<u8", "S4", "<u2", "<u2", "V16", "<u2", "u1", "u1"),
            *("<u4", "<u4", "<u2", "<u2", "<u8", "<u8", "V48", "<u8"),
            "<u8",
        ],
        "offsets": [0, 8, 12, 14, 16, 32, 34, 35, 36, 40, 44, 46, 48, 56, 64, 112, 120],
        "itemsize": HEAD_BYTES,
    }
)

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


def seed_of(volume: bytes) -> int:
    """Checksum seed of a volume, from its UUID."""
    return int.from_bytes(volume[:8], "little")


def max_pieces(inode_bytes: int, meta_bytes: int) -> int:
    """Pieces that fit an inode beside this much metadata."""
    return (inode_bytes - HEAD_BYTES - meta_bytes) // PIECE_BYTES


@dataclass(frozen=True, slots=True)
class InodePlace:
    """Where an inode lives, and whose it is."""

    volume: bytes
    shard: int
    member: int
    slot: int


def pack_inode(
    place: InodePlace,
    *,
    inode_bytes: int,
    generation: int,
    order: tuple[int, int],
    digest: bytes,
    length: int,
    pieces: Sequence[tuple[int, int]],
    meta: bytes,
) -> bytes:
    """Encode one inode, padded with zeros to ``inode_bytes``.

    Parameters
    ----------
    order : tuple of int
        ``(claim_epoch, counter)``: which of two inodes is newer.
    pieces : sequence of (location, checksum)
        Places as :mod:`~fx100_lmcache.ondisk.location` packs them, with the xxh3-64 of each
        piece's logical bytes.
    meta : bytes
        A packed :class:`~fx100_lmcache.ondisk.chunk_meta.ChunkMeta`.

    Raises
    ------
    TooLargeError
        If pieces and metadata do not fit.
    """
    assert len(digest) == DIGEST_BYTES
    used = HEAD_BYTES + PIECE_BYTES * len(pieces) + len(meta)
    if used > inode_bytes:
        raise TooLargeError(
            f"{len(pieces)} pieces and {len(meta)} bytes of metadata need {used} bytes; "
            f"inodes of this volume have {inode_bytes}"
        )
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        used,
        place.volume,
        place.shard,
        place.member,
        0,
        place.slot,
        generation,
        len(pieces),
        len(meta),
        *order,
        digest,
        length,
        0,
    )
    body = head + b"".join(_PIECE.pack(*piece) for piece in pieces) + meta
    checksum = xxhash.xxh3_64_intdigest(body, seed_of(place.volume))
    return (_CHECKSUM.pack(checksum) + body).ljust(inode_bytes, b"\0")


@dataclass(frozen=True, slots=True)
class TableRows:
    """What a stretch of an inode table holds; arrays have one entry for each whole inode.

    An inode is whole if its checksum is right, it stands in its place, and its parts fill it. What
    it says of its object is not looked at here.

    Attributes
    ----------
    slots : int64 array
        Slot numbers.
    heads : structured array
        The fields of each header, by name.
    locations, checksums : uint64 arrays of shape (inodes, widest)
        Piece by piece, padded with zeros beyond ``heads["pieces"]``.
    meta_ids : int64 array
        Index of each inode's metadata in ``metas``, which holds every distinct one once.
    torn : int
        Slots that are neither empty nor an inode: interrupted or damaged writes.
    foreign : int
        Slots with an inode of another volume.
    odd : dict of Reason to int64 array
        Slots whose checksum is right, but which hold no such inode.
    """

    slots: npt.NDArray[np.int64]
    heads: npt.NDArray[np.void]
    locations: U64
    checksums: U64
    meta_ids: npt.NDArray[np.int64]
    metas: list[bytes]
    torn: int
    foreign: int
    odd: dict[Reason, I64]


def parse_table(data: memoryview, place: InodePlace, *, inode_bytes: int) -> TableRows:
    """Read the inodes of consecutive slots, of whatever generation.

    Parameters
    ----------
    data : memoryview
        A whole number of slots; ``place.slot`` is the first one's number.
    """
    words = np.frombuffer(data, np.uint64).reshape(-1, inode_bytes // 8)
    written = np.flatnonzero(words[:, 1])  # magic, version and used length share this word
    blank_but_dirty = int(np.count_nonzero(words[words[:, 1] == 0, 0]))
    heads = words[written, : HEAD_BYTES // 8].view(_HEAD_DTYPE)[:, 0]
    filled = HEAD_BYTES + PIECE_BYTES * heads["pieces"].astype(np.int64) + heads["meta"]
    same_volume = heads["volume"] == np.void(place.volume)
    ours = heads["magic"] == MAGIC
    whole = ours & same_volume & (heads["used"] >= HEAD_BYTES) & (heads["used"] <= inode_bytes)
    whole[whole] = _sums_match(data, written[whole], heads[whole], inode_bytes, place.volume)
    foreign = ours & ~same_volume & (heads["version"] == VERSION) & (filled == heads["used"])
    torn = blank_but_dirty + int(np.count_nonzero(~(whole | foreign)))
    odd: dict[Reason, I64] = {}
    for reason, bad in _oddities(heads, written, filled, place):
        bad &= whole
        if bad.any():
            odd[reason] = written[bad] + place.slot
            whole &= ~bad
    at, kept = written[whole], heads[whole]
    locations, checksums = _pieces(words, at, kept)
    meta_ids, metas = _metas(data, at, kept, inode_bytes)
    foreigners = int(np.count_nonzero(foreign))
    slots = at + place.slot
    return TableRows(slots, kept, locations, checksums, meta_ids, metas, torn, foreigners, odd)


def _oddities(
    heads: npt.NDArray[np.void], written: I64, filled: I64, place: InodePlace
) -> Iterator[tuple[Reason, npt.NDArray[np.bool_]]]:
    """Yield what may be wrong with an inode whose checksum is right, and where it is."""
    known = (heads["version"] == VERSION) & (heads["flags"] == 0) & (heads["reserved"] == 0)
    yield Reason.FORMAT, ~known
    yield Reason.RECORD, filled != heads["used"]
    in_place = (
        (heads["shard"] == place.shard)
        & (heads["member"] == place.member)
        & (heads["slot"] == written + place.slot)
    )
    yield Reason.MISPLACED, ~in_place


def _sums_match(
    data: memoryview,
    at: npt.NDArray[np.int64],
    heads: npt.NDArray[np.void],
    inode_bytes: int,
    volume: bytes,
) -> npt.NDArray[np.bool_]:
    digest, seed = xxhash.xxh3_64_intdigest, seed_of(volume)
    starts = (at * inode_bytes).tolist()
    sums = [
        digest(data[start + 8 : start + used], seed)
        for start, used in zip(starts, heads["used"].tolist(), strict=True)
    ]
    matches: npt.NDArray[np.bool_] = np.array(sums, np.uint64) == heads["checksum"]
    return matches


def _pieces(words: U64, at: npt.NDArray[np.int64], heads: npt.NDArray[np.void]) -> tuple[U64, U64]:
    widest = int(heads["pieces"].max()) if len(heads) else 0
    first = HEAD_BYTES // 8
    outside = np.arange(widest) >= heads["pieces"][:, None]
    locations = words[at, first : first + 2 * widest : 2]
    checksums = words[at, first + 1 : first + 2 * widest : 2]
    locations[outside] = 0
    checksums[outside] = 0
    return locations, checksums


def _metas(
    data: memoryview, at: npt.NDArray[np.int64], heads: npt.NDArray[np.void], inode_bytes: int
) -> tuple[npt.NDArray[np.int64], list[bytes]]:
    """Find the distinct metadata of these inodes, of which one is by far the most common."""
    meta_ids = np.zeros(len(at), np.int64)
    if not len(at):
        return meta_ids, []
    middle = len(at) // 2
    end, size = int(heads["used"][middle]), int(heads["meta"][middle])
    table = np.frombuffer(data, np.uint8).reshape(-1, inode_bytes)
    common = table[at[middle], end - size : end]
    other = (heads["used"] != end) | (heads["meta"] != size)
    other[~other] = (table[at[~other], end - size : end] != common).any(axis=1)
    ids = {common.tobytes(): 0}
    ends = (at * inode_bytes + heads["used"])[other].tolist()
    meta_ids[other] = [
        ids.setdefault(bytes(data[end - size : end]), len(ids))
        for end, size in zip(ends, heads["meta"][other].tolist(), strict=True)
    ]
    return meta_ids, list(ids)
