"""Forged records: labels, claims and inodes with right checksums and wrong contents.

A record begins as an honest one, field by field, and some of its fields are then set to what is at
the edge of their type, at the edge of the volume, or what another record has. Then its checksum is
made right again. What comes out may also be honest: nothing here knows what is allowed.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from fx100_lmcache.errors import RecordError
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope, pack_fields, unpack_fields
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES, LABEL_BYTES
from fx100_lmcache.ondisk.inode import seed_of

_INODE = struct.Struct("<4sHH 16s HBBI IHH QQ 48s QQ")
_LABEL = struct.Struct("<8sHH 16sQ BBH IHIH")
_MEMBER = struct.Struct("<QII")
_CLAIM = struct.Struct("<4sHH 16s II QQ")
_MASKS = {bits: (1 << bits) - 1 for bits in (8, 16, 32, 40, 64)}


def edge(rng: random.Random, bits: int, near: Sequence[int] = ()) -> int:
    """Choose a number of so many bits: at the edge of a type, near one that means something."""
    kind = rng.random()
    if near and kind < 0.5:
        value = rng.choice(near) + rng.choice((-1, 0, 0, 1))
    elif kind < 0.9:
        value = (1 << rng.choice((0, 1, 7, 8, 15, 16, 31, 32, 40, 48, 62, 63, bits))) + rng.choice(
            (-2, -1, 0, 1)
        )
    else:
        value = rng.getrandbits(bits)
    return value & _MASKS[bits]


def sealed(body: bytearray, used: int, size: int, seed: int = 0) -> bytes:
    """Put the right checksum before a body whose record has so many bytes, if that can be."""
    end = used if 8 <= used <= size else size
    body = body.ljust(size - 8, b"\0")[: size - 8]
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body[: end - 8]), seed)) + bytes(body)


def flip_bits(rng: random.Random, body: bytearray, first: int) -> None:
    """Flip one to eight bits from a byte on."""
    for _ in range(rng.randrange(1, 9)):
        bit = rng.randrange(first * 8, len(body) * 8)
        body[bit // 8] ^= 1 << bit % 8


@dataclass
class InodeDraft:
    """An inode, field by field; ``used``, ``count`` and ``meta_bytes`` are what fits if None."""

    volume: bytes
    shard: int
    member: int
    slot: int
    generation: int
    epoch: int
    counter: int
    digest: bytes
    length: int
    pieces: list[tuple[int, int, int, int]]
    """Member, start block, blocks, checksum."""
    meta: bytes
    version: int = 1
    flags: int = 0
    reserved: int = 0
    used: int | None = None
    count: int | None = None
    meta_bytes: int | None = None
    flips: int = 0
    """Seed of bits to flip; 0 for none."""

    def pack(self, inode_bytes: int, volume: bytes) -> bytes:
        """Encode, with the checksum of a volume's inodes."""
        count = len(self.pieces) if self.count is None else self.count
        meta_bytes = len(self.meta) if self.meta_bytes is None else self.meta_bytes
        used = 128 + 16 * count + meta_bytes if self.used is None else self.used
        body = bytearray(
            _INODE.pack(
                b"FXIN",
                self.version,
                used & 0xFFFF,
                self.volume,
                self.shard,
                self.member,
                self.flags,
                self.slot,
                self.generation,
                count,
                meta_bytes & 0xFFFF,
                self.epoch,
                self.counter,
                self.digest,
                self.length,
                self.reserved,
            )
        )
        for member, start, blocks, checksum in self.pieces:
            body += struct.pack("<QQ", member << 56 | blocks << 40 | start, checksum)
        body += self.meta
        if self.flips:
            flip_bits(random.Random(self.flips), body, 0)
            used = struct.unpack_from("<H", body, 6)[0]
        return sealed(body, used, inode_bytes, seed_of(volume))


@dataclass
class LabelDraft:
    """A label, field by field."""

    volume: bytes
    created: int
    index: int
    count: int
    shards: int
    block_bytes: int
    frame_blocks: int
    inode_bytes: int
    align: int
    members: list[tuple[int, int, int]]
    """Size, slots, frames."""
    version: int = 1
    used: int | None = None

    def pack(self) -> bytes:
        """Encode as one block."""
        used = 60 + 16 * len(self.members) if self.used is None else self.used
        numbers = (self.index, self.count, self.shards, self.block_bytes, self.frame_blocks)
        body = bytearray(
            _LABEL.pack(
                b"FX100LBL",
                self.version,
                used,
                self.volume,
                self.created,
                *numbers,
                self.inode_bytes,
                self.align,
            )
        )
        for member in self.members:
            body += _MEMBER.pack(*member)
        return sealed(body, used, LABEL_BYTES)


@dataclass
class ClaimDraft:
    """A claim, field by field."""

    volume: bytes
    shard: int
    generation: int
    epoch: int
    counter: int
    holder: bytes = b""
    version: int = 1
    holder_bytes: int | None = None

    def pack(self) -> bytes:
        """Encode as one block."""
        size = len(self.holder) if self.holder_bytes is None else self.holder_bytes
        numbers = (self.shard, self.generation, self.epoch, self.counter)
        body = bytearray(_CLAIM.pack(b"FXCL", self.version, size, self.volume, *numbers))
        return sealed(body + self.holder, 56 + size, CLAIM_BYTES)


