"""A path is lost and comes back: what our store and LMCache's own adapters make of it.

    tests/nvmet/run -m 6G .venv/bin/python -m benchmarks.nvmet.path_loss

Of each contender's four namespaces one loses its only path. Meanwhile a session is loaded and a few
new chunks are stored; both are tried again when the path is back. Prints one JSON object: how long
each took, what was served, and when the whole session could be loaded and stored again. All are
connected with the same timers: those of our plan, with which the kernel fails I/O on a lost path
after 2 s, or with `--kernel-timers` those of `nvme connect`, with which it does so after 600 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from benchmarks.nvmet.setup import Contender, available, contenders
from support.nvmet_store import wait_until

OUTAGE_S = 30.0
PATIENCE_S = 60.0
STORED_MEANWHILE = 2


class Call:
    """A load or a store, sent and perhaps not answered yet."""

    def __init__(self, each: Contender, what: str, chunks: range) -> None:
        self._child, self._what, self._chunks = each.child, what, chunks
        self._sent = time.monotonic()
        each.child.send(what, *(([chunks], "idle", True) if what == "load" else (chunks,)))

    def answered(self, until: float) -> bool:
        """Wait for the answer up to a time."""
        return self._child.waits(max(0.1, until - time.monotonic()))

    def outcome(self) -> dict[str, object]:
        """Wait for the answer; return seconds and numbers of chunks."""
        try:
            found = self._child.receive(self._what)
        except RuntimeError as problem:
            return {"failed": str(problem).strip().rpartition("\n")[2]}
        told = {"s": round(time.monotonic() - self._sent, 2), "of": len(self._chunks)}
        if self._what == "store":
            return {**told, "done": found}
        return {**told, "done": found["loaded"], "wrong": found["wrong"]}


def lose_and_return(each: Contender, chunks: range) -> dict[str, object]:
    """Lose a path, load and store, give the path back, load and store again."""
    assert Call(each, "store", chunks).outcome()["done"] == len(chunks), each.name
    checked = Call(each, "load", chunks).outcome()
    assert (checked["done"], checked["wrong"]) == (len(chunks), 0), (each.name, checked)
    calls = (("load", chunks), ("store", range(chunks.stop, chunks.stop + STORED_MEANWHILE)))
    each.port.take_away()
    until = time.monotonic() + OUTAGE_S
    try:
        wait_until("the path is lost", lambda: not each.live())
        told, open_call = _during(each, calls, until)
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        each.port.give_back()
    back = time.monotonic()
    wait_until("the path is back", each.live)
    told["path back after s"] = round(time.monotonic() - back, 1)
    if open_call is not None:
        told["answered after the return"] = open_call.outcome()
    return {**told, **{f"{what}, path back": _until_done(each, what, n, back) for what, n in calls}}


def _during(
    each: Contender, calls: tuple[tuple[str, range], ...], until: float
) -> tuple[dict[str, object], Call | None]:
    """Call one after the other; return what came of it, and the call that was not answered."""
    told: dict[str, object] = {}
    for what, chunks in calls:
        call = Call(each, what, chunks)
        if not call.answered(until):
            return {**told, f"{what}, path lost": "no answer during the outage"}, call
        told[f"{what}, path lost"] = call.outcome()
    return told, None


def _until_done(each: Contender, what: str, chunks: range, back: float) -> dict[str, object]:
    """Call again and again until everything is done, or patience ends."""
    while True:
        outcome = Call(each, what, chunks).outcome()
        elapsed = time.monotonic() - back
        if outcome.get("done") == len(chunks):
            return {**outcome, "all after s": round(elapsed, 1)}
        if elapsed > PATIENCE_S:
            return {**outcome, "all after s": f"not within {PATIENCE_S:g}"}
        time.sleep(0.5)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", default="fs_native-4,raw_block-posix")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--kernel-timers", action="store_true")
    asked = parser.parse_args()
    names = available(asked.contenders)
    result = {}
    with contenders(names, asked.chunks) as found:
        for each in found:
            if asked.kernel_timers:
                each.use_kernel_timers()
            result[each.name] = lose_and_return(each, range(asked.chunks))
            print(f"{each.name}: {result[each.name]}", file=sys.stderr)
    timers = "nvme connect's" if asked.kernel_timers else "our plan's"
    print(json.dumps({"timers": timers, "outage_s": OUTAGE_S, **result}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
