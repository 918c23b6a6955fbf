"""What an operator sees of a store: what is wrong, and how things stand."""

from __future__ import annotations

from typing import Any

from fx100_lmcache.counters import defects_in
from fx100_lmcache.store.state import Core

FAILED_PUTS = 10  # after so many failures and no success, the tier does not work
_FAILURES = ("error", "deadline", "no_space_below")


def problems_of(core: Core, *, of_claims: list[str], unerased: int) -> list[str]:
    """List what is wrong; empty when puts and loads can work."""
    found = [
        f"member {state.name} is {state.state}: {state.last_error}"
        for state in core.engine.states()
        if state.state != "up"
    ]
    found += of_claims
    found += core.backing.problems(core.engine.down_mask())
    with core.lock:
        failed = sum(core.counts[f"put_drop_{reason}"] for reason in _FAILURES)
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
    stocks = core.stocks()
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
            "withheld": space.withheld,
        },
        "inodes": {
            "total": core.space.all_slots,
            "free": stocks.inodes.free,
            "used": stocks.inodes.used,
            "withheld": core.space.all_slots - stocks.inodes.total,
        },
        "used_share": round(core.used_share(), 4),
        "limit": stocks.limit,
        "write_backlog_bytes": core.write_bytes,
        "jobs_in_flight": core.engine.open_jobs,
        "members": [
            {
                **{name: getattr(state, name) for name in state.__slots__},
                "no_space_below": core.backing.short(number),
            }
            for number, state in enumerate(core.engine.states())
        ],
    }
