"""The claim block: who owns a shard, and which generation of its entries counts.

Each shard has two on every member, written alternately; the highest valid counter wins, so a
torn write leaves the previous one in force.

Version 1 was written once by each open. The owner of a version 2 block writes it again and again,
so that its standing still means something. Readers of version 1 read version 2 as well.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import xxhash

from fx100_lmcache.errors import RecordError
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES

MAGIC = b"FXCL"
VERSION = 2
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
    version : int
        From 2 on the owner renews the claim while it lives.
    """

    shard: int
    generation: int
    epoch: int
    counter: int
    holder: str
    version: int = VERSION

    @property
    def words(self) -> dict[str, str]:
        """The ``name=value`` pairs of the holder's text."""
        return words_of(self.holder)

    @property
    def nonce(self) -> str:
        """A random number of this open; empty when nobody owns the shard, and in version 1."""
        return self.words.get("nonce", "")

    @property
    def rank(self) -> tuple[int, str]:
        """Which of two owners gives way: the one with the lower rank."""
        return self.epoch, self.nonce

    @property
    def renewed(self) -> bool:
        """Whether a living owner renews it."""
        return self.version >= 2

    def pack(self, volume: bytes) -> bytes:
        """Encode for the volume with this UUID (16 bytes)."""
        holder = self.holder.encode()[:HOLDER_BYTES]
        body = _CLAIM.pack(
            0,
            MAGIC,
            self.version,
            len(holder),
            volume,
            self.shard,
            self.generation,
            self.epoch,
            self.counter,
        )[8:]
        body += holder
        return (struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + body).ljust(CLAIM_BYTES, b"\0")


def words_of(holder: str) -> dict[str, str]:
    """Return the ``name=value`` pairs of a holder's text."""
    return dict(re.findall(r"(\w+)=(\S+)", holder))


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
    (checksum, magic, version, holder_bytes, owner, at, generation, epoch, counter) = (
        _CLAIM.unpack_from(block)
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
    holder = _shown(block[_CLAIM.size : used])
    return ClaimBlock(shard, generation, epoch, counter, holder, version)


def _shown(text: bytes) -> str:
    """Decode a holder's text, which goes to logs and terminals: one line, no control characters."""
    decoded = text.decode(errors="replace")
    if decoded.isprintable():
        return decoded
    return "".join(each if each.isprintable() else "?" for each in decoded)
