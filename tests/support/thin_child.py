"""Fills sparse members in a file system that has less room than they promise.

``python thin_child.py DIRECTORY``: DIRECTORY is a tmpfs of 40 MiB of its own. Prints what came of
it as one JSON object.
"""

import json
import random
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.config import load
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.store import LoadItem, PutItem
from fx100_lmcache.testing.harness import META, digest_of
from fx100_lmcache.volume.format import format_members, plan_format

MIB = 1 << 20
OBJECTS = 150
IN_FLIGHT = 6
BALLAST = 8 * MIB
PATIENCE_S = 30.0

YAML = """
volume:
  object: 1MiB
  members: [{{path: {0}/m0}}, {{path: {0}/m1}}]
metrics: {{enabled: false}}
deadlines: {{probe_interval: 200ms}}
"""


def contents(name: str) -> bytes:
    return random.Random(name).randbytes(MIB)


def store_all(mounted: Mounted, names: list[str]) -> dict[str, str]:
    """Put objects, a few at a time; return what came of each."""
    outcome: dict[str, str] = {}
    gate = threading.Semaphore(IN_FLIGHT)
    for name in names:
        buffer = zero_buffer(MIB)
        buffer.view[:] = contents(name)

        def told(results: list, name: str = name) -> None:
            outcome[name] = "stored" if results[0].stored else results[0].reason
            gate.release()

        assert gate.acquire(timeout=PATIENCE_S)
        mounted.store.put([PutItem(digest_of(name), META, buffer)], told)
    for _ in range(IN_FLIGHT):
        assert gate.acquire(timeout=PATIENCE_S)
    return outcome


def _note(results: list[Any], done: threading.Event, found: list[Any]) -> None:
    results += found
    done.set()


def load_all(mounted: Mounted, names: list[str]) -> dict[str, str]:
    """Load objects; say of each whether it was right, wrong or a miss."""
    found = {}
    for name in names:
        buffer, done = zero_buffer(MIB), threading.Event()
        results: list[Any] = []
        item = LoadItem(digest_of(name), buffer, lambda _m, _n: True)
        mounted.store.load([item], partial(_note, results, done))
        assert done.wait(PATIENCE_S)
        right = bytes(buffer.view) == contents(name)
        found[name] = "miss" if not results[0].length else "right" if right else "WRONG"
    return found


def healthy_in_time(mounted: Mounted) -> bool:
    until = time.monotonic() + PATIENCE_S
    while mounted.store.problems() and time.monotonic() < until:
        time.sleep(0.05)
    return not mounted.store.problems()


def main() -> None:
    directory = Path(sys.argv[1])
    config = directory / "fx100.yaml"
    config.write_text(YAML.format(directory))
    for number in range(2):
        with (directory / f"m{number}").open("wb") as stream:
            stream.truncate(100 * MIB)
    (directory / "ballast").write_bytes(bytes(BALLAST))
    settings = load(config)
    for member in format_members(settings, plan_format(settings)).members:
        member.close()
    mounted = mount(settings)
    names = [f"object{number}" for number in range(OBJECTS)]
    outcome = store_all(mounted, names)
    short = mounted.store.status()
    loaded = load_all(mounted, names)
    (directory / "ballast").unlink()
    recovers = healthy_in_time(mounted)
    last = store_all(mounted, [f"last{number}" for number in range(4)])
    left = mounted.close()
    again = mount(settings)
    reopened = load_all(again, names)
    again.close()
    print(
        json.dumps(
            {
                "outcomes": sorted(set(outcome.values())),
                "stored": sum(reason == "stored" for reason in outcome.values()),
                "states": [member["state"] for member in short["members"]],
                "problems": short["problems"],
                "right": sum(what == "right" for what in loaded.values()),
                "wrong": sum(what == "WRONG" for what in [*loaded.values(), *reopened.values()]),
                "newest": loaded[names[-1]],
                "healthy at last": recovers,
                "last": sorted(set(last.values())),
                "left": left,
                "right again": sum(what == "right" for what in reopened.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
