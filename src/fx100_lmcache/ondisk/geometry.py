"""Where things lie on the members. Pure arithmetic, no I/O.

A member, from its first byte::

    label (4 KiB) | claims, 2 x 4 KiB per shard | inode tables, one per shard | data | label copy

The data area is a run of *frames* of ``frame_blocks`` blocks each, split evenly over the shards.
Blocks are numbered from the start of a member's data area; a *piece* is a contiguous run of
blocks on one member.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fx100_lmcache.errors import MemberSizeError, TooLargeError

LABEL_BYTES = 4096
CLAIM_BYTES = 4096
BLOCK_BYTES = 32 * 1024
MAX_MEMBERS = 16
MAX_SHARDS = 64
MAX_FRAME_BLOCKS = 64  # a frame's map of used blocks fits one 64-bit word
MAX_PIECE_BYTES = 8 * 1024 * 1024  # longer pieces gain nothing and would serialise one member
MAX_OBJECT_BYTES = (1 << 32) - 1  # the catalog keeps a length in 32 bits
MIN_ALIGN_BYTES, MAX_ALIGN_BYTES = 512, 4096
MAX_INODE_BYTES = 32 * 1024  # the next power of two does not fit the inode's own 16 bits
MAX_ROWS = (1 << 31) - 1  # the index of digests numbers inode slots with 31 bits
MAX_FRAMES = 1 << 32  # each takes a byte of memory, and four while a volume is opened
MAX_MEMBER_BLOCKS = 1 << 40  # the place of a piece numbers blocks with 40 bits
OBJECTS_PER_CHUNK = 64
MOST_BYTES_PER_INODE = 256 * 1024
INODE_SHARE = 64
_GOOD_IO_BYTES = 1024 * 1024  # from here on, splitting an object further costs more than it brings


def round_up(value: int, unit: int) -> int:
    """Round ``value`` up to a multiple of ``unit``."""
    return -(-value // unit) * unit


def _is_size(value: int, least: int, most: int) -> bool:
    """Whether this is a power of two in a range."""
    return least <= value <= most and value.bit_count() == 1


@dataclass(frozen=True, slots=True)
class MemberShape:
    """One member's own numbers. Sizes and offsets in bytes."""

    size_bytes: int
    slots_per_shard: int
    frames_per_shard: int


