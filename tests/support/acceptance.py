"""Small acceptance runs: a volume of files, and programs that answer as fio, nvme and others do."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from typer.testing import Result

from fx100_lmcache.testing.volumes import file_volume
from support.cli import fx100

FIO = """
import configparser, json, os, sys
job = configparser.ConfigParser(strict=False, allow_no_value=True)
job.read(sys.argv[-1])
slow = os.environ.get("FAKE_SLOW_MEMBER", "-")
names = job["global"]["filename"].split(":")
speed = 1e9 if slow not in names or len(names) > 1 else 0.5e9
jobs = []
for name in job.sections()[1:]:
    side = {"io_bytes": int(speed), "runtime": 1000, "iops": speed / int(job[name]["bs"]),
            "clat_ns": {"percentile": {f"{p}": 1_000_000 for p in
                                       ("50.000000", "95.000000", "99.000000", "99.900000")}}}
    none = {"io_bytes": 0, "runtime": 0, "iops": 0, "clat_ns": {}}
    reads = "write" not in job[name]["rw"]
    jobs.append({"jobname": name, "error": 0, "read": side if reads else none,
                 "write": none if reads else side})
print(json.dumps({"jobs": jobs}))
"""
"""Answers with fio's JSON: 1 GB/s for every cell, half of it for one member alone."""

SMALL: dict[str, Any] = {
    "g1": {
        "fio": {"block_sizes": ["1MiB"], "depths": [1, 8], "patterns": ["sequential"]},
        "min_gb_per_s": 0.5,
        "min_paths": 1,
        "mtu_bytes": None,
        "port_mbit_per_s": None,
        "path_back": "100ms",
    },
    "g2": {
        "session": "256KiB",
        "window": "256KiB",
        "concurrency": [1, 2],
        "runs": 1,
        "fio_depths": [1],
        "engine_to_fio": 0,
        "parallel_to_sequential": 0,
        "fairness": 100,
    },
    "g4": {"hours": 0.0003, "segment": "1s", "objects": 8, "threads": 2},
}


@dataclass
class Site:
    """A volume, criteria, and a directory of programs that stands before all others."""

    root: Path
    config: Path
    criteria: Path
    programs: Path

    def program(self, name: str, text: str) -> Path:
        """Make a Python program."""
        path = self.programs / name
        path.write_text(f"#!{sys.executable} -IS\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def set(self, gate: str, **values: Any) -> None:
        """Change criteria of one gate."""
        whole = yaml.safe_load(self.criteria.read_text())
        whole.setdefault(gate, {}).update(values)
        self.criteria.write_text(yaml.safe_dump(whole))

    def accept(self, gate: str, *arguments: object) -> Result:
        """Run a gate."""
        fixed = ("--criteria", self.criteria, "--out", self.out(gate), "--yes")
        return fx100("accept", gate, self.config, *fixed, *arguments)

    def out(self, gate: str) -> Path:
        return self.root / "results" / gate

    def report(self, gate: str) -> dict[str, Any]:
        """Read the report, by step."""
        found: dict[str, Any] = json.loads((self.out(gate) / "report.json").read_text())
        return found

    def verdicts(self, gate: str) -> dict[str, str]:
        return {step["name"]: step["verdict"] for step in self.report(gate)["steps"]}


def make_site(root: Path, **sections: Any) -> Site:
    """Make a volume of three files, criteria that are quick, and no programs."""
    config = file_volume(
        root / "volume", members=3, size="4MiB", volume={"object": "64KiB"}, **sections
    )
    criteria, programs = root / "criteria.yaml", root / "bin"
    criteria.write_text(yaml.safe_dump(SMALL))
    programs.mkdir()
    return Site(root, config, criteria, programs)
