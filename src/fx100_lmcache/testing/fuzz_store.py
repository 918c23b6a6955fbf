"""Stores on forged media: opened, used in every way, and opened again."""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import xxhash

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.members.base import Member
from fx100_lmcache.members.device import open_member
from fx100_lmcache.store import LoadItem, LoadResult, PutItem, PutResult, Store, StoreOptions
from fx100_lmcache.testing.clock import SimulatedClock
from fx100_lmcache.testing.fuzz_worlds import WALL_S
from fx100_lmcache.testing.guarded import GuardedBuffer
from fx100_lmcache.testing.harness import META, digest_of, value_of
from fx100_lmcache.testing.inline import inline_engine
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.testing.reference import Expected, Found, Reference
from fx100_lmcache.volume.claim import newest_claim, read_claims
from fx100_lmcache.volume.machine import this_machine
from fx100_lmcache.volume.volume import Volume, assemble

Result = TypeVar("Result")

_WAIT_S = 30.0
_OPTIONS = StoreOptions(claim_check_s=1e9, reserve_fraction=0.0)


@dataclass
class Rules:
    """What may happen to a volume.

    Attributes
    ----------
    honest : dict of bytes to bytes
        What was put by digest, before somebody forged records.
    odd_labels, odd_claims : bool
        Labels were forged, so the volume may be refused, and may be too small for an object;
        claims were, so the shard may be somebody else's.
    """

    honest: dict[bytes, bytes]
    odd_labels: bool = False
    odd_claims: bool = False


Stores = Callable[[list[bytearray], Rules], "Opened"]


class _Answer(Generic[Result]):
    """Waits for the results of a call, which may come from any thread, once."""

    def __init__(self) -> None:
        self._results: list[Result] | None = None
        self._there = threading.Event()

    def take(self, results: list[Result]) -> None:
        """Take the results."""
        assert self._results is None, "answered twice"
        self._results = results
        self._there.set()

    def wait(self, what: str) -> list[Result]:
        """Wait for them."""
        assert self._there.wait(_WAIT_S), f"a {what} was never answered"
        assert self._results is not None
        return self._results


