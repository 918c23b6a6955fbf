"""Every counter of the store and of its two adapters, with what it counts.

All of them are there from zero, in `Store.status`, in ``report_status`` and as metrics. A new one
takes one line here and one in ``docs/metrics.md``. A name that ends in ``_errors`` counts defects:
exceptions where none belong. They cost nobody else a result, but the store is not healthy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import ClassVar

from fx100_lmcache.ondisk.reason import TEXTS

STORE: Mapping[str, str] = {
    "lookup_hits": "it could be loaded",
    "lookup_misses": "absent, on a member that is not up, or of another layout",
    "load_hits": "loaded and verified",
    "load_miss_absent": "not there (any more)",
    "load_miss_member_down": "part of it lies on a member that is not up",
    "load_miss_layout": "length, shapes, dtypes or format are not those of the destination",
    "load_miss_checksum": "the bytes read are not those that were written; dropped",
    "load_miss_error": "a read failed",
    "load_miss_deadline": "not there at `deadlines.load`",
    "puts_stored": "written, and found from now on",
    "puts_present": "was there already; nothing was written",
    "put_drop_backlog": "more than `io.max_write_in_flight`, or 16,384 that wait for space",
    "put_drop_full": "no space came free in time",
    "put_drop_being_erased": "the object that it replaces could not be erased",
    "put_drop_deadline": "not written at `deadlines.store`",
    "put_drop_error": "a write failed",
    "put_drop_no_space_below": "the storage below had no room, and nothing else could go",
    "put_drop_conflict": "the same name with another layout is being written",
    "put_drop_impossible": "larger than the volume takes",
    "put_drop_cleared": "the shard was cleared meanwhile",
    "put_drop_claim_lost": "another process has taken the shard over",
    "put_drop_claim_stale": "the claim could not be renewed for so long that it may be replaced",
    "put_drop_claim_unread": "no member gave the claim to read, so it may be somebody else's",
    "put_drop_closing": "the store is being closed",
    "put_drop_internal": "a defect of ours; see the log",
    "read_bytes": "bytes loaded and verified",
    "written_bytes": "bytes of objects stored",
    "read_us": "microseconds of all loads; those at once are added up",
    "written_us": "microseconds of all puts; those at once are added up",
    "evictions": "objects evicted by ourselves",
    "removes": "objects removed by LMCache, its evictor included",
    "clears": "times that a shard was cleared",
    "checksum_failures": "objects that were damaged, and dropped",
    "deadline_misses": "loads and puts that were not done in time",
    "bounced_transfers": "transfers copied through a buffer of our own",
    "internal_errors": "defects of ours, want of memory or threads; see the log",
    "claim_renewals": "renewals of the claims that tell other hosts that this server lives",
    "claim_renewal_failures": "renewals that no member took in time",
    "claim_lost": "claims that another process has taken over",
    "claims_taken_over": "claims of others that were replaced on the operator's word",
    "claims_taken_over_by_watch": "claims of others that stood still, and were replaced",
    "writes_without_claim": "writes refused since the claim was not known to hold",
    "erase_failures": "inodes that could not be erased; tried again",
    "nvme_reconnects": "NVMe-oF paths that the kernel had given up, connected again",
    "nvme_reconnect_failures": "attempts at that which failed",
    "torn_inodes": "inodes that a crash had left half written",
    **{f"inodes_dropped_{reason}": f"when opened: {text}" for reason, text in TEXTS.items()},
    "unreadable_inodes": "inodes that a device could not read when the volume was opened",
    "lookup_layout_mismatches": "layouts that a lookup refused",
    "puts_replacing": "objects that replaced one of another layout",
    "unpins_of_nothing": "unpins of what was not pinned (any more)",
}
"""Counters of `Store.status`, under ``counts``."""

_ADAPTERS: Mapping[str, str] = {
    "keys_refused_malformed": "keys that are none of LMCache's; see the log",
    "keys_refused_no_model_tag": "keys of models that `identity.require_model_tag` shuts out",
    "keys_refused_scope": "keys with a field longer than an inode takes",
    "call_errors": "defects in calls, answered as a miss; see the log",
    "load_errors": "defects while loading; see the log",
    "event_errors": "defects while handling results; see the log",
}

ADAPTER: Mapping[str, str] = {
    **_ADAPTERS,
    "keys_refused_long_hash": "mp: keys with a chunk hash of more than 32 bytes",
    "store_tasks_done": "mp: store tasks that succeeded",
    "store_tasks_failed": "mp: store tasks with an object that was not stored",
    "store_tasks_refused": "mp: store tasks that could not be begun; see the log",
    "load_buffers_refused": "mp: destinations that cannot be written to; see the log",
    "store_errors": "mp: defects while storing; see the log",
    "lookup_errors": "mp: defects in lookups; see the log",
    "unlock_errors": "mp: defects in unlocks; see the log",
    "delete_errors": "mp: defects in deletions; see the log",
    "listener_errors": "mp: listeners of LMCache that failed; see the log",
}
"""Counters of ``lmcache server``, under ``adapter_counts``."""

PLUGIN: Mapping[str, str] = {
    **_ADAPTERS,
    "keys_refused_tags": "worker: keys with a request tag that cannot be hashed",
    "callback_errors": "worker: callbacks of LMCache that failed; see the log",
    "layer_load_failures": "worker: layers not loaded; vLLM was told, or the engine stopped",
    "put_after_failed_load": "worker: chunks not stored, computed in a pass whose load failed",
    "load_no_memory": "worker: chunks not loaded since LMCache's host memory was full",
    "load_layout": "worker: chunks whose layout does not suit this rank",
    "loads_abandoned": "worker: loads given up at their deadline",
    "put_queue_full": "worker: chunks dropped, the queue holds half of the host memory",
    "put_duplicate": "worker: chunks that were queued already",
    "put_not_admitted": "worker: chunks offered for the first time, see `inprocess.admission`",
    "put_refused": "worker: chunks that cannot be stored; see the log",
    "put_failed": "worker: chunks that the store did not take",
    "put_errors": "worker: defects while storing; see the log",
    "put_closed": "worker: chunks offered while closing",
    "put_abandoned": "worker: chunks still queued when the store closed",
}
"""Counters of a vLLM worker, under ``plugin_counts``."""


class Tally(Counter[str]):
    """Counters by name, each there from zero.

    Parameters
    ----------
    known : iterable of str
        Their names: a table of this module. A name that is not in it does no harm, and is an
        error in tests.
    """

    strict: ClassVar[bool] = False
    """Whether to raise for a name that is not known; for tests."""

    def __init__(self, known: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(known, 0))

    def __missing__(self, name: str) -> int:
        """Begin at zero.

        Raises
        ------
        KeyError
            In tests.
        """
        if self.strict:
            raise KeyError(f"the counter {name!r} is not listed in fx100_lmcache.counters")
        return 0


def defects_in(counts: Mapping[str, int]) -> list[str]:
    """Say in one problem, for an operator, which defects were counted; nothing if none was."""
    found = [f"{n} {name}" for name, n in counts.items() if n and name.endswith("_errors")]
    return [f"defects since the start ({', '.join(found)}): see the log"] if found else []
