"""Small volumes with honest entries, for forged records to be put beside."""

from __future__ import annotations

import copy
import random
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from fx100_lmcache.ondisk.geometry import Geometry, plan_geometry
from fx100_lmcache.ondisk.location import unpack_location
from fx100_lmcache.testing.forge import ClaimDraft, InodeDraft, LabelDraft, Surroundings
from fx100_lmcache.testing.harness import META, SCOPE, Rig, digest_of, value_of
from fx100_lmcache.testing.memory import memory_members
from fx100_lmcache.volume.format import format_volume

VOLUME = uuid.UUID(int=0xF022)
LENGTHS = (300, 4096, 9000, 16 * 1024, 40_000)
WALL_S = 1_000_000


@dataclass(frozen=True)
class World:
    """A closed volume.

    Attributes
    ----------
    media : tuple of bytes
        Of each member.
    honest : dict of bytes to bytes
        What was put, by digest.
    drafts : tuple of InodeDraft
        Inodes of the honest entries.
    """

    geometry: Geometry
    media: tuple[bytes, ...]
    honest: dict[bytes, bytes]
    drafts: tuple[InodeDraft, ...]
    around: Surroundings

    def label(self, member: int) -> LabelDraft:
        """Take a member's label apart."""
        g = self.geometry
        shapes = [(m.size_bytes, m.slots_per_shard, m.frames_per_shard) for m in g.members]
        return LabelDraft(
            VOLUME.bytes,
            WALL_S,
            member,
            len(shapes),
            g.shards,
            g.block_bytes,
            g.frame_blocks,
            g.inode_bytes,
            g.io_align_bytes // 512,
            shapes,
        )

    def claim(self, shard: int) -> ClaimDraft:
        """Make a claim that was given back."""
        around = self.around
        return ClaimDraft(VOLUME.bytes, shard, around.generation, around.epoch, 2)

    def fresh(self, rng: random.Random, media: Sequence[bytearray]) -> InodeDraft:
        """Make an honest inode of a new object whose data lie anywhere, also over others'."""
        g = self.geometry
        shard, frame = rng.randrange(g.shards), g.frame_blocks
        pieces = []
        for last in (False,) * rng.randrange(3) + (True,):
            member = rng.randrange(len(g.members))
            start = rng.choice(g.shard_blocks(member, shard)[::frame])
            blocks = rng.randrange(1, frame + 1) if last else frame
            if last:
                start += rng.randrange(frame - blocks + 1)
            pieces.append((member, start, blocks))
        length = sum(piece[2] for piece in pieces) * g.block_bytes - rng.randrange(g.block_bytes)
        home = pieces[0][0]
        return InodeDraft(
            VOLUME.bytes,
            shard,
            home,
            rng.randrange(g.members[home].slots_per_shard),
            self.around.generation,
            self.around.epoch + rng.randrange(3),
            rng.randrange(1, 100),
            SCOPE.digest(rng.randbytes(8)),
            length,
            self._written(pieces, length, rng, media),
            META,
        )

    def _written(
        self,
        pieces: Sequence[tuple[int, int, int]],
        length: int,
        rng: random.Random,
        media: Sequence[bytearray],
    ) -> list[tuple[int, int, int, int]]:
        """Write data where pieces lie, and add their checksums."""
        done = []
        for member, start, blocks in pieces:
            data = rng.randbytes(min(blocks * self.geometry.block_bytes, length))
            length -= len(data)
            at = self.geometry.block_offset(member, start)
            media[member][at : at + len(data)] = data
            done.append((member, start, blocks, xxhash.xxh3_64_intdigest(data)))
        return done

    def copy_of(self, rng: random.Random) -> InodeDraft:
        """Copy an honest inode, to be changed; it is put where it was, or elsewhere."""
        draft = copy.deepcopy(rng.choice(self.drafts))
        if rng.random() < 0.5:
            draft.slot = rng.randrange(self.around.slots)
        if rng.random() < 0.5:
            draft.epoch += 1
        return draft


def worlds() -> list[World]:
    """Make a few volumes: members, shards, frames and inodes of several sizes."""
    return [
        _world(1, 1, object_bytes=16 * 1024, inode_bytes=512),
        _world(2, 1, object_bytes=16 * 1024, inode_bytes=512),
        _world(2, 2, object_bytes=4096, inode_bytes=1024),
        _world(3, 2, object_bytes=24 * 1024, inode_bytes=512),
    ]


def _world(count: int, shards: int, *, object_bytes: int, inode_bytes: int) -> World:
    members = memory_members(count, 192 * 1024)
    geometry = plan_geometry(
        [member.size_bytes for member in members],
        object_bytes=object_bytes,
        shards=shards,
        inode_bytes=inode_bytes,
        bytes_per_inode=12 * 1024,
        io_align_bytes=512,
        block_bytes=4096,
    )
    format_volume(members, geometry, unix_s=WALL_S, volume=VOLUME)
    rig = Rig(members, wall_s=WALL_S)
    rig.open()
    rig.put("cleared", value_of("cleared", 0, 5000))
    rig.store.clear()  # dead inodes are part of every volume
    honest = {}
    for number, length in enumerate(LENGTHS):
        name = f"honest{number}"
        honest[digest_of(name)] = value_of(name, 0, length)
        assert rig.put(name, honest[digest_of(name)]).stored
    rig.store.close(0.1)
    media = tuple(bytes(member.media) for member in members)
    drafts = _drafts(geometry, media, set(honest))
    around = Surroundings(
        shards,
        count,
        geometry.frame_blocks,
        geometry.block_bytes,
        [len(geometry.shard_blocks(member, 0)) for member in range(count)],
        min(member.slots_per_shard for member in geometry.members),
        drafts[0].generation,
        drafts[0].epoch,
        drafts,
    )
    return World(geometry, media, honest, drafts, around)


def _drafts(
    geometry: Geometry, media: Sequence[bytes], digests: set[bytes]
) -> tuple[InodeDraft, ...]:
    """Take the inodes of these objects apart."""
    head = struct.Struct("<Q 4sHH 16s HBBI IHH QQ 48s QQ")
    found = []
    for row in range(geometry.rows):
        member, shard, slot = geometry.place(row)
        at = geometry.slot_offset(member, shard, slot)
        record = media[member][at : at + geometry.inode_bytes]
        fields = head.unpack_from(record)
        generation, count, meta_bytes, epoch, counter, digest, length = fields[9:16]
        if digest in digests:
            packed = struct.iter_unpack("<QQ", record[128 : 128 + 16 * count])
            found.append(
                InodeDraft(
                    VOLUME.bytes,
                    shard,
                    member,
                    slot,
                    generation,
                    epoch,
                    counter,
                    digest,
                    length,
                    [(*unpack_location(place), checksum) for place, checksum in packed],
                    record[fields[3] - meta_bytes : fields[3]],
                )
            )
    return tuple(found)
