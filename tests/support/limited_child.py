"""Mounts a volume in a process that has only so much more of something, and looks what is left."""

import os
import resource
import sys
from pathlib import Path

from fx100_lmcache import config as settings
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.mount import mount
from fx100_lmcache.store import store
from fx100_lmcache.testing.lacking import Footprint
from support.claims import machine

NOBODY = 65534


def main() -> None:
    config, limit = settings.load(Path(sys.argv[1])), sys.argv[2]
    files = [member.path for member in config.volume.members if member.path is not None]
    vars(store)["this_machine"] = (
        machine  # what a mount that failed has not confirmed is watched in no time
    )
    mount(config).close()  # what is loaded once is loaded now
    which = getattr(resource, f"RLIMIT_{limit}")
    if limit == "NPROC":
        os.setresuid(NOBODY, NOBODY, NOBODY)  # root has no such limit
    _, most = resource.getrlimit(which)
    unit = 1 << 20 if limit == "AS" else 1
    for amount in map(int, sys.argv[3:]):
        before = Footprint.now(*files)
        resource.setrlimit(which, (in_use(limit, before) + amount * unit, most))
        try:
            mount(config).close()
            outcome = "mounted"
        except (FX100Error, OSError, RuntimeError, MemoryError):
            outcome = "refused"
        resource.setrlimit(which, (most, most))
        print(f"{outcome}, {before.left_by(*files) or 'nothing left'}", flush=True)


def in_use(limit: str, now: Footprint) -> int:
    if limit == "NOFILE":
        return len(now.descriptors)
    if limit == "AS":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


main()
