"""What recovery must find: slot by slot, in plain Python, without the package's own arithmetic.

Slow on purpose. The real one works on the columns of a million entries; both must agree.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from fx100_lmcache.errors import RecordError
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta
from fx100_lmcache.ondisk.geometry import Geometry
from fx100_lmcache.ondisk.reason import Reason

_HEAD = struct.Struct("<Q4sHH16sHBBIIHHQQ48sQQ")
_PIECE_BYTES = 8 * 1024 * 1024

Run = tuple[int, int, int, int]
"""Member, start block, blocks, checksum."""


@dataclass(frozen=True, slots=True)
class Found:
    """An inode that can be true."""

    row: int
    shard: int
    generation: int
    order: tuple[int, int]
    digest: bytes
    length: int
    pieces: tuple[Run, ...]

    def blocks(self) -> list[tuple[int, int]]:
        """Every block, as (member, block)."""
        return [(m, b) for m, start, n, _ in self.pieces for b in range(start, start + n)]


@dataclass(frozen=True, slots=True)
class Refused:
    """An inode that cannot be true; its generation is None where that does not matter."""

    row: int
    shard: int
    generation: int | None
    reason: Reason


@dataclass(slots=True)
class Expected:
    """What recovery must say: entries by row, what was dropped and why, rows to erase, to keep."""

    entries: dict[int, Found] = field(default_factory=dict)
    dropped: Counter[Reason] = field(default_factory=Counter)
    erased: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)

    def drop(self, row: int, reason: Reason) -> None:
        """Note an inode that does not count."""
        self.dropped[reason] += 1
        (self.held if reason is Reason.FORMAT else self.erased).add(row)


@dataclass(frozen=True)
class Reference:
    """The rules, for the shards whose claims say these generations, and no higher epoch."""

    geometry: Geometry
    volume: bytes
    generations: Mapping[int, int]
    claim_epoch: int

    def expected(self, media: Sequence[bytes | bytearray]) -> Expected:
        """Work out what members with these bytes hold."""
        result, good = Expected(), []
        refused: list[Refused] = []
        for shard in self.generations:
            for member, shape in enumerate(self.geometry.members):
                for slot in range(shape.slots_per_shard):
                    read = self._read(media[member], shard, member, slot)
                    if isinstance(read, Found):
                        good.append(read)
                    elif read is not None:
                        refused.append(read)
        in_force = dict(self.generations)
        for each in good:
            in_force[each.shard] = max(in_force[each.shard], each.generation)
        for no in refused:
            if no.generation is None or no.generation >= in_force[no.shard]:
                result.drop(no.row, no.reason)
        self._choose([g for g in good if g.generation == in_force[g.shard]], result)
        return result

    def _choose(self, current: list[Found], result: Expected) -> None:
        """Newest first: a digest is taken once, then blocks are."""
        newest: dict[bytes, Found] = {}
        for each in sorted(current, key=lambda found: found.order):  # of equals, the last one
            if each.digest in newest:
                result.drop(newest[each.digest].row, Reason.DUPLICATE)
            newest[each.digest] = each
        taken: set[tuple[int, int]] = set()
        position = {found.row: number for number, found in enumerate(current)}
        for each in sorted(newest.values(), key=lambda f: (f.order, position[f.row]), reverse=True):
            blocks = each.blocks()
            if taken.isdisjoint(blocks) and len(set(blocks)) == len(blocks):
                taken.update(blocks)
                result.entries[each.row] = each
            else:
                result.drop(each.row, Reason.OVERLAP)

    def _read(
        self, media: bytes | bytearray, shard: int, member: int, slot: int
    ) -> Found | Refused | None:
        """Read one slot; None if what is there is no inode of this volume."""
        size, row = self.geometry.inode_bytes, self.geometry.row(member, shard, slot)
        at = self.geometry.slot_offset(member, shard, slot)
        record = bytes(media[at : at + size])
        fields = _HEAD.unpack_from(record)
        checksum, magic, version, used, volume, *place, flags, where, generation = fields[:10]
        count, meta_bytes, epoch, counter, digest, length, reserved = fields[10:]
        if magic != b"FXIN" or volume != self.volume or not 128 <= used <= size:
            return None
        seed = int.from_bytes(self.volume[:8], "little")
        if xxhash.xxh3_64_intdigest(record[8:used], seed) != checksum:
            return None
        if version != 1 or flags or reserved:
            return Refused(row, shard, None, Reason.FORMAT)
        if used != 128 + 16 * count + meta_bytes:
            return Refused(row, shard, None, Reason.RECORD)
        if (*place, where) != (shard, member, slot):
            return Refused(row, shard, None, Reason.MISPLACED)
        packed = struct.iter_unpack("<QQ", record[128 : 128 + 16 * count])
        pieces = tuple((p >> 56, p & (1 << 40) - 1, p >> 40 & 0xFFFF, c) for p, c in packed)
        order = (epoch, counter)
        found = Found(row, shard, generation, order, digest, length, pieces)
        reason = self._flaw(found, record[used - meta_bytes : used])
        return found if reason is None else Refused(row, shard, generation, reason)

    def _flaw(self, inode: Found, meta: bytes) -> Reason | None:
        """Say what cannot be true of an inode of this place."""
        if inode.order[0] > self.claim_epoch + (1 << 32) or inode.order[1] > 1 << 62:
            return Reason.ORDER
        if inode.generation > self.generations[inode.shard] + 65_536:
            return Reason.GENERATION
        if not inode.pieces or not all(self._legal(piece, inode.shard) for piece in inode.pieces):
            return Reason.PIECES
        room = [blocks * self.geometry.block_bytes for _, _, blocks, _ in inode.pieces]
        if inode.length >= 1 << 32 or not sum(room[:-1]) < inode.length <= sum(room):
            return Reason.LENGTH
        try:
            prefix = ChunkMeta.unpack(meta).scope.prefix
        except RecordError:
            return Reason.METADATA
        return None if inode.digest[:16] == prefix else Reason.DIGEST

    def _legal(self, piece: Run, shard: int) -> bool:
        """Whether the allocator could have given this piece in this shard."""
        member, start, blocks, _ = piece
        if member >= len(self.geometry.members) or not blocks:
            return False
        frame = self.geometry.frame_blocks
        frames = self.geometry.members[member].frames_per_shard
        first_frame, last_frame = start // frame, (start + blocks - 1) // frame
        if first_frame < shard * frames or last_frame >= (shard + 1) * frames:
            return False
        if first_frame == last_frame:
            return True
        whole = start % frame == 0 and blocks % frame == 0
        return whole and blocks * self.geometry.block_bytes <= _PIECE_BYTES
