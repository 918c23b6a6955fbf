"""Whether an inode can be true: every number it holds, against the geometry and the claims. Pure.

What passes is safe to use as it is: its length fits the catalog and its pieces, its pieces lie
where the allocator would have put them, its metadata can be read and names its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fx100_lmcache.errors import RecordError
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta
from fx100_lmcache.ondisk.claim_block import MAX_COUNTER, MAX_EPOCH
from fx100_lmcache.ondisk.geometry import MAX_OBJECT_BYTES, Geometry
from fx100_lmcache.ondisk.inode import TableRows
from fx100_lmcache.ondisk.location import blocks_of, members_of, starts_of
from fx100_lmcache.ondisk.reason import Reason

MAX_LOST_CLEARS = 1 << 16
"""A power cut can lose the claims of so many clears, and leave inodes written after them."""

MAX_EPOCHS_AHEAD = 1 << 32
"""So far beyond its claim's an inode's epoch may be: claims lost in power cuts, and the seconds
that a clock was wrong by."""

LAST_EPOCH = MAX_EPOCH + MAX_EPOCHS_AHEAD
"""No inode is taken that has a higher one."""

_MEMBERS_NUMBERED = 256  # by the eight bits of a piece's place
_AT_ONCE = 8192  # pieces: from 128 KiB on, malloc asks the kernel for each array and gives it back

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int8]

GOOD = 0
REASONS = tuple(Reason)
_CODES = {reason: number for number, reason in enumerate(REASONS, GOOD + 1)}


def reason_of(code: int) -> Reason:
    """Return what a code other than :data:`GOOD` stands for."""
    return REASONS[code - 1 - GOOD]


class Judge:
    """Judges the inodes of some shards.

    Parameters
    ----------
    generations : mapping of int to int
        Generation of each shard, as its claim says.
    claim_epoch : int or None
        Highest epoch of the claims; None if it is not known.
    """

    def __init__(
        self, geometry: Geometry, generations: Mapping[int, int], claim_epoch: int | None
    ) -> None:
        self._geometry = geometry
        self._generations = generations
        self._last_epoch = LAST_EPOCH if claim_epoch is None else claim_epoch + MAX_EPOCHS_AHEAD
        self._shard_blocks = np.zeros(_MEMBERS_NUMBERED, np.int64)
        for member in range(len(geometry.members)):
            self._shard_blocks[member] = len(geometry.shard_blocks(member, 0))
        self._prefixes: dict[bytes, U64 | None] = {}

    def verdicts(self, found: TableRows, words: U64, shard: int) -> Codes:
        """Judge whole inodes of one shard: :data:`GOOD`, or a code for :func:`reason_of`.

        Parameters
        ----------
        words : uint64 array of shape (inodes, 6)
            Their digests.
        """
        codes = np.full(len(found.slots), GOOD, np.int8)
        if not len(codes):
            return codes
        heads = found.heads
        readable, ours = self._named(found, words)
        limit = self._generations[shard] + MAX_LOST_CLEARS
        # of several reasons the last one here is told
        for reason, fine in (
            (Reason.DIGEST, ours),
            (Reason.METADATA, readable),
            (Reason.LENGTH, self._filled(found)),
            (Reason.PIECES, self._laid_out(found, shard)),
            (Reason.GENERATION, heads["generation"] <= np.uint64(limit)),
            (
                Reason.ORDER,
                (heads["epoch"] <= np.uint64(self._last_epoch))
                & (heads["counter"] <= np.uint64(MAX_COUNTER)),
            ),
        ):
            if not fine.all():
                codes[~fine] = _CODES[reason]
        return codes

    def _filled(self, found: TableRows) -> Flags:
        """Whether an object fills all of its pieces but the last, and ends in that one."""
        length, sizes = found.heads["length"], blocks_of(found.locations).view(np.int64)
        if not sizes.shape[1]:
            return np.zeros(len(length), np.bool_)
        last = np.maximum(found.heads["pieces"].astype(np.int64) - 1, 0)
        tail = sizes[np.arange(len(last)), last]
        blocks = sizes.sum(axis=1)
        unit = self._geometry.block_bytes
        end, start = ((n * unit).astype(np.uint64) for n in (blocks, blocks - tail))
        filled: Flags = (length <= np.uint64(MAX_OBJECT_BYTES)) & (length <= end) & (length > start)
        return filled

    def _laid_out(self, found: TableRows, shard: int) -> Flags:
        """Whether all pieces of an inode are such as the allocator gives in this shard."""
        locations, pieces = found.locations, found.heads["pieces"]
        step = max(1, _AT_ONCE // max(1, locations.shape[1]))
        parts = [
            self._legal(locations[at : at + step], pieces[at : at + step], shard)
            for at in range(0, len(locations), step)
        ]
        return np.concatenate(parts)

    def _legal(self, locations: U64, pieces: npt.NDArray[np.uint16], shard: int) -> Flags:
        """See :meth:`_laid_out`.

        A piece is a run of whole frames, not longer than a piece may be, or a part of one frame.
        """
        frame, sizes = self._geometry.frame_blocks, blocks_of(locations).view(np.int64)
        start = starts_of(locations).view(np.int64)
        in_frame = start - start // frame * frame
        good = in_frame + sizes <= frame
        if not good.all():
            good |= (in_frame == 0) & (sizes % frame == 0)
            good &= sizes <= self._geometry.piece_frames * frame
        limit = self._shard_blocks.take(members_of(locations).view(np.int64), mode="clip")
        start -= limit * shard
        good &= (start >= 0) & (start + sizes <= limit)
        if good.all() and np.count_nonzero(sizes) == pieces.sum(dtype=np.int64) and pieces.all():
            return np.ones(len(pieces), np.bool_)
        padding = np.arange(locations.shape[1]) >= pieces[:, None]
        flags: Flags = ((good & (sizes > 0)) | padding).all(axis=1) & (pieces > 0)
        return flags

    def _named(self, found: TableRows, words: U64) -> tuple[Flags, Flags]:
        """Whether metadata can be read, and whether the digest starts as it says."""
        prefixes = [self._prefix(meta) for meta in found.metas]
        if len(prefixes) == 1 and prefixes[0] is not None:
            return np.ones(len(words), np.bool_), _starts_with(words, prefixes[0])
        good = np.array([prefix is not None for prefix in prefixes], np.bool_)
        known = np.array([(0, 0) if prefix is None else prefix for prefix in prefixes], np.uint64)
        return good[found.meta_ids], _starts_with(words, known[found.meta_ids].T)

    def _prefix(self, meta: bytes) -> U64 | None:
        """Return the two words that start every digest of this metadata's scope."""
        if meta not in self._prefixes:
            try:
                prefix = ChunkMeta.unpack(meta).scope.prefix
                self._prefixes[meta] = np.frombuffer(prefix, np.uint64)
            except RecordError:
                self._prefixes[meta] = None
        return self._prefixes[meta]


def _starts_with(words: U64, prefix: Sequence[U64] | U64) -> Flags:
    flags: Flags = (words[:, 0] == prefix[0]) & (words[:, 1] == prefix[1])
    return flags
