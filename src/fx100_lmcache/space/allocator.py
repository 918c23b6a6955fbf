"""Free space: runs of whole frames, shared frames for what is smaller, inode slots. Pure.

One :class:`FrameAllocator` and one :class:`SlotAllocator` manage one shard's part of one member.
Free space is never read from the media; recovery derives it with :meth:`FrameAllocator.mark`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_FREE, _FULL, _SHARED, _WITHHELD = 0, 1, 2, 3


class FrameAllocator:
    """Allocates contiguous blocks of one member.

    Parameters
    ----------
    blocks : range
        The blocks managed, a whole number of frames.
    frame_blocks : int
        Blocks in a frame, at most 64.
    """

    def __init__(self, blocks: range, frame_blocks: int) -> None:
        assert 1 <= frame_blocks <= 64
        assert len(blocks) % frame_blocks == 0
        self._first = blocks.start
        self._frame_blocks = frame_blocks
        self._full_mask = (1 << frame_blocks) - 1
        self._state = bytearray(len(blocks) // frame_blocks)
        self._cursor = 0
        self._masks: dict[int, int] = {}  # shared frame -> bit map of its used blocks
        self._by_run: list[set[int]] = [set() for _ in range(frame_blocks + 1)]
        self._written = np.zeros(
            len(self._state), np.uint64
        )  # blocks known to be written, by frame
        self._withheld: dict[int, int] = {}  # shared frame -> bit map of its withheld blocks
        self._free_frames = len(self._state)
        self.free_blocks = len(blocks)
        self.withheld_blocks = 0

    def allocate(self, blocks: int) -> int | None:
        """Take a contiguous run; return its first block, or None when there is none.

        Whole frames come from a run of free frames; less than a frame from a shared one.
        """
        assert blocks > 0
        frames, tail = divmod(blocks, self._frame_blocks)
        if frames and tail:
            raise ValueError("a run is whole frames or less than one frame")
        start = self._take_frames(frames) if frames else self._take_shared(tail)
        if start is not None:
            self.free_blocks -= blocks
        return start

    def free(self, start: int, blocks: int) -> None:
        """Give back what :meth:`allocate` or :meth:`mark` took."""
        for frame, mask in self._split(start, blocks):
            if mask == self._full_mask:
                assert self._state[frame] == _FULL, "freed twice"
                self._state[frame] = _FREE
                self._free_frames += 1
            else:
                self._free_shared(frame, mask)
        self.free_blocks += blocks

    def mark(self, starts: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        """Take many runs at once; the caller has made sure that they do not overlap."""
        first = starts - self._first
        whole = (first % self._frame_blocks == 0) & (blocks % self._frame_blocks == 0)
        state = np.frombuffer(self._state, np.uint8)
        frame, left = first[whole] // self._frame_blocks, blocks[whole] // self._frame_blocks
        while len(frame):  # once for each frame of the longest run
            state[frame] = _FULL
            frame, left = frame[left > 1] + 1, left[left > 1] - 1
        self._free_frames = self._state.count(_FREE)
        for start, count in zip(starts[~whole].tolist(), blocks[~whole].tolist(), strict=True):
            for frame, mask in self._split(start, count):
                self._mark_used(frame, mask)
        self.free_blocks -= int(blocks.sum())

    def roomiest(self) -> Iterator[range]:
        """Yield the shared frames, those with the longest free runs first."""
        for run in range(self._frame_blocks, -1, -1):
            for frame in self._by_run[run]:
                start = self._first + frame * self._frame_blocks
                yield range(start, start + self._frame_blocks)

    def note_written(self, start: int, blocks: int) -> None:
        """Note that blocks were written: they are not withheld when they are free."""
        for frame, mask in self._split(start, blocks):
            self._written[frame] |= np.uint64(mask)

    def withhold(self) -> None:
        """Take all free blocks that are not known to be written, until :meth:`release`."""
        state = np.frombuffer(self._state, np.uint8)
        unwritten = (state == _FREE) & (self._written != self._full_mask)
        whole = unwritten & (self._written == 0)
        state[whole] = _WITHHELD
        taken = int(np.count_nonzero(whole)) * self._frame_blocks
        for frame in [*np.flatnonzero(unwritten & ~whole).tolist(), *self._masks]:
            known = self._masks.get(frame, 0) | int(self._written[frame])
            mask = self._full_mask & ~known
            if mask:
                self._mark_used(frame, mask)
                self._withheld[frame] = self._withheld.get(frame, 0) | mask
                taken += mask.bit_count()
        self._free_frames = self._state.count(_FREE)
        self.free_blocks -= taken
        self.withheld_blocks += taken

    def release(self) -> None:
        """Give back what is withheld."""
        state = np.frombuffer(self._state, np.uint8)
        state[state == _WITHHELD] = _FREE
        self._free_frames = self._state.count(_FREE)
        withheld, self._withheld = self._withheld, {}
        for frame, mask in withheld.items():
            self._free_shared(frame, mask)
        self.free_blocks += self.withheld_blocks
        self.withheld_blocks = 0

    def withheld_block(self, wanted: int) -> int | None:
        """Return a withheld block: the one wanted, if it is, else any; None if there is none."""
        frame, inside = divmod(wanted - self._first, self._frame_blocks)
        if 0 <= frame < len(self._state) and (
            self._state[frame] == _WITHHELD or self._withheld.get(frame, 0) >> inside & 1
        ):
            return wanted
        frame = self._state.find(_WITHHELD)
        if frame >= 0:
            return self._first + frame * self._frame_blocks
        for frame, mask in self._withheld.items():
            return self._first + frame * self._frame_blocks + (mask & -mask).bit_length() - 1
        return None

    def _split(self, start: int, blocks: int) -> list[tuple[int, int]]:
        parts = []
        at = start - self._first
        while blocks:
            frame, inside = divmod(at, self._frame_blocks)
            count = min(blocks, self._frame_blocks - inside)
            parts.append((frame, ((1 << count) - 1) << inside))
            at += count
            blocks -= count
        return parts

    def _take_frames(self, frames: int) -> int | None:
        if frames > self._free_frames:
            return None
        wanted = bytes(frames)
        at = self._state.find(wanted, self._cursor)
        if at < 0:
            at = self._state.find(wanted)  # the part before the cursor
        if at < 0:
            return None
        self._state[at : at + frames] = bytes([_FULL]) * frames
        self._free_frames -= frames
        self._cursor = at + frames
        return self._first + at * self._frame_blocks

    def _take_shared(self, blocks: int) -> int | None:
        for run in range(blocks, self._frame_blocks):
            if self._by_run[run]:
                frame = next(iter(self._by_run[run]))
                break
        else:
            if not self._free_frames:
                return None
            frame = self._state.find(_FREE)
        used = self._masks.get(frame, 0)
        inside = self._find_run(used, blocks)
        self._mark_used(frame, ((1 << blocks) - 1) << inside)
        return self._first + frame * self._frame_blocks + inside

    def _mark_used(self, frame: int, mask: int) -> None:
        used = self._masks.get(frame, 0)
        assert self._state[frame] != _FULL
        assert not used & mask, "taken twice"
        self._unlist(frame)
        self._free_frames -= self._state[frame] == _FREE
        self._state[frame] = _SHARED
        self._list(frame, used | mask)

    def _free_shared(self, frame: int, mask: int) -> None:
        used = self._masks[frame]
        assert used & mask == mask, "freed twice"
        self._unlist(frame)
        if used == mask:
            self._state[frame] = _FREE
            self._free_frames += 1
        else:
            self._list(frame, used & ~mask)

    def _list(self, frame: int, used: int) -> None:
        self._masks[frame] = used
        self._by_run[self._longest_run(used)].add(frame)

    def _unlist(self, frame: int) -> None:
        used = self._masks.pop(frame, None)
        if used is not None:
            self._by_run[self._longest_run(used)].discard(frame)

    def _free_map(self, used: int) -> str:
        return f"{used:0{self._frame_blocks}b}"[::-1]

    def _longest_run(self, used: int) -> int:
        return max(map(len, self._free_map(used).split("1")))

    def _find_run(self, used: int, blocks: int) -> int:
        """Start of the shortest free run that holds ``blocks``, so that long ones stay whole."""
        at, best, best_length = 0, -1, self._frame_blocks + 1
        for run in self._free_map(used).split("1"):
            if blocks <= len(run) < best_length:
                best, best_length = at, len(run)
            at += len(run) + 1
        assert best >= 0
        return best


class SlotAllocator:
    """Allocates the lowest free slot of one inode table, so that tables fill from the front."""

    def __init__(self, slots: int) -> None:
        self._used = bytearray(slots)
        self._lowest = 0
        self._top = 0  # no slot from here on was ever taken
        self._limit = slots  # none from here on is given out
        self.free_slots = slots

    def allocate(self) -> int | None:
        """Take a slot, or return None when the table is full."""
        slot = self._used.find(0, self._lowest, self._limit)
        if slot < 0:
            return None
        self._used[slot] = 1
        self._lowest = slot + 1
        self._top = max(self._top, slot + 1)
        self.free_slots -= 1
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        assert self._used[slot], "freed twice"
        self._used[slot] = 0
        self._lowest = min(self._lowest, slot)
        self.free_slots += slot < self._limit

    def mark(self, slots: npt.NDArray[np.int64]) -> None:
        """Take many slots at once."""
        np.frombuffer(self._used, np.uint8)[slots] = 1
        self._top = max(self._top, int(slots.max(initial=-1)) + 1)
        self.free_slots -= len(slots)

    @property
    def slots(self) -> int:
        """Slots that may be given out, and those that are: all that are not withheld."""
        return self._limit

    def withhold(self) -> None:
        """Give out no slot that was never taken, until :meth:`release`."""
        self._limit = self._top
        self.free_slots = self._used.count(0, 0, self._limit)

    def release(self) -> None:
        """Give all slots out again."""
        self._limit = len(self._used)
        self.free_slots = self._used.count(0)
