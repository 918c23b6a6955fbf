"""The mixed load of G4, a process of its own, so that it can be killed: loads, puts and removes.

It prints JSON lines: ``stored`` and ``removing`` name objects, a sample tells how things stand. Who
started it knows from these what must be found after a SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fx100_lmcache.accept.objects import (
    Contents,
    digest_of,
    load,
    opened,
    ours_in,
    put_filled,
    refuse_full,
)
from fx100_lmcache.accept.steps import CannotRunError
from fx100_lmcache.buffers import IoBuffer
from fx100_lmcache.config import load as load_config
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.store import Store

PUT_SHARE = 0.2
"""Of the operations; a put of a new object removes the oldest one."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def say(**values: Any) -> None:
    """Print one line, whole and at once."""
    os.write(1, (json.dumps(values) + "\n").encode())


@dataclass
class Load:
    """What all threads share.

    Attributes
    ----------
    live : deque of int
        Numbers of the objects that are stored, the oldest first.
    counts : Counter
        Since the last sample: hits, misses, wrong, puts, refused.
    times_s : list of float
        Of the loads since then.
    """

    store: Store
    contents: Contents
    most: int
    live: deque[int]
    next_number: int
    counts: Counter[str] = field(default_factory=Counter)
    times_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: str = ""

    def run(self, seed: int) -> None:
        """Load and store until the process is killed."""
        rng, buffer = random.Random(seed), self.contents.buffer()
        try:
            while not self.failure:
                if rng.random() < PUT_SHARE or not self.live:
                    self._put(buffer)
                else:
                    self._load(rng, buffer)
        except (FX100Error, OSError, ValueError, RuntimeError) as problem:
            self.failure = repr(problem)

    def _put(self, buffer: IoBuffer) -> None:
        with self.lock:
            number = self.next_number
            self.next_number += 1
            oldest = self.live.popleft() if len(self.live) >= self.most else None
        if oldest is not None:
            say(removing=oldest)
            self.store.remove([digest_of(oldest)])
        self.contents.fill(buffer, number)
        refused = put_filled(self.store, [(number, buffer)])
        if not refused:
            say(stored=number)
        with self.lock:
            self.counts["refused" if refused else "puts"] += 1
            if not refused:
                self.live.append(number)

    def _load(self, rng: random.Random, buffer: IoBuffer) -> None:
        with self.lock:
            number = self.live[rng.randrange(len(self.live))]
        found = load(self.store, self.contents, [number], [buffer], check=True)
        with self.lock:
            self.counts["wrong"] += len(found.wrong)
            if not found.missed:
                self.counts["hits"] += 1
                self.times_s.append(found.wall_s)
            elif number in self.live:  # nobody removed it meanwhile
                self.counts["misses"] += 1

    def sample(self) -> dict[str, Any]:
        """Return how things stand, and begin to count anew."""
        with self.lock:
            counts, times = dict(self.counts), sorted(self.times_s)
            self.counts.clear()
            self.times_s.clear()
        statm = Path("/proc/self/statm").read_text().split()
        return {
            "at": time.monotonic(),
            "memory_bytes": int(statm[1]) * _PAGE_BYTES,
            "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "p50_ms": times[len(times) // 2] * 1000 if times else None,
            "counts": counts,
        }


def main(argv: Sequence[str]) -> int:
    """Run the load: CONFIG, objects, threads, seconds between samples, expected objects' file."""
    config_path, most, threads, sample_s, expected_file = argv
    config = load_config(config_path)
    expected: list[int] = json.loads(Path(expected_file).read_text())
    try:
        with opened(config) as mounted:
            contents = Contents(config.volume.object_bytes)
            shared = _begin(mounted.store, contents, int(most), expected)
            return _go_on(shared, int(threads), float(sample_s))
    except CannotRunError as problem:
        say(cannot=str(problem))
        return 2


def _begin(store: Store, contents: Contents, most: int, expected: Sequence[int]) -> Load:
    """Look for all that must be there, byte by byte, and say what is not."""
    found = load(store, contents, expected, [contents.buffer()], check=True) if expected else None
    lost = found.missed if found else {}
    say(ready=time.monotonic(), lost=len(lost), wrong=len(found.wrong) if found else 0)
    here = ours_in(store)
    refuse_full(store, max(0, most - len(here)) * contents.object_bytes)
    return Load(store, contents, most, deque(sorted(here)), max(here, default=-1) + 1)


def _go_on(shared: Load, threads: int, sample_s: float) -> int:
    for seed in range(threads):
        threading.Thread(target=shared.run, args=(seed,), daemon=True).start()
    while not shared.failure:
        time.sleep(sample_s)
        say(**shared.sample())
    say(failure=shared.failure)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