class Opened:
    """A store on forged media.

    Parameters
    ----------
    open_members : callable
        Opens the members anew.
    make_engine : callable
        Makes an engine for a volume's members.
    """

    def __init__(
        self,
        rules: Rules,
        open_members: Callable[[], Sequence[Member]],
        make_engine: Callable[[Sequence[Member]], LaneEngine],
    ) -> None:
        self._rules = rules
        self._open_members = open_members
        self._make_engine = make_engine
        self._wall_s = WALL_S
        self.dropped: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self._open()
        self.outcomes[f"engine {self._engine.kind}"] += 1
        self.dropped.update({r.value: n for r, n in self._expected.dropped.items()})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _open(self) -> None:
        """Open what is there, and work out what must be found."""
        self._wall_s += 1
        members = self._open_members()
        self._members: Sequence[Member] = members
        volume = assemble(members)
        g, uuid = volume.geometry, volume.uuid
        media = [_bytes_of(member) for member in volume.members]
        before = {s: newest_claim(read_claims(members, g, s), uuid, s) for s in range(g.shards)}
        generations = {shard: seen.generation if seen else 1 for shard, seen in before.items()}
        self._engine = self._make_engine(volume.members)
        self.store = self._open_store(volume)
        after = [newest_claim(read_claims(members, g, s), uuid, s) for s in range(g.shards)]
        epoch = max(claim.epoch for claim in after if claim is not None)
        self._media = media
        self._volume = volume
        self._expected: Expected = Reference(g, uuid, generations, epoch).expected(media)

    def _open_store(self, volume: Volume) -> Store:
        clock = SimulatedClock()
        how = {
            "options": _OPTIONS,
            "wall_clock": lambda: self._wall_s,
            "machine": replace(this_machine(), clock=clock, sleep=clock.advance),
            "heartbeat": False,
        }
        try:
            return Store(volume, self._engine, **how)  # type: ignore[arg-type]
        except ClaimError:
            if not self._rules.odd_claims:
                raise
            self.outcomes["claimed by another host"] += 1
            self._engine = self._make_engine(volume.members)  # that one was closed
            return Store(volume, self._engine, take_over=True, **how)  # type: ignore[arg-type]

    def _close(self) -> None:
        self.store.close(1.0)
        for member in self._members:
            member.close()

    def use(self, rng: random.Random) -> None:
        """Use everything that a store can do, in some order, and open it again."""
        self._check_found()
        self._check_loads(rng)
        for step in rng.sample((self._remove, self._put_again, self._fill), 2):
            step(rng)
            self._check_space()
        if rng.random() < 0.5:
            kept = {digest: length for _, digest, length, _ in self.store.entries()}
            self._close()
            self._open()
            assert {d: n for _, d, n, _ in self.store.entries()} == kept, "a reopen changed entries"
            self._check_found(erased=True)
            self._check_loads(rng)
        self._check_clear()

    def _check_found(self, *, erased: bool = False) -> None:
        """Compare what was recovered with the reference."""
        store, expected = self.store, self._expected
        found = {row: (digest, length) for row, digest, length, _ in store.entries()}
        wanted = {row: (e.digest, e.length) for row, e in expected.entries.items()}
        assert found == wanted, f"{found} recovered, {wanted} expected"
        dropped = Counter({k: n for k, n in store.dropped_inodes.items() if n})
        assert dropped == {r.value: n for r, n in expected.dropped.items()}, dropped
        if erased:
            assert not expected.erased, "what was dropped is there again"
        self._check_space()
        assert len(store.status()["members"]) == len(self._members)
        for number in store.bytes_by_meta():
            store.meta(number)
        listed = [entry for batch in store.oldest_first() for entry in batch]
        assert len(listed) == len(found)

    def _check_space(self) -> None:
        """Every block and every slot is accounted for, once no write is in flight."""
        self._settle()
        store, held = self.store, len(self._expected.held)
        space = store.space()
        assert space.free + space.used + space.quarantined == space.total, space
        assert min(space.free, space.used, space.quarantined) >= 0, space
        assert space.used == sum(self._blocks(row) for row, *_ in store.entries())
        core = store._core
        assert core.space.free_slots_up(0) + len(store) + held == core.geometry.rows, (
            "a slot is lost"
        )

    def _blocks(self, row: int) -> int:
        return self.store._core.catalog.blocks(row)

    def _settle(self) -> None:
        """Wait until nothing is in flight."""
        quiet = threading.Event()
        for _ in range(int(_WAIT_S * 1000)):
            if not self._engine.open_jobs:
                return
            quiet.wait(0.001)
        raise AssertionError("work in flight never ends")

    def _check_loads(self, rng: random.Random) -> None:
        """Load all that is there, and all that was put: the right bytes, or a miss."""
        by_digest = {entry.digest: entry for entry in self._expected.entries.values()}
        digests = [*by_digest, *(d for d in self._rules.honest if d not in by_digest), bytes(48)]
        assert self.store.lookup(digests).tolist() == [d in by_digest for d in digests]
        wanted = [self._content(by_digest[d]) if d in by_digest else None for d in digests]
        lengths = [by_digest[d].length if d in by_digest else 5000 for d in digests]
        short = [rng.random() < 0.1 for _ in digests]
        rooms = [max(1, n // 2) if cut else n for n, cut in zip(lengths, short, strict=True)]
        buffers = [GuardedBuffer(-(-n // 512) * 512 if rng.random() < 0.5 else n) for n in rooms]
        for buffer, room in zip(buffers, rooms, strict=True):
            buffer.buffer = replace(buffer.buffer, length=room)
        results = self._load(digests, buffers)
        for digest, want, cut, length, buffer, result in zip(
            digests, wanted, short, lengths, buffers, results, strict=True
        ):
            assert buffer.intact, "bytes before a buffer were written"
            self.outcomes["hit" if result.length else f"miss: {result.reason}"] += 1
            fits = want is not None and not (cut and length > 1)
            assert result.length == (length if fits else 0), f"{result}, {length} bytes expected"
            if fits:
                assert buffer.buffer.view[:length] == want, "other bytes than were stored"
            if fits and want == self._rules.honest.get(digest):
                self.outcomes["honest, loaded"] += 1
        assert all(state.errors == 0 for state in self._engine.states()), "a transfer failed"

    def _content(self, entry: Found) -> bytes | None:
        """Return what an entry's pieces hold, None if it does not hash to what the inode says."""
        g, parts, left = self._volume.geometry, [], entry.length
        for member, start, blocks, checksum in entry.pieces:
            at, size = g.block_offset(member, start), min(left, blocks * g.block_bytes)
            part = self._media[member][at : at + size]
            if xxhash.xxh3_64_intdigest(part) != checksum:
                return None
            parts.append(part)
            left -= size
        return b"".join(parts)

    def _load(self, digests: Sequence[bytes], buffers: Sequence[GuardedBuffer]) -> list[LoadResult]:
        items = [
            LoadItem(digest, buffer.buffer, lambda _meta, _length: True)
            for digest, buffer in zip(digests, buffers, strict=True)
        ]
        answer: _Answer[LoadResult] = _Answer()
        self.store.load(items, answer.take)
        return answer.wait("load")

    def _put(self, names: Sequence[str], length: int) -> list[PutResult]:
        items = []
        for name in names:
            buffer = zero_buffer(-(-length // 4096) * 4096)
            buffer.view[:length] = _value(name, length)
            buffer.length = length
            items.append(PutItem(digest_of(name), META, buffer))
        answer: _Answer[PutResult] = _Answer()
        self.store.put(items, answer.take)
        return answer.wait("put")

    def _remove(self, rng: random.Random) -> None:
        digests = [digest for _, digest, _, _ in self.store.entries()]
        gone = [digest for digest in digests if rng.random() < 0.7]
        removed = self.store.remove(gone, force=True)
        assert {digest for digest, _ in removed} == set(gone)
        assert not self.store.lookup(gone).any() if gone else True

    def _put_again(self, _: random.Random) -> None:
        names = [f"honest{number}" for number in range(len(self._rules.honest))]
        for result in self._put(names, 3000):
            self.outcomes["put again" if result.stored else f"not put: {result.reason}"] += 1
            assert result.reason not in ("error", "deadline")

    def _fill(self, rng: random.Random) -> None:
        """Put more than fits, so that everything is evicted."""
        for number in range(12):
            [result] = self._put([f"filler{number}"], rng.choice((4096, 16_000, 30_000)))
            self.outcomes["put" if result.stored else f"not put: {result.reason}"] += 1
            assert result.reason not in ("error", "deadline")

    def _check_clear(self) -> None:
        """Clear; nothing comes back, and the volume is of use again."""
        self.store.clear()
        self._settle()
        assert len(self.store) == 0
        self._check_space()
        [result] = self._put(["after"], 5000)
        if not self._rules.odd_labels:
            assert result.stored, f"nothing can be stored after a clear: {result.reason}"
        self._close()
        self._open()
        left = [digest for _, digest, _, _ in self.store.entries()]
        assert left == [digest_of("after")] * result.stored, "entries came back after a clear"
        self._check_found(erased=True)
        [loaded] = self._load([digest_of("after")], [buffer := GuardedBuffer(8192)])
        assert loaded.length == 5000 * result.stored
        if loaded.length:
            assert buffer.buffer.view[:5000] == _value("after", 5000)


@functools.lru_cache(maxsize=256)
def _value(name: str, length: int) -> bytes:
    return value_of(name, 1, length)


def memory_stores(media: list[bytearray], rules: Rules) -> Opened:
    """Open a store on members in memory, with an engine that moves at once."""

    def members() -> list[MemoryMember]:
        made = [MemoryMember(0, index=number) for number in range(len(media))]
        for member, part in zip(made, media, strict=True):
            member.media, member.size_bytes = part, len(part)
        return made

    return Opened(rules, members, lambda members: inline_engine(members)[0])


def file_stores(home: Path) -> Stores:
    """Open stores on files in a directory, with the engine of the product."""

    def opened(media: list[bytearray], rules: Rules) -> Opened:
        paths = [home / f"m{number}" for number in range(len(media))]
        for path, part in zip(paths, media, strict=True):
            path.write_bytes(part)
        options = EngineOptions(reader_threads=2, writer_threads=1)
        return Opened(
            rules,
            lambda: [open_member(path) for path in paths],
            lambda members: LaneEngine(members, options),
        )

    return opened


def _bytes_of(member: Member) -> bytes:
    """Read a whole member."""
    if isinstance(member, MemoryMember):
        return bytes(member.media)
    return Path(member.name).read_bytes()
