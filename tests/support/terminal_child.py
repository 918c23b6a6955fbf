"""Runs every command, each in a fork of this process and so under the streams it was given.

``terminal_child.py FOLDER RESULTS``: FOLDER holds ``odd.yaml``, ``euro.yaml`` and a sysfs tree;
RESULTS gets the exit codes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from fx100_lmcache.cli import doctor, main, nvme
from fx100_lmcache.doctor.loading import Outcome
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.volume import opening as access

ODD = "\udcff\N{EURO SIGN}\n"
DEFECT = 99

ON_A_CONFIG = [
    ["format", "--yes"], ["status"], ["status", "--json"], ["verify"], ["doctor"],
    ["doctor", "--json"], ["l2-adapter"], ["take-over", "--yes"], ["nvme", "list"],
    ["nvme", "check"], ["nvme", "discover"], ["nvme", "connect"], ["nvme", "disconnect"],
]  # fmt: skip
ALONE = [
    ["--help"], ["--version"], ["plan"], ["plan", "--model", ODD], [ODD], ["status"],
    ["doctor", "--help"], ["doctor", "x", "--mode", ODD], ["status", ODD], ["format", ODD],
]  # fmt: skip


def commands(folder: Path) -> list[list[str]]:
    configs = ["odd.yaml", "euro.yaml"]
    return ALONE + [[*each, str(folder / name)] for name in configs for each in ON_A_CONFIG]


def replace_machine(folder: Path) -> None:
    """Put a sysfs tree and an nvme-cli full of odd bytes in place of this machine's."""

    def sysfs() -> Sysfs:
        return Sysfs(folder / "sys")

    def try_imports(wanted: Any) -> list[Outcome]:
        return [Outcome("import failed", ODD) for _ in wanted]

    nvme.Sysfs = doctor.Sysfs = access.Sysfs = sysfs  # type: ignore
    nvme.NvmeCli = lambda: NvmeCli(str(folder / "nvme"))  # type: ignore
    doctor.try_imports = try_imports  # type: ignore


def run(arguments: list[str]) -> int:
    """Run one command in a fork; return its exit code."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    sys.argv = ["fx100", *arguments]
    code = DEFECT
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - what the interpreter would print
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter does at its end
    os._exit(code)


if __name__ == "__main__":
    folder, results = map(Path, sys.argv[1:])
    replace_machine(folder)
    codes = {repr(each): run(each) for each in commands(folder)}
    results.write_text(json.dumps(codes))
