"""A structure-aware fuzzer of what is read from the media.

Labels, claims and inodes are forged (:mod:`fx100_lmcache.testing.forge`), put on small volumes
beside honest ones, and used. Whatever is on the media: no exception reaches a caller, but for a
label or a claim, whose error says which member; no byte outside a buffer is written; a load gives
what was stored or nothing; honest entries stay; every block and slot is accounted for; what was
dropped is gone from the media when the volume is opened again.

``python -m fx100_lmcache.testing.fuzz --cases 1000000`` is the long form.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fx100_lmcache.errors import (
    FX100Error,
    MissingMemberError,
    RecordError,
    UnsupportedVersionError,
)
from fx100_lmcache.ondisk.claim_block import ClaimBlock, next_counter, next_epoch, unpack_claim
from fx100_lmcache.ondisk.geometry import LABEL_BYTES
from fx100_lmcache.ondisk.label import unpack_label
from fx100_lmcache.testing.crash import Violation
from fx100_lmcache.testing.forge import Forger, InodeDraft
from fx100_lmcache.testing.fuzz_store import Rules, Stores, file_stores, memory_stores
from fx100_lmcache.testing.fuzz_worlds import VOLUME, WALL_S, World, worlds
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.testing.reference import Reference
from fx100_lmcache.volume.recovery import recover

KINDS = {"label": 35, "claim": 20, "tables": 40, "store": 5}
"""Kinds of cases and their shares; see the methods of :class:`Fuzzer`."""


@dataclass
class Tally:
    """What cases came to.

    Attributes
    ----------
    cases, reasons, outcomes : Counter of str
        Cases by kind; inodes dropped by reason; everything else that was seen.
    """

    cases: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


class Fuzzer:
    """Runs cases; each is made from the seed and its number alone.

    Parameters
    ----------
    stores : callable
        Opens members with these bytes as a store: in memory, or on files with the native engine.
    """

    def __init__(self, seed: int, stores: Stores = memory_stores) -> None:
        self._seed = seed
        self._stores = stores
        self._worlds = worlds()
        self.tally = Tally()

    def case(self, number: int, kind: str = "") -> None:
        """Run one case.

        Raises
        ------
        Violation
            If a promise is broken; it names the case.
        """
        rng = random.Random(f"{self._seed}/{number}")
        kind = kind or rng.choices(list(KINDS), list(KINDS.values()))[0]
        world = rng.choice(self._worlds)
        try:
            {
                "label": self._label,
                "claim": self._claim,
                "tables": self._tables,
                "store": self._store,
            }[kind](rng, world)
        except Exception as problem:
            raise Violation(
                f"seed {self._seed}, case {number} ({kind}): {type(problem).__name__}: {problem}"
            ) from problem
        self.tally.cases[kind] += 1

    def _label(self, rng: random.Random, world: World) -> None:
        """Decode one label: refused with a reason, or a geometry that fits its member."""
        draft = world.label(rng.randrange(len(world.media)))
        Forger(rng, world.around).label(draft, rng.randrange(1, 4))
        try:
            label = unpack_label(draft.pack())
        except (RecordError, UnsupportedVersionError) as problem:
            self.tally.outcomes[f"label refused: {_words(problem)}"] += 1
            return
        self.tally.outcomes["label taken"] += 1
        g = label.geometry
        assert unpack_label(label.pack()) == label
        for member, shape in enumerate(g.members):
            last = g.shard_blocks(member, g.shards - 1)
            assert shape.slots_per_shard * len(last) > 0
            assert g.slot_offset(member, g.shards, 0) <= g.block_offset(member, 0)
            end = g.block_offset(member, last.stop)
            assert end + LABEL_BYTES <= shape.size_bytes
        assert g.place(g.rows - 1)[0] == len(g.members) - 1
        time.gmtime(label.created_unix_s)

    def _claim(self, rng: random.Random, world: World) -> None:
        """Decode one claim: refused, or one that the next owner can follow."""
        shard = rng.randrange(world.geometry.shards)
        draft = world.claim(shard)
        Forger(rng, world.around).claim(draft, rng.randrange(1, 4))
        try:
            claim = unpack_claim(draft.pack(), VOLUME.bytes, shard)
        except RecordError as problem:
            self.tally.outcomes[f"claim refused: {_words(problem)}"] += 1
            return
        self.tally.outcomes["claim taken"] += 1
        assert claim.holder.isprintable()
        epoch, counter = next_epoch(claim.epoch, WALL_S), next_counter(claim.counter)
        assert epoch >= claim.epoch
        assert (counter - claim.counter) % 2 == 1, "over the block that is in force"
        following = ClaimBlock(shard, claim.generation, epoch, counter, claim.holder)
        assert unpack_claim(following.pack(VOLUME.bytes), VOLUME.bytes, shard).epoch == epoch

    def _tables(self, rng: random.Random, world: World) -> None:
        """Recover tables with forged inodes, and compare with the reference."""
        media = [bytearray(part) for part in world.media]
        self._forge_inodes(rng, world, media)
        members = [MemoryMember(0, index=n) for n in range(len(media))]
        for member, part in zip(members, media, strict=True):
            member.media, member.size_bytes = part, len(part)
        around = world.around
        generations = dict.fromkeys(range(world.geometry.shards), around.generation)
        reference = Reference(world.geometry, VOLUME.bytes, generations, around.epoch)
        expected = reference.expected(media)
        found = recover(
            members, world.geometry, VOLUME.bytes, generations, claim_epoch=around.epoch
        )
        told = dict(zip(found.rows.tolist(), found.words, strict=True))
        assert {row: w.tobytes() for row, w in told.items()} == {
            row: entry.digest for row, entry in expected.entries.items()
        }
        assert +found.dropped == expected.dropped, (found.dropped, expected.dropped)
        assert set(found.stale_rows) == expected.erased
        assert len(set(found.stale_rows)) == len(found.stale_rows)
        assert set(found.held_rows) == expected.held
        self.tally.reasons.update(expected.dropped)

    def _store(self, rng: random.Random, world: World) -> None:
        """Open a store on forged records of all kinds, and use it."""
        media = [bytearray(part) for part in world.media]
        rules = Rules(world.honest)
        if rng.random() < 0.3:
            rules.odd_labels = True
            self._forge_labels(rng, world, media)
        if rng.random() < 0.4:
            rules.odd_claims = True
            self._forge_claims(rng, world, media)
        self._forge_inodes(rng, world, media)
        try:
            opened = self._stores(media, rules)
        except FX100Error as problem:
            if not rules.odd_labels:
                raise
            named = any(name in str(problem) for name in ("memory", "/m"))
            if not named and not isinstance(problem, MissingMemberError):
                raise Violation(f"no member is named: {problem}") from problem
            self.tally.outcomes[f"not opened: {type(problem).__name__}"] += 1
            return
        with opened:
            opened.use(rng)
        self.tally.reasons.update(opened.dropped)
        self.tally.outcomes.update(opened.outcomes)

    def _forge_inodes(self, rng: random.Random, world: World, media: list[bytearray]) -> None:
        """Put one to six forged inodes on the media, some of them over honest ones."""
        forger = Forger(rng, world.around)
        for _ in range(rng.randrange(1, 7)):
            fresh = rng.random() < 0.5
            draft = world.fresh(rng, media) if fresh else world.copy_of(rng)
            place = (draft.member, draft.shard, draft.slot)
            forger.inode(draft, rng.choice((0, 1, 1, 1, 2, 3)))
            _write_inode(world, media, place, draft)

    def _forge_labels(self, rng: random.Random, world: World, media: list[bytearray]) -> None:
        """Change what all labels say, or what one copy or one member says."""
        labels = [world.label(member) for member in range(len(media))]
        forger = Forger(rng, world.around)
        alike = rng.random() < 0.6
        seed = rng.randrange(1 << 32)
        for member, label in enumerate(labels):
            if alike:  # the same change everywhere, or no two would belong together
                Forger(random.Random(seed), world.around).label(label, 1)
                label.index = member
            elif rng.random() < 0.5:
                forger.label(label, rng.randrange(1, 3))
            copies = rng.choice(((0, -LABEL_BYTES), (0, -LABEL_BYTES), (0,), (-LABEL_BYTES,)))
            for at in copies:
                start = at % len(media[member])
                media[member][start : start + LABEL_BYTES] = label.pack()

    def _forge_claims(self, rng: random.Random, world: World, media: list[bytearray]) -> None:
        """Change one or both claim blocks of some shards on some members."""
        forger = Forger(rng, world.around)
        for shard in range(world.geometry.shards):
            for which in range(2):
                draft = world.claim(shard)
                draft.counter += which
                forger.claim(draft, rng.randrange(1, 3))
                at = world.geometry.claim_offset(shard, which)
                for part in media:
                    if rng.random() < 0.5:
                        part[at : at + LABEL_BYTES] = draft.pack()


def _write_inode(
    world: World, media: list[bytearray], place: tuple[int, int, int], draft: InodeDraft
) -> None:
    geometry = world.geometry
    at = geometry.slot_offset(*place)
    record = draft.pack(geometry.inode_bytes, VOLUME.bytes)
    media[place[0]][at : at + geometry.inode_bytes] = record


def _words(problem: Exception) -> str:
    """Shorten a message to what is the same in all of its kind."""
    return "".join(c for c in str(problem) if not c.isdigit())[:60]


def _progress(fuzzer: Fuzzer, done: int, total: int, started: float) -> str:
    rate = done / max(time.monotonic() - started, 1e-3)
    left_s = (total - done) / max(rate, 1e-3)
    reasons = len(+fuzzer.tally.reasons)
    return f"{done:,} of {total:,} cases, {rate:,.0f}/s, {reasons} reasons, {left_s:,.0f} s left"


def run(fuzzer: Fuzzer, first: int, cases: int, *, kind: str = "", every_s: float = 10.0) -> float:
    """Run cases with a line of progress now and then; return cases per second.

    Parameters
    ----------
    every_s : float
        Seconds between lines. With 0 each case is named before it runs: for those that may end
        the process.
    """
    started = told = time.monotonic()
    for number in range(first, first + cases):
        if not every_s:
            sys.stderr.write(f"case {number}\n")
        fuzzer.case(number, kind)
        if every_s and time.monotonic() - told > every_s:
            told = time.monotonic()
            sys.stderr.write(_progress(fuzzer, number - first + 1, cases, started) + "\n")
    return cases / max(time.monotonic() - started, 1e-3)


def main() -> None:
    """Run from the command line; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=list(KINDS), default="", help="only cases of one kind")
    parser.add_argument("--files", action="store_true", help="members are files, engine native")
    wanted = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as home:
        stores = file_stores(Path(home)) if wanted.files else memory_stores
        fuzzer = Fuzzer(wanted.seed, stores)
        every_s = 0.0 if wanted.files else 10.0
        rate = run(fuzzer, wanted.first, wanted.cases, kind=wanted.kind, every_s=every_s)
    tally = fuzzer.tally
    sys.stdout.write(
        json.dumps(
            {
                "cases": dict(tally.cases),
                "cases_per_s": round(rate),
                "reasons": dict(tally.reasons),
                "outcomes": dict(tally.outcomes),
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
