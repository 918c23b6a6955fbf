"""Opens the volume of a configuration, then obeys one command a line: see `COMMANDS`.

``--other-host`` makes it a process of another machine, as far as the volume can tell: it takes no
kernel lock of this one and signs its claims with another boot id. ``--shard N`` opens one shard.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

from fx100_lmcache.config import load
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.members.device import DeviceMember
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.store import store as store_module
from fx100_lmcache.testing.harness import digest_of, value_of
from fx100_lmcache.volume.machine import Machine
from support.cli import get, put


def store(mounted: Mounted, name: str, length: str) -> str:
    return put(mounted, name, value_of(name, 1, int(length)))


def check(mounted: Mounted, name: str, length: str) -> str:
    """Say whether a load gave the right bytes, wrong bytes or a miss."""
    data = get(mounted, name, int(length))
    if data is None:
        return "miss"
    return "right" if data == value_of(name, 1, int(length)) else "WRONG"


def remove(mounted: Mounted, name: str) -> int:
    return len(mounted.store.remove([digest_of(name)]))


def fork(_: Mounted) -> int:
    """Leave a child behind that does nothing but live."""
    child = os.fork()
    if child == 0:
        signal.pause()
    return child


def churn(mounted: Mounted, length: str) -> str:
    """Go on storing in the background until a put is refused; ``churned`` says why it was."""

    def run() -> None:
        number = 0
        while (reason := put(mounted, f"churn{number}", value_of("churn", 1, int(length)))) in (
            "stored",
            "error",
        ):
            number += 1
        ended.append(reason)
        over.set()

    threading.Thread(target=run, daemon=True).start()
    return "churning"


def churned(_: Mounted) -> str:
    assert over.wait(60)
    return ended[0]


def close(mounted: Mounted) -> int:
    return mounted.close()


COMMANDS = {f.__name__: f for f in (store, check, remove, fork, churn, churned, close)}
over = threading.Event()
ended: list[str] = []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--other-host", action="store_true")
    parser.add_argument("--name", default="elsewhere", help="host name of --other-host")
    parser.add_argument("--shard", type=int)
    options = parser.parse_args()
    if options.other_host:
        DeviceMember.try_lock = lambda *_, **__: True
        machine = Machine("b2", host=options.name, machine_id="m2")
        store_module.this_machine = lambda: machine  # type: ignore[attr-defined]
    try:
        shards = None if options.shard is None else [options.shard]
        mounted = mount(load(options.config), shards=shards)
    except FX100Error as problem:
        print(json.dumps(f"{type(problem).__name__}: {problem}"), flush=True)
        return
    print(json.dumps("open"), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        print(json.dumps(COMMANDS[command](mounted, *arguments)), flush=True)


if __name__ == "__main__":
    main()
