"""Space of the opened shards: allocate an object, free it. Pure.

An object's inode lives on the member of its first piece, in the same shard as all its pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fx100_lmcache.ondisk.geometry import MAX_MEMBERS, Geometry, stripe
from fx100_lmcache.ondisk.location import blocks_of, members_of, starts_of, unpack_location
from fx100_lmcache.space.allocator import FrameAllocator, SlotAllocator

_STRETCH = 16_384  # recovered entries marked at once: their arrays stay in the CPU's cache
_REMEMBERED = 64  # requests that found no room, for each shard

Request = tuple[int, int, int]  # blocks, members not to use, pieces


@dataclass(frozen=True, slots=True)
class Extent:
    """What an object takes: a catalog row (its inode slot) and runs of blocks.

    Attributes
    ----------
    runs : tuple of (member, block, blocks)
        In the order of the object's bytes.
    """

    row: int
    runs: tuple[tuple[int, int, int], ...]

    @property
    def blocks(self) -> int:
        """Blocks in all runs."""
        return sum(blocks for _, _, blocks in self.runs)


class Space:
    """Free space of some shards of a volume.

    Parameters
    ----------
    width : int
        Members that one object is spread over; 0 means all.

    Attributes
    ----------
    withheld_blocks : int
        Blocks that :meth:`withhold` took.
    slots : int
        Inode slots that are not withheld.
    """

    def __init__(self, geometry: Geometry, shards: Sequence[int], width: int = 0) -> None:
        self._geometry = geometry
        self._width = min(width or MAX_MEMBERS, len(geometry.members))
        self._turn = 0
        self._members = members = range(len(geometry.members))
        self._frames = {
            (shard, m): FrameAllocator(geometry.shard_blocks(m, shard), geometry.frame_blocks)
            for shard in shards
            for m in members
        }
        self._slots = {
            (shard, m): SlotAllocator(geometry.members[m].slots_per_shard)
            for shard in shards
            for m in members
        }
        self._shards = list(shards)
        self._piece_frames = geometry.piece_frames
        self.total_blocks = geometry.total_blocks(self._shards)
        # sums of what the allocators say, so that nothing below has to ask all of them
        self._free_in = {s: sum(self._frames[s, m].free_blocks for m in members) for s in shards}
        self._free_on = [sum(self._frames[s, m].free_blocks for s in shards) for m in members]
        self._slots_on = [sum(self._slots[s, m].free_slots for s in shards) for m in members]
        self._hopeless: dict[int, set[Request]] = {shard: set() for shard in shards}
        self._tenants: dict[tuple[int, int], list[int]] = {}  # rows in each shared frame
        self._count_withheld()

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has."""
        return sum(self._free_on)

    def free_blocks_up(self, down_mask: int) -> int:
        """Blocks that nobody has on the members that can be used."""
        return sum(free for m, free in enumerate(self._free_on) if not down_mask >> m & 1)

    def free_slots_up(self, down_mask: int) -> int:
        """Inode slots that nobody has on the members that can be used."""
        return sum(free for m, free in enumerate(self._slots_on) if not down_mask >> m & 1)

    @property
    def all_slots(self) -> int:
        """Inode slots of the opened shards."""
        shapes = self._geometry.members
        return len(self._shards) * sum(shape.slots_per_shard for shape in shapes)

    def note_written(self, extent: Extent) -> None:
        """Note that an object's blocks were written, before it is freed."""
        shard = self._geometry.place(extent.row)[1]
        for member, start, blocks in extent.runs:
            self._frames[shard, member].note_written(start, blocks)

    def withhold(self, member: int) -> None:
        """Take all free space of a member that is not known to be written, until released."""
        for shard in self._shards:
            self._frames[shard, member].withhold()
            self._slots[shard, member].withhold()
        self._count_again(member)

    def release(self, member: int) -> None:
        """Give back what is withheld of a member."""
        for shard in self._shards:
            self._frames[shard, member].release()
            self._slots[shard, member].release()
            self._hopeless[shard].clear()
        self._count_again(member)

    def _count_again(self, member: int) -> None:
        for s in self._shards:
            self._free_in[s] = sum(self._frames[s, m].free_blocks for m in self._members)
        self._free_on[member] = sum(self._frames[s, member].free_blocks for s in self._shards)
        self._slots_on[member] = sum(self._slots[s, member].free_slots for s in self._shards)
        self._count_withheld()

    def _count_withheld(self) -> None:
        self.withheld_blocks = sum(f.withheld_blocks for f in self._frames.values())
        self.slots = sum(s.slots for s in self._slots.values())

    def withheld_block(self, member: int, wanted: int) -> int | None:
        """Return a withheld block of a member, if possible the one wanted; None without any."""
        found = [self._frames[shard, member].withheld_block(wanted) for shard in self._shards]
        return wanted if wanted in found else next((b for b in found if b is not None), None)

    def allocate(self, blocks: int, down_mask: int, max_pieces: int) -> Extent | None:
        """Take space for an object; None if there is none in so few pieces.

        The shard with most room comes first. One that had none for the same request is not asked
        again before something in it was freed: a full volume answers at once.

        Parameters
        ----------
        down_mask : int
            Members not to use.
        max_pieces : int
            How many pieces the inode has room for.
        """
        request = (blocks, down_mask, max_pieces)
        first = max(self._shards, key=self._free_in.__getitem__)
        extent = self._allocate_in(first, request)
        if extent is None and len(self._shards) > 1:
            others = [s for s in self._shards if request not in self._hopeless[s]]
            for shard in sorted(others, key=self._free_in.__getitem__, reverse=True):
                extent = self._allocate_in(shard, request)
                if extent is not None:
                    break
        return extent

    def _allocate_in(self, shard: int, request: Request) -> Extent | None:
        hopeless = self._hopeless[shard]
        if request in hopeless:
            return None
        blocks, down_mask, max_pieces = request
        for members in self._choices(shard, down_mask):
            if sum(self._frames[shard, m].free_blocks for m in members) < blocks:
                continue
            runs = self._take_runs(shard, blocks, members) or []
            if 0 < len(runs) <= max_pieces:
                home = runs[0][0]
                slot = self._slots[shard, home].allocate()
                if slot is not None:
                    self._turn += 1
                    self._slots_on[home] -= 1
                    extent = Extent(self._geometry.row(home, shard, slot), tuple(runs))
                    self._move_in(extent)
                    return extent
            self._give_back(shard, runs)
        if len(hopeless) >= _REMEMBERED:
            hopeless.clear()
        hopeless.add(request)
        return None

    def could_hold(self, blocks: int, max_pieces: int) -> bool:
        """Whether an object would fit if the shards were empty."""
        geometry = self._geometry
        sizes = sorted((len(geometry.shard_blocks(m, 0)) for m in self._members), reverse=True)
        wanted = stripe(blocks, geometry.frame_blocks, range(self._width), self._piece_frames)
        return blocks <= sum(sizes[: self._width]) and sum(1 for _ in wanted) <= max_pieces

    def roomiest(self, down_mask: int, limit: int) -> list[tuple[int, range]]:
        """Choose shared frames to empty for the next object: member and blocks of each."""
        shard = max(self._shards, key=self._free_in.__getitem__)
        members = next(self._choices(shard, down_mask), [])
        found = []
        each = [self._frames[shard, member].roomiest() for member in members]
        for frames in itertools.islice(itertools.zip_longest(*each), limit):
            found += [(m, f) for m, f in zip(members, frames, strict=True) if f is not None]
        return found

    def tenants(self, member: int, frame: range) -> list[int]:
        """Rows of the objects that have a part of a shared frame."""
        return list(self._tenants.get((member, frame.start), ()))

    def free(self, extent: Extent) -> None:
        """Give an object's space back."""
        member, shard, slot = self._geometry.place(extent.row)
        self._give_back(shard, extent.runs)
        self._slots[shard, member].free(slot)
        self._slots_on[member] += 1
        self._hopeless[shard].clear()
        self._move_out(extent)

    def hold_slot(self, row: int) -> None:
        """Take one inode slot without any blocks."""
        member, shard, slot = self._geometry.place(row)
        self._slots[shard, member].mark(np.array([slot], np.int64))
        self._slots_on[member] -= 1

    def free_slot(self, row: int) -> None:
        """Give back what :meth:`hold_slot` took."""
        member, shard, slot = self._geometry.place(row)
        self._slots[shard, member].free(slot)
        self._slots_on[member] += 1
        self._hopeless[shard].clear()

    def mark_recovered(
        self, rows: npt.NDArray[np.int64], locations: npt.NDArray[np.uint64]
    ) -> None:
        """Take the space of recovered entries, which do not overlap."""
        for start in range(0, len(locations), _STRETCH):
            part = locations[start : start + _STRETCH]
            there = part != 0
            owners = np.broadcast_to(rows[start : start + _STRETCH, None], part.shape)[there]
            self._mark_pieces(part[there], owners)
        ordered = np.sort(rows)
        for (shard, index), slots in self._slots.items():
            first = self._geometry.row(index, shard, 0)
            end = first + self._geometry.members[index].slots_per_shard
            low, high = np.searchsorted(ordered, (first, end))
            slots.mark(ordered[low:high] - first)
            self._slots_on[index] -= int(high - low)

    def _mark_pieces(self, packed: npt.NDArray[np.uint64], owners: npt.NDArray[np.int64]) -> None:
        shards = self._geometry.shards
        sizes = np.array([len(self._geometry.shard_blocks(m, 0)) for m in self._members])
        member = members_of(packed).astype(np.int64)
        block = starts_of(packed).astype(np.int64)
        blocks = blocks_of(packed).astype(np.int64)
        group = (member * shards + block // sizes[member]).astype(np.uint16)
        order = np.argsort(group, kind="stable")
        for mine in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            if len(mine):
                index, shard = divmod(int(group[mine[0]]), shards)
                self._frames[shard, index].mark(block[mine], blocks[mine])
                taken = int(blocks[mine].sum())
                self._free_in[shard] -= taken
                self._free_on[index] -= taken
        frame = self._geometry.frame_blocks
        parts = blocks < frame
        frames = (block[parts] // frame * frame).tolist()
        for key, row in zip(
            zip(member[parts].tolist(), frames, strict=True), owners[parts].tolist(), strict=True
        ):
            self._tenants.setdefault(key, []).append(row)

    def _move_in(self, extent: Extent) -> None:
        frame = self._geometry.frame_blocks
        for member, start, blocks in extent.runs:
            if blocks < frame:
                key = (member, start // frame * frame)
                self._tenants.setdefault(key, []).append(extent.row)

    def _move_out(self, extent: Extent) -> None:
        frame = self._geometry.frame_blocks
        for member, start, blocks in extent.runs:
            if blocks < frame:
                key = (member, start // frame * frame)
                rows = self._tenants[key]
                rows.remove(extent.row)
                if not rows:
                    del self._tenants[key]

    def _choices(self, shard: int, down_mask: int) -> Iterator[list[int]]:
        """Yield lists of members to use, best first; one without free slots cannot come first."""
        count = len(self._members)
        turn = [(self._turn + step) % count for step in range(count)]
        up = [m for m in turn if not down_mask >> m & 1]
        for at, first in enumerate(up):
            if self._slots[shard, first].free_slots:
                yield (up[at:] + up[:at])[: self._width]

    def _take_runs(
        self, shard: int, blocks: int, members: list[int]
    ) -> list[tuple[int, int, int]] | None:
        runs: list[tuple[int, int, int]] = []
        wanted = list(stripe(blocks, self._geometry.frame_blocks, members, self._piece_frames))
        for member, count in wanted:
            if not self._take(shard, member, count, members, runs):
                self._give_back(shard, runs)
                return None
        return runs

    def _take(
        self,
        shard: int,
        member: int,
        blocks: int,
        members: list[int],
        runs: list[tuple[int, int, int]],
    ) -> bool:
        """Append a run, or shorter ones where none is long enough; last, on other members."""
        frame = self._geometry.frame_blocks
        for candidate in [member, *(m for m in members if m != member)]:
            start = self._frames[shard, candidate].allocate(blocks)
            if start is not None:
                runs.append((candidate, start, blocks))
                self._free_in[shard] -= blocks
                self._free_on[candidate] -= blocks
                return True
        frames = blocks // frame
        if frames < 2:
            return False
        half = frames // 2 * frame
        return self._take(shard, member, half, members, runs) and self._take(
            shard, member, blocks - half, members, runs
        )

    def _give_back(self, shard: int, runs: Iterable[tuple[int, int, int]]) -> None:
        for member, start, blocks in runs:
            self._frames[shard, member].free(start, blocks)
            self._free_in[shard] += blocks
            self._free_on[member] += blocks


def extent_of(row: int, locations: Iterable[int]) -> Extent:
    """Make the extent of a stored entry from its packed locations."""
    return Extent(row, tuple(unpack_location(location) for location in locations))
