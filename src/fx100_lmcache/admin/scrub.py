"""Read every piece of every entry back and compare its checksum. No claim is needed.

A running server may evict an entry and reuse its blocks while we read, so a piece that does not
match is looked at again: it is bad only if its inode is still the same.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import xxhash

from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.errors import VolumeError
from fx100_lmcache.ondisk.geometry import round_up
from fx100_lmcache.ondisk.inode import InodePlace, parse_table
from fx100_lmcache.ondisk.location import blocks_of, unpack_location
from fx100_lmcache.volume.claim import newest_claim, read_claims
from fx100_lmcache.volume.recovery import Recovered
from fx100_lmcache.volume.volume import Volume, read_at

BUFFER_BYTES = 128 * 1024 * 1024
_CHECK = "check the device and its paths: fx100 nvme check CONFIG"
MIN_IN_FLIGHT, MAX_IN_FLIGHT = 4, 256


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece to read; ``entry`` is its row in what recovery found."""

    entry: int
    number: int
    member: int
    offset: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class BadPiece:
    """A piece that cannot be had back.

    Attributes
    ----------
    digest : str
        Of its entry, in hexadecimal.
    member : str
        Path of the member.
    offset, length : int
        Where on the member, in bytes.
    reason : str
        In words.
    """

    digest: str
    member: str
    offset: int
    length: int
    reason: str


@dataclass(slots=True)
class ScrubResult:
    """What reading everything back showed.

    Attributes
    ----------
    entries, pieces, read_bytes : int
        How much was read.
    gone : int
        Pieces of entries that were evicted while we read; they say nothing.
    bad : list of BadPiece
        In the order found.
    """

    entries: int = 0
    pieces: int = 0
    read_bytes: int = 0
    gone: int = 0
    bad: list[BadPiece] = field(default_factory=list)


@dataclass(slots=True)
class _Read:
    piece: Piece
    buffer: IoBuffer
    status: Status
    error: OSError | None


class Scrubber:
    """Reads the pieces of a volume with several in flight, in bounded memory.

    Parameters
    ----------
    engine : LaneEngine
        Of the volume's members.
    found : Recovered
        What to read.
    deadline_s : float
        After which a read in the kernel counts as lost.
    """

    def __init__(
        self, volume: Volume, engine: LaneEngine, found: Recovered, *, deadline_s: float
    ) -> None:
        self._volume = volume
        self._engine = engine
        self._found = found
        self._deadline_s = deadline_s
        self._finished: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self.total_bytes = int(found.length.sum())

    def run(self, progress: Callable[[int], None]) -> ScrubResult:
        """Read everything; ``progress`` is told the bytes of each piece.

        Raises
        ------
        VolumeError
            If a member stops answering.
        """
        result = ScrubResult(entries=len(self._found))
        pieces = self._pieces()
        free = self._buffers()
        in_flight = 0
        while True:
            while free and (piece := next(pieces, None)) is not None:
                self._submit(piece, free.pop())
                in_flight += 1
            if not in_flight:
                return result
            read = self._finished.get()
            in_flight -= 1
            self._judge(read, result)
            progress(read.piece.length)
            if read.status is not Status.TIMED_OUT:  # else the kernel may still write there
                free.append(read.buffer)
            elif not free and not in_flight:
                raise VolumeError(f"{self._name(read.piece)} does not answer", remedy=_CHECK)

    def _pieces(self) -> Iterator[Piece]:
        found, geometry = self._found, self._volume.geometry
        for entry in range(len(found)):
            left = int(found.length[entry])
            for number in range(int(found.piece_counts[entry])):
                member, block, blocks = unpack_location(int(found.locations[entry, number]))
                length = min(blocks * geometry.block_bytes, left)
                left -= length
                offset = geometry.block_offset(member, block)
                checksum = int(found.checksums[entry, number])
                yield Piece(entry, number, member, offset, length, checksum)

    def _buffers(self) -> list[IoBuffer]:
        """Make as many buffers as the longest piece allows."""
        most = int(blocks_of(self._found.locations).max(initial=0))
        longest = most * self._volume.geometry.block_bytes
        if not longest:
            return []
        size = round_up(longest, 4096)
        count = min(max(BUFFER_BYTES // size, MIN_IN_FLIGHT), MAX_IN_FLIGHT)
        return [zero_buffer(size) for _ in range(count)]

    def _submit(self, piece: Piece, buffer: IoBuffer) -> None:
        if self._engine.down_mask() >> piece.member & 1:
            self._revive(piece)

        def done(job: Job) -> None:
            [moved] = job.transfers
            self._finished.put(_Read(piece, buffer, moved.status, moved.error))

        transfer = Transfer(piece.member, piece.offset, buffer, 0, piece.length, piece.checksum)
        deadline = self._engine.now() + self._deadline_s
        self._engine.submit([Job(False, [transfer], deadline, done)])

    def _revive(self, piece: Piece) -> None:
        """Go on with a member that has bad places; give up on one that is gone."""
        self._engine.probe(piece.member)
        if self._engine.down_mask() >> piece.member & 1:
            state = self._engine.states()[piece.member]
            raise VolumeError(
                f"{state.name} does not answer any more ({state.last_error})", remedy=_CHECK
            )

    def _judge(self, read: _Read, result: ScrubResult) -> None:
        piece = read.piece
        result.pieces += 1
        result.read_bytes += piece.length
        if read.status is Status.OK:
            return
        if read.status is Status.TIMED_OUT:
            reason = f"not read within {self._deadline_s:g} s"
        elif not self._is_current(piece):
            result.gone += 1
            return
        elif self._matches_now(piece):
            return
        elif not self._is_current(piece):  # evicted between the two looks
            result.gone += 1
            return
        elif read.status is Status.MISMATCH:
            reason = "checksum does not match"
        else:
            reason = f"cannot be read: {read.error}"
        digest = self._found.words[piece.entry].tobytes().hex()
        result.bad.append(BadPiece(digest, self._name(piece), piece.offset, piece.length, reason))

    def _name(self, piece: Piece) -> str:
        return self._engine.member(piece.member).name

    def _matches_now(self, piece: Piece) -> bool:
        """Read a piece once more, by ourselves."""
        size = round_up(piece.length, 4096)
        try:
            data = read_at(self._engine.member(piece.member), piece.offset, size)
        except OSError:
            return False
        return xxhash.xxh3_64_intdigest(data[: piece.length]) == piece.checksum

    def _is_current(self, piece: Piece) -> bool:
        """Whether the inode of a piece still stands on the media and still counts."""
        found, geometry, volume = self._found, self._volume.geometry, self._volume.uuid
        home, shard, slot = geometry.place(int(found.rows[piece.entry]))
        members = self._volume.members
        try:
            data = read_at(
                members[home], geometry.slot_offset(home, shard, slot), geometry.inode_bytes
            )
            claim = newest_claim(read_claims(members, geometry, shard), volume, shard)
        except OSError:
            return True  # nothing says that it is gone
        place = InodePlace(volume, shard, home, slot)
        now = parse_table(memoryview(data), place, inode_bytes=geometry.inode_bytes)
        generation = claim.generation if claim else found.generations[shard]
        return (
            len(now.slots) == 1
            and now.heads["digest"][0].tobytes() == found.words[piece.entry].tobytes()
            and int(now.heads["generation"][0]) == found.generations[shard] >= generation
            and int(now.locations[0, piece.number])
            == int(found.locations[piece.entry, piece.number])
            and int(now.checksums[0, piece.number]) == piece.checksum
        )
