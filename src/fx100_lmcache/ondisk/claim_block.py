"""The claim block: who owns a shard, and which generation of its entries counts.

Each shard has two on every member, written alternately; the highest valid counter wins, so a
torn write leaves the previous one in force.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from fx100_lmcache.errors import RecordError
from fx100_lmcache.geometry import CLAIM_BYTES

MAGIC = b"FXCL"
_CLAIM = struct.Struct("<Q 4sHH 16s II QQ")
HOLDER_BYTES = 256
MAX_GENERATION = (1 << 32) - 1
MAX_EPOCH = 1 << 62  # seconds, and opens: no clock and no number of restarts comes near
MAX_COUNTER = 1 << 62
_COUNTERS = 1 << 32  # at an open the counter starts below this, so it never comes to its limit


@dataclass(frozen=True)
class ClaimBlock:
    """Contents of a claim block.

    Attributes
    ----------
    shard : int
        The shard that is claimed.
    generation : int
        Raised by clear: inodes of another generation do not count.
    epoch : int
        Raised by every open: ``max(seen + 1, unix seconds)``. Orders writes across openers.
    counter : int
        Raised by every write of a claim block; the highest valid one is in force.
    holder : str
        Host, process and time of the owner, for the message that a second opener sees; empty
        after a clean close.
    """

    shard: int
    generation: int
    epoch: int
    counter: int
    holder: str

    def pack(self, volume: bytes) -> bytes:
        """Encode for the volume with this UUID (16 bytes)."""
        holder = self.holder.encode()[:HOLDER_BYTES]
        body = _CLAIM.pack(
            0,
            MAGIC,
            1,
            len(holder),
            volume,
            self.shard,
            self.generation,
            self.epoch,
            self.counter,
        )[8:]
        body += holder
        return (struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + body).ljust(CLAIM_BYTES, b"\0")


def next_epoch(seen: int, unix_s: float) -> int:
    """Return the epoch of the next owner, which sees this one."""
    return min(max(seen + 1, int(unix_s)), MAX_EPOCH)


def next_counter(seen: int) -> int:
    """Return the counter of the next owner: the other of the two blocks is written.

    It may be lower than the one before, since the epoch is higher.
    """
    return (seen + 1) % _COUNTERS


def unpack_claim(block: bytes, volume: bytes, shard: int) -> ClaimBlock:
    """Decode a claim block of this volume and shard.

    Raises
    ------
    RecordError
        If it is empty, damaged, of another volume or shard, or says what no owner writes.
    """
    (checksum, magic, _, holder_bytes, owner, at, generation, epoch, counter) = _CLAIM.unpack_from(
        block
    )
    used = _CLAIM.size + holder_bytes
    if magic != MAGIC or holder_bytes > HOLDER_BYTES:
        raise RecordError("no claim")
    if xxhash.xxh3_64_intdigest(block[8:used]) != checksum:
        raise RecordError("claim damaged")
    if owner != volume or at != shard:
        raise RecordError("claim of another volume or shard")
    if epoch > MAX_EPOCH or counter > MAX_COUNTER:
        raise RecordError("claim damaged: impossible epoch or counter")
    return ClaimBlock(shard, generation, epoch, counter, _shown(block[_CLAIM.size : used]))


def _shown(text: bytes) -> str:
    """Decode a holder's text, which goes to logs and terminals: one line, no control characters."""
    decoded = text.decode(errors="replace")
    if decoded.isprintable():
        return decoded
    return "".join(each if each.isprintable() else "?" for each in decoded)