@dataclass
class Surroundings:
    """What forged records are put beside, so that numbers can be near ones that mean something."""

    shards: int
    members: int
    frame_blocks: int
    block_bytes: int
    shard_blocks: Sequence[int]
    slots: int
    generation: int
    epoch: int
    others: Sequence[InodeDraft] = field(default_factory=list)


class Forger:
    """Changes records at random.

    Parameters
    ----------
    rng : random.Random
        The same state gives the same forgeries.
    """

    def __init__(self, rng: random.Random, around: Surroundings) -> None:
        self._rng = rng
        self._around = around
        self._inode_changes: list[Callable[[InodeDraft], None]] = [
            *([self._piece] * 8),
            *([self._length, self._order, self._meta] * 3),
            *([self._generation, self._digest, self._place] * 2),
            *(self._count, self._format, self._flip),
        ]

    def inode(self, draft: InodeDraft, changes: int) -> None:
        """Change an inode in so many ways."""
        for _ in range(changes):
            self._rng.choice(self._inode_changes)(draft)

    def _piece(self, draft: InodeDraft) -> None:
        """Change one piece, or what pieces there are."""
        rng, pieces = self._rng, draft.pieces
        if not pieces:
            return
        at = rng.randrange(len(pieces))
        member, start, blocks, checksum = pieces[at]
        frame, ends = self._around.frame_blocks, self._around.shard_blocks
        kind = rng.randrange(9)
        if kind == 0:
            near = [start, *(end * n for end in ends for n in range(self._around.shards + 1))]
            start = edge(rng, 40, near)
        elif kind == 1:
            blocks = edge(rng, 16, [blocks, frame, 2 * frame, frame // 2, ends[0]])
        elif kind == 2:
            member = edge(rng, 8, [self._around.members, member])
        elif kind == 3:  # whole frames, but not where a frame begins; or over the end of one
            start = (start + rng.randrange(1, frame + 1)) & _MASKS[40]
        elif kind == 4 and self._around.others:
            other = rng.choice(self._around.others)
            member, start, blocks, checksum = rng.choice(other.pieces)
        elif kind == 5:
            pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(pieces))
            return
        elif kind == 6:
            del pieces[at]
            return
        elif kind == 7:
            member, start, blocks = (0, 0, 0) if rng.random() < 0.5 else (member, start, 0)
        else:
            checksum = edge(rng, 64, [checksum])
        pieces[at] = (member, start, blocks, checksum)

    def _length(self, draft: InodeDraft) -> None:
        blocks = sum(piece[2] for piece in draft.pieces)
        unit = self._around.block_bytes
        last = draft.pieces[-1][2] if draft.pieces else 0
        near = [0, draft.length, blocks * unit, (blocks - last) * unit, 1 << 32, (1 << 32) + 5000]
        draft.length = edge(self._rng, 64, near)
        if self._rng.random() < 0.3:  # large, and yet all pieces say so
            draft.pieces = [(m, s, 65_535, c) for m, s, _, c in draft.pieces] * 3
            draft.length = sum(piece[2] for piece in draft.pieces) * unit - 7 & _MASKS[64]

    def _order(self, draft: InodeDraft) -> None:
        around = self._around
        limits = [
            around.epoch,
            around.epoch + (1 << 32),
            draft.epoch,
            1 << 62,
            (1 << 62) + (1 << 32),
        ]
        if self._rng.random() < 0.7:
            draft.epoch = edge(self._rng, 64, limits)
        else:
            draft.counter = edge(self._rng, 64, [draft.counter, 1 << 62])

    def _generation(self, draft: InodeDraft) -> None:
        now = self._around.generation
        draft.generation = edge(self._rng, 32, [now, now + 1, now + (1 << 16)])

    def _digest(self, draft: InodeDraft) -> None:
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0 and self._around.others:
            draft.digest = rng.choice(self._around.others).digest
        elif kind == 1:
            draft.digest = rng.choice((bytes(48), b"\xff" * 48, rng.randbytes(48)))
        else:
            draft.digest = draft.digest[:16] + rng.randbytes(32)

    def _place(self, draft: InodeDraft) -> None:
        rng, around = self._rng, self._around
        kind = rng.randrange(4)
        if kind == 0:
            draft.shard = edge(rng, 16, [draft.shard, around.shards])
        elif kind == 1:
            draft.member = edge(rng, 8, [draft.member, around.members])
        elif kind == 2:
            draft.slot = edge(rng, 32, [draft.slot, around.slots])
        else:
            draft.volume = rng.randbytes(16)

    def _count(self, draft: InodeDraft) -> None:
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0:
            draft.count = edge(rng, 16, [len(draft.pieces), 0])
        elif kind == 1:
            draft.meta_bytes = edge(rng, 16, [len(draft.meta), 0])
        else:
            used = 128 + 16 * len(draft.pieces) + len(draft.meta)
            draft.used = edge(rng, 16, [used, 128, 0])

    def _format(self, draft: InodeDraft) -> None:
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0:
            draft.version = edge(rng, 16, [1, 2])
        elif kind == 1:
            draft.flags = edge(rng, 8)
        else:
            draft.reserved = edge(rng, 64)

    def _flip(self, draft: InodeDraft) -> None:
        draft.flips = self._rng.randrange(1, 1 << 32)

    def _meta(self, draft: InodeDraft) -> None:
        """Change metadata; some of what comes out can be read."""
        rng = self._rng
        fields = _fields_of(draft.meta)
        kind = rng.randrange(8)
        if kind == 0:
            draft.meta = draft.meta[: rng.randrange(len(draft.meta) + 1)]
        elif kind == 1:
            draft.meta = rng.randbytes(rng.randrange(200))
        elif kind == 2 and fields:
            del fields[rng.randrange(len(fields))]
            draft.meta = pack_fields(fields)
        elif kind == 3 and fields:
            tag, _ = fields[at := rng.randrange(len(fields))]
            odd = (b"\xff\xfe", b"", b"\x00" * 7, b"\x7f" * 8, b"\xed\xa0\x80", rng.randbytes(9))
            fields[at] = (tag, rng.choice(odd))
            draft.meta = pack_fields(fields)
        elif kind == 4:  # tags that a later version may add; some twice
            draft.meta += pack_fields([(rng.randrange(11, 32), rng.randbytes(rng.randrange(20)))])
        elif kind == 5 and fields:
            rng.shuffle(fields)
            draft.meta = pack_fields(fields)
        elif kind == 6:
            body = bytearray(draft.meta or b"\0")
            flip_bits(rng, body, 0)
            draft.meta = bytes(body)
        else:
            meta = _odd_meta(rng)
            draft.meta, draft.digest = meta.pack(), meta.scope.digest(draft.digest[16:])

    def label(self, draft: LabelDraft, changes: int) -> None:
        """Change a label in so many ways."""
        rng = self._rng
        widths = {
            **{"created": 64, "index": 8, "count": 8, "shards": 16, "block_bytes": 32},
            **{"frame_blocks": 16, "inode_bytes": 32, "align": 16, "version": 16},
        }
        for _ in range(changes):
            name = rng.choice((*widths, "members", "members", "members", "used", "missing"))
            if name in widths:
                value = getattr(draft, name)
                near = [0, value, 2 * value, value // 2]
                setattr(draft, name, edge(rng, widths[name], near))
            elif name == "used":
                draft.used = edge(rng, 16, [60 + 16 * len(draft.members)])
            elif name == "missing":
                draft.members = rng.choice((draft.members[1:], draft.members * 2, []))
                if rng.random() < 0.7:
                    draft.count = len(draft.members)
            elif draft.members:
                at = rng.randrange(len(draft.members))
                row, column = list(draft.members[at]), rng.randrange(3)
                near = [0, row[column], 2 * row[column]]
                row[column] = edge(rng, (64, 32, 32)[column], near)
                draft.members[at] = (row[0], row[1], row[2])

    def claim(self, draft: ClaimDraft, changes: int) -> None:
        """Change a claim in so many ways."""
        rng = self._rng
        widths = {"shard": 32, "generation": 32, "epoch": 64, "counter": 64, "version": 16}
        holders = (b"", b"host=elsewhere pid=7", b"\xff\xfe\x00", b"\x1b[2J\n", rng.randbytes(256))
        for _ in range(changes):
            name = rng.choice((*widths, "holder", "holder_bytes", "volume"))
            if name == "holder":
                draft.holder = rng.choice(holders)
            elif name == "holder_bytes":
                draft.holder_bytes = edge(rng, 16, [len(draft.holder), 256])
            elif name == "volume":
                draft.volume = rng.randbytes(16)
            else:
                near = [0, getattr(draft, name), 1 << 32, 1 << 62]
                setattr(draft, name, edge(rng, widths[name], near))


def _fields_of(meta: bytes) -> list[tuple[int, bytes]]:
    try:
        return list(unpack_fields(meta))
    except RecordError:  # changed before
        return []


def _odd_meta(rng: random.Random) -> ChunkMeta:
    """Make metadata that can be read, and that no adapter would write."""
    texts = ("", "mp", "in-process", "a@b", "a/b", "\0", "\ud800", "x" * 200)
    far = (-(1 << 63), (1 << 63) - 1, -1, 0, 1)
    tags = (("hash_bytes", rng.choice(("abc", "-1", "40", "\u0663", "9" * 50))), ("", "a=b =c"))
    scope = Scope(
        rng.choice(texts),
        rng.choice(texts),
        rng.choice(far),
        group=rng.choice(far),
        salt=rng.choice(texts),
        world_size=rng.choice(far),
        tags=tags[: rng.randrange(3)],
    )
    shape = tuple(rng.choice(far) for _ in range(rng.randrange(5)))
    return ChunkMeta(scope, Layout(rng.choice(texts), ((rng.choice(texts), shape),)))