@dataclass(frozen=True)
class Geometry:
    """The whole volume's arithmetic; every offset in the package comes from here.

    Attributes
    ----------
    block_bytes, frame_blocks, inode_bytes, shards
        Fixed at format time and recorded in every label.
    io_align_bytes : int
        Unit of every transfer: the largest logical block size of the members.
    members : tuple of MemberShape
        In stripe order, which is the order of the labels, never that of paths.
    """

    block_bytes: int
    frame_blocks: int
    inode_bytes: int
    io_align_bytes: int
    shards: int
    members: tuple[MemberShape, ...]

    @property
    def frame_bytes(self) -> int:
        """Size of a frame."""
        return self.block_bytes * self.frame_blocks

    @property
    def table_offset(self) -> int:
        """Where the inode tables start, the same on every member."""
        return round_up(LABEL_BYTES + 2 * CLAIM_BYTES * self.shards, self.io_align_bytes)

    @property
    def piece_frames(self) -> int:
        """Frames in the longest piece."""
        return max(1, MAX_PIECE_BYTES // self.frame_bytes)

    @property
    def flaw(self) -> str:
        """Why no volume can be like this, in words; empty if one can."""
        rules = {
            "members": 1 <= len(self.members) <= MAX_MEMBERS,
            "shards": 1 <= self.shards <= MAX_SHARDS,
            "transfer unit": _is_size(self.io_align_bytes, MIN_ALIGN_BYTES, MAX_ALIGN_BYTES),
            "inode size": _is_size(self.inode_bytes, self.io_align_bytes, MAX_INODE_BYTES),
            "block size": self.block_bytes > 0 and self.block_bytes % MIN_ALIGN_BYTES == 0,
            "frame": 1 <= self.frame_blocks <= MAX_FRAME_BLOCKS
            and self.frame_bytes <= MAX_PIECE_BYTES,
            "slots": all(m.slots_per_shard >= 1 for m in self.members),
            "frames": all(m.frames_per_shard >= 1 for m in self.members),
        }
        for name, holds in rules.items():
            if not holds:
                return f"impossible {name}"
        return self._excess

    @property
    def _excess(self) -> str:
        """What there is too much of; asked once the numbers make sense one by one."""
        if self.block_bytes % self.io_align_bytes:
            return "blocks are no whole number of transfer units"
        if self.rows > MAX_ROWS:
            return f"{self.rows} inode slots, at most {MAX_ROWS}: raise bytes_per_inode"
        frames = [m.frames_per_shard * self.shards for m in self.members]
        if sum(frames) > MAX_FRAMES or max(frames) * self.frame_blocks > MAX_MEMBER_BLOCKS:
            return f"{sum(frames)} frames, at most {MAX_FRAMES}: use larger objects"
        for member in range(len(self.members)):
            end = self.block_offset(member, self.shard_blocks(member, self.shards - 1).stop)
            if end > self.label_copy_offset(member):
                return f"the data area of member {member} ends beyond the member"
        return ""

    def claim_offset(self, shard: int, which: int) -> int:
        """Offset of one of the two alternating claim blocks of a shard."""
        return LABEL_BYTES + CLAIM_BYTES * (2 * shard + which)

    def table_bytes(self, member: int) -> int:
        """Size of one shard's inode table on this member."""
        return self.members[member].slots_per_shard * self.inode_bytes

    def slot_offset(self, member: int, shard: int, slot: int) -> int:
        """Offset of an inode slot."""
        return self.table_offset + shard * self.table_bytes(member) + slot * self.inode_bytes

    @cached_property
    def _data_offsets(self) -> tuple[int, ...]:
        return tuple(
            round_up(self.table_offset + self.shards * self.table_bytes(m), self.block_bytes)
            for m in range(len(self.members))
        )

    def block_offset(self, member: int, block: int) -> int:
        """Offset of a block of the data area."""
        return self._data_offsets[member] + block * self.block_bytes

    def label_copy_offset(self, member: int) -> int:
        """Offset of the label's second copy, at the member's end."""
        return label_copy_offset(self.members[member].size_bytes)

    def shard_blocks(self, member: int, shard: int) -> range:
        """Blocks of a member that belong to a shard."""
        blocks = self.members[member].frames_per_shard * self.frame_blocks
        return range(shard * blocks, (shard + 1) * blocks)

    def total_blocks(self, shards: Sequence[int]) -> int:
        """Count the data blocks of some shards on all members: the hard limit of their capacity."""
        return len(shards) * self.frame_blocks * sum(m.frames_per_shard for m in self.members)

    @cached_property
    def _row_bases(self) -> tuple[int, ...]:
        bases = [0]
        for shape in self.members:
            bases.append(bases[-1] + shape.slots_per_shard * self.shards)
        return tuple(bases)

    @property
    def rows(self) -> int:
        """Number of inode slots of the whole volume."""
        return self._row_bases[-1]

    def row(self, member: int, shard: int, slot: int) -> int:
        """Return a slot's number among all slots of the volume: its row in the catalog."""
        return self._row_bases[member] + shard * self.members[member].slots_per_shard + slot

    def place(self, row: int) -> tuple[int, int, int]:
        """Inverse of :meth:`row`: ``(member, shard, slot)``."""
        member = next(m for m, base in enumerate(self._row_bases[1:]) if row < base)
        shard, slot = divmod(row - self._row_bases[member], self.members[member].slots_per_shard)
        return member, shard, slot

    def blocks_for(self, length_bytes: int) -> int:
        """Blocks that an object of this length takes."""
        return -(-length_bytes // self.block_bytes)


def label_copy_offset(size_bytes: int) -> int:
    """Offset of the second label copy on a member of this size."""
    return size_bytes // LABEL_BYTES * LABEL_BYTES - LABEL_BYTES


def choose_frame_blocks(object_bytes: int, members: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Pick the frame that makes full chunks waste nothing.

    Least waste first; then frames of at least 1 MiB whose count divides evenly over the members;
    then the largest. 8,126,464 bytes (Qwen3-Coder-480B at TP8) on 4 members give 62 blocks: one
    frame of 2,031,616 bytes on each.
    """
    blocks = max(1, -(-object_bytes // block_bytes))
    smallest = min(blocks, max(1, _GOOD_IO_BYTES // block_bytes))

    def rank(frame: int) -> tuple[int, bool, int]:
        frames = -(-blocks // frame)
        return frames * frame - blocks, frames % members != 0, -frame

    return min(range(min(smallest, MAX_FRAME_BLOCKS), min(blocks, MAX_FRAME_BLOCKS) + 1), key=rank)


def default_bytes_per_inode(
    object_bytes: int, inode_bytes: int = 1024, block_bytes: int = BLOCK_BYTES
) -> int:
    """Pick how much data an inode slot is made for, where nobody said.

    Room for 64 objects in the place of one full chunk, since a chunk that is stored layer by layer
    is as many objects as the model has layers (62 of 131,072 bytes for Qwen3-Coder-480B at TP8).
    At most 256 KiB, so that a volume of large chunks takes small ones, too; no less than a block,
    which every object takes; and no more than 1/64 of the volume is for inodes, since all of them
    are read when it is opened. 8,126,464 bytes give 126,976: 0.8 % of the volume, or 8.3 GiB of
    inodes in a TiB.
    """
    wanted = min(object_bytes // OBJECTS_PER_CHUNK, MOST_BYTES_PER_INODE)
    return max(wanted, block_bytes, INODE_SHARE * inode_bytes)


def plan_geometry(
    sizes_bytes: Sequence[int],
    *,
    object_bytes: int,
    shards: int = 1,
    inode_bytes: int = 1024,
    bytes_per_inode: int | None = None,
    io_align_bytes: int = 4096,
    block_bytes: int = BLOCK_BYTES,
    names: Sequence[str] = (),
) -> Geometry:
    """Lay out a new volume.

    Parameters
    ----------
    sizes_bytes : sequence of int
        Member sizes, in stripe order; they may differ.
    object_bytes : int
        Size of the typical full chunk.
    bytes_per_inode : int or None
        One inode slot for this much data: smaller means more small objects fit. None: as
        :func:`default_bytes_per_inode` picks it.
    names : sequence of str
        What the members are called in an error.

    Raises
    ------
    MemberSizeError
        If a member cannot hold one frame and one inode for each shard.
    TooLargeError
        If there are too many members, shards, inodes or frames.
    """
    if not 1 <= len(sizes_bytes) <= MAX_MEMBERS:
        raise TooLargeError(f"{len(sizes_bytes)} members; a volume has 1 to {MAX_MEMBERS}")
    if not 1 <= shards <= MAX_SHARDS:
        raise TooLargeError(f"{shards} shards; a volume has 1 to {MAX_SHARDS}")
    inode_bytes = max(inode_bytes, io_align_bytes)
    if bytes_per_inode is None:
        bytes_per_inode = default_bytes_per_inode(object_bytes, inode_bytes, block_bytes)
    frame_blocks = choose_frame_blocks(object_bytes, len(sizes_bytes), block_bytes)
    frame_bytes = frame_blocks * block_bytes
    shapes = []
    for index, size in enumerate(sizes_bytes):
        fixed = LABEL_BYTES + 2 * CLAIM_BYTES * shards + io_align_bytes + block_bytes + LABEL_BYTES
        slots = (size - fixed) // (bytes_per_inode * shards)
        room_beside_one_frame = (size - fixed - shards * frame_bytes) // (shards * inode_bytes)
        slots = max(1, min(slots, room_beside_one_frame))
        frames = (size - fixed - shards * slots * inode_bytes) // (frame_bytes * shards)
        if frames < 1:
            needed = fixed + shards * (inode_bytes + frame_bytes)
            raise MemberSizeError(
                f"{names[index] if names else f'member {index}'} has {size} bytes; {shards} "
                f"shard(s) with frames of {frame_bytes} bytes need at least {needed}",
                remedy="make the member larger, or volume.shards or volume.object smaller",
            )
        shapes.append(MemberShape(size, slots, frames))
    made = Geometry(block_bytes, frame_blocks, inode_bytes, io_align_bytes, shards, tuple(shapes))
    if made.flaw:
        raise TooLargeError(f"no volume can be like this: {made.flaw}")
    return made


def stripe(
    blocks: int, frame_blocks: int, members: Sequence[int], max_piece_frames: int
) -> Iterator[tuple[int, int]]:
    """Split an object over members: yield ``(member, blocks)`` for each piece.

    Whole frames are dealt as evenly as possible in the order given, each member's share as one
    run (cut at ``max_piece_frames``); what is left over, less than a frame, is the last piece.
    """
    frames, tail = divmod(blocks, frame_blocks)
    width = len(members)
    for position, member in enumerate(members):
        share = frames // width + (position < frames % width)
        while share > 0:
            run = min(share, max_piece_frames)
            yield member, run * frame_blocks
            share -= run
    if tail:
        yield members[frames % width], tail
