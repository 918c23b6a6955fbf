"""What an operator sees of a store: what is wrong, and how things stand."""

from __future__ import annotations

from typing import Any

from fx100_lmcache.counters import defects_in
from fx100_lmcache.store.core import Core

FAILED_PUTS = 10  # after so many failures and no success, the tier does not work


def problems_of(core: Core, *, claim_lost: bool, unerased: int) -> list[str]:
    """List what is wrong; empty when puts and loads can work."""
    found = [
        f"member {state.name} is {state.state}: {state.last_error}"
        for state in core.engine.states()
        if state.state != "up"
    ]
    if claim_lost:
        found.append("the claim was taken over by another process: nothing is stored")
    with core.lock:
        failed = core.counts["put_drop_error"] + core.counts["put_drop_deadline"]
        stored = core.counts["puts_stored"]
        found += defects_in(core.counts)
    if failed >= FAILED_PUTS and not stored:
        found.append(f"none of {failed} puts succeeded")
    if core.defects.count:
        found.append(f"{core.defects.count} internal errors so far; the log says which")
    if unerased:
        found.append(f"{unerased} inodes could not be erased so far; their space waits")
    return found


def status_of(core: Core) -> dict[str, Any]:
    """Describe entries, space, work in flight and members, as plain values."""
    space = core.report()
    return {
        "engine": core.engine.kind,
        "entries": len(core.catalog),
        "live_bytes": core.catalog.live_bytes,
        "block_bytes": core.geometry.block_bytes,
        "blocks": {
            "total": space.total,
            "free": space.free,
            "used": space.used,
            "quarantined": space.quarantined,
        },
        "write_backlog_bytes": core.write_bytes,
        "jobs_in_flight": core.engine.open_jobs,
        "members": [
            {name: getattr(state, name) for name in state.__slots__}
            for state in core.engine.states()
        ],
    }
