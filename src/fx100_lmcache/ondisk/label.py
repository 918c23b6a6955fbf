"""The label: what a member says about itself. Immutable after format, kept twice."""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass

import xxhash

from fx100_lmcache.errors import RecordError, UnsupportedVersionError
from fx100_lmcache.ondisk.geometry import LABEL_BYTES, MAX_MEMBERS, Geometry, MemberShape

MAGIC = b"FX100LBL"
VERSION = 1
# checksum; magic, version, used; volume, created; index, count, shards; block, frame, inode, align
_HEAD = struct.Struct("<Q 8sHH 16sQ BBH IHIH")
_MEMBER = struct.Struct("<QII")
_LAST_UNIX_S = 253_402_300_799  # 9999-12-31: no calendar of Python's goes further


@dataclass(frozen=True)
class Label:
    """One member's label.

    Attributes
    ----------
    volume : uuid.UUID
        Made at format time; seeds every checksum, so that nothing of an older volume is valid.
    index : int
        This member's place in the stripe order.
    created_unix_s : int
        When the volume was formatted.
    geometry : Geometry
        The whole volume's, the sizes of the other members included.
    """

    volume: uuid.UUID
    index: int
    created_unix_s: int
    geometry: Geometry

    def pack(self) -> bytes:
        """Encode as one 4,096-byte block."""
        g = self.geometry
        members = b"".join(
            _MEMBER.pack(m.size_bytes, m.slots_per_shard, m.frames_per_shard) for m in g.members
        )
        used = _HEAD.size + len(members)
        head = _HEAD.pack(
            0,
            MAGIC,
            VERSION,
            used,
            self.volume.bytes,
            self.created_unix_s,
            self.index,
            len(g.members),
            g.shards,
            g.block_bytes,
            g.frame_blocks,
            g.inode_bytes,
            g.io_align_bytes // 512,
        )
        body = head[8:] + members
        checksum = xxhash.xxh3_64_intdigest(body)
        return (struct.pack("<Q", checksum) + body).ljust(LABEL_BYTES, b"\0")


def is_label(block: bytes) -> bool:
    """Whether a block claims to be a label of ours, valid or not."""
    return block[8:16] == MAGIC


def unpack_label(block: bytes) -> Label:
    """Decode a label block.

    Raises
    ------
    RecordError
        If it is not a label, is damaged, or says what can be true of no volume.
    UnsupportedVersionError
        If it is a valid label of a newer format.
    """
    if len(block) < LABEL_BYTES or not is_label(block):
        raise RecordError("no label")
    (checksum, _, version, used, volume, created, index, count, shards, *numbers) = (
        _HEAD.unpack_from(block)
    )
    if not _HEAD.size <= used <= LABEL_BYTES:
        raise RecordError("label damaged: impossible length")
    if xxhash.xxh3_64_intdigest(block[8:used]) != checksum:
        raise RecordError("label damaged: checksum mismatch")
    if version < VERSION:
        raise RecordError("label damaged: impossible version")
    if version > VERSION:
        raise UnsupportedVersionError(
            f"label has format version {version}; this package reads version {VERSION}"
        )
    block_bytes, frame_blocks, inode_bytes, align_units = numbers
    sane = (
        1 <= count <= MAX_MEMBERS
        and index < count
        and used == _HEAD.size + count * _MEMBER.size
        and created <= _LAST_UNIX_S
    )
    if not sane:
        raise RecordError("label damaged: impossible counts")
    members = tuple(
        MemberShape(*_MEMBER.unpack_from(block, _HEAD.size + i * _MEMBER.size))
        for i in range(count)
    )
    geometry = Geometry(block_bytes, frame_blocks, inode_bytes, align_units * 512, shards, members)
    if geometry.flaw:
        raise RecordError(f"label damaged: {geometry.flaw}")
    return Label(uuid.UUID(bytes=volume), index, created, geometry)
