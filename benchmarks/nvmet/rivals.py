"""Loads through nvme-tcp: our store beside LMCache's own adapters on md-RAID0, in turns.

    tests/nvmet/run -m 6G .venv/bin/python -m benchmarks.nvmet.rivals

prints one JSON object: GB/s of each round. See `setup.py` for what each of them runs on, and
`fio.py` for the guest's one CPU and for `--wire-gbit`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys

from benchmarks.nvmet.fio import CHUNK_BYTES, wire
from benchmarks.nvmet.setup import Contender, available, contenders


def measure(found: list[Contender], chunks: range, rounds: int) -> dict[str, object]:
    """Store everything, check that it comes back, then load it in turns."""
    speeds: dict[str, list[float]] = {each.name: [] for each in found}
    for each in found:
        each.child.call("store", chunks)
        checked = each.child.call("load", [chunks], "idle", True)
        assert (checked["loaded"], checked["wrong"]) == (len(chunks), 0), (each.name, checked)
    for _ in range(rounds):
        for each in found:
            loaded = each.child.call("load", [chunks], "idle")
            assert loaded["loaded"] == len(chunks), (each.name, loaded)
            speeds[each.name].append(len(chunks) * CHUNK_BYTES / loaded["wall_s"] / 1e9)
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    ours, *rivals = medians.values()
    return {
        "gb_s": {name: [round(one, 3) for one in each] for name, each in speeds.items()},
        "median_gb_s": {name: round(one, 3) for name, one in medians.items()},
        "ours_to_best_rival": round(ours / max(rivals), 3),
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", default="fs_native-4,fs_native-32,raw_block-posix")
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wire-gbit", type=float, default=0.0, help="Gbit/s of loopback")
    asked = parser.parse_args()
    names = available(asked.contenders)
    with contenders(names, asked.chunks) as found, wire(asked.wire_gbit):
        result = measure(found, range(asked.chunks), asked.rounds)
    told = {"cpus": os.cpu_count(), "chunks": asked.chunks, "wire_gbit": asked.wire_gbit}
    print(json.dumps({**told, **result}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
