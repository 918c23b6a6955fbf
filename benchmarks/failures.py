"""Record what each contender serves, overruns or refuses when something goes wrong, by running it.

A chunk counts as wrong when it was said to be loaded and a page of it is not what was stored.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from rich.progress import track

from benchmarks import options
from benchmarks.backends import BACKENDS, Sizing
from benchmarks.bounded import used_bytes
from benchmarks.child import Child, Setup
from benchmarks.common import publish, scratch
from benchmarks.replay import available

CHUNKS = 24
CHUNK_BYTES = 1 << 20
HALF_S = 4.0
"""Time for each half of the stores that a kill interrupts."""
DEFAULT = ("ours", "fs_native-4", "fs", "raw_block-posix")

Row = dict[str, Any]
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    backend: Annotated[list[str] | None, typer.Option(help="Contender; four if left out.")] = None,
    failure: Annotated[list[str] | None, typer.Option(help="One of the rows; all.")] = None,
    directory: options.Directory = options.DISK,
    memory: options.Memory = options.MEMORY_FAST,
    json_path: options.JsonPath = None,
) -> None:
    """Run the command."""
    names = available(backend or list(DEFAULT))
    wanted = failure or list(FAILURES)
    if unknown := set(wanted) - set(FAILURES):
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(FAILURES)}")
    rows = []
    for what, name in track([(w, n) for w in wanted for n in names], description="failures"):
        with scratch(directory) as home, scratch(memory) as shared:
            sizing = Sizing(CHUNK_BYTES, 2 * CHUNKS * CHUNK_BYTES)
            setup = Setup(name, home / "home", sizing, shared / "l1", CHUNKS, evict=True)
            rows.append({"failure": what, "backend": name, **_guarded(FAILURES[what], setup)})
    method = {"chunks": CHUNKS, "chunk_bytes": CHUNK_BYTES, "half_s": HALF_S}
    publish(f"{CHUNKS} chunks of {CHUNK_BYTES} bytes", rows, method, json_path)


def _guarded(work: Callable[[Setup], Row], setup: Setup) -> Row:
    """Run one row; what a contender raises is its result."""
    try:
        return work(setup)
    except Exception as problem:  # noqa: BLE001 - told in the table
        last = str(problem).strip().splitlines()[-1]
        return {"what happened": f"refused: {last[:160]}"}


@contextmanager
def _opened(setup: Setup, *, new: bool = False) -> Iterator[Child]:
    if new:
        setup.home.mkdir(parents=True, exist_ok=True)
        BACKENDS[setup.backend].prepare(setup.home, setup.sizing)
    child = Child(setup)
    try:
        yield child
    finally:
        child.close()


def _store_and_kill(setup: Setup) -> int:
    """Store all chunks and SIGKILL; return what was acknowledged."""
    setup.home.mkdir(parents=True, exist_ok=True)
    BACKENDS[setup.backend].prepare(setup.home, setup.sizing)
    child = Child(setup)
    acknowledged: int = child.call("store", range(CHUNKS))
    time.sleep(BACKENDS[setup.backend].settle_s)
    child.kill()
    return acknowledged


def _look(child: Child, first: int = 0) -> Row:
    """Load chunks one by one, so that a miss does not hide what comes after it."""
    wanted = [[chunk] for chunk in range(first, first + CHUNKS)]
    result = child.call("load", wanted, "idle", True)
    return {"found": result["loaded"], "wrong": result["wrong"]}


def flipped_bit(setup: Setup) -> Row:
    """Flip one bit of one chunk on the media."""
    acknowledged = _store_and_kill(setup)
    places = flip(setup.home, chunk=3)
    with _opened(setup) as child:
        row = _look(child)
        again = _look(child)
    verdict = "served wrong bytes" if row["wrong"] else "a miss, then gone from the index"
    if not row["wrong"] and again["found"] != row["found"]:
        verdict = "a miss"
    return {"acknowledged": acknowledged, **row, "what happened": f"{verdict} ({places} flipped)"}


def flip(home: Path, chunk: int) -> int:
    """Flip a bit in the second page of a chunk, wherever it lies; return in how many places."""
    stamp = np.uint64(((chunk + 1) << 24) + 1)
    places = 0
    for path in (p for p in home.rglob("*") if p.is_file() and p.stat().st_size >= 4096):
        pages = path.stat().st_size // 4096
        words = np.memmap(path, np.uint64, "r+", shape=(pages, 512))
        hits = np.flatnonzero(words[:, 0] == stamp)
        words[hits, 0] ^= np.uint64(1 << 60)
        words.flush()
        places += len(hits)
    return places


def kill_during_store(setup: Setup) -> Row:
    """SIGKILL while the second half of 48 chunks is being stored; the first half is complete."""
    setup.home.mkdir(parents=True)
    BACKENDS[setup.backend].prepare(setup.home, setup.sizing)
    child = Child(setup)
    child.call("facts")
    child.send("churn", 0, 2 * CHUNKS, HALF_S / CHUNKS)
    time.sleep(HALF_S + 0.01)
    child.kill()
    with _opened(setup) as child:
        first, second = _look(child), _look(child, CHUNKS)
    row = {"acknowledged": CHUNKS, **{name: first[name] + second[name] for name in first}}
    left = [p.name for p in setup.home.rglob("*") if "tmp" in p.name and p.is_file()]
    return {**row, "what happened": f"{len(left)} temporary files left" if left else "clean"}


def restart_and_capacity(setup: Setup) -> Row:
    """Fill to 0.8, SIGKILL, and store one capacity more, slowly, in a new process."""
    capacity = setup.sizing.capacity_bytes // CHUNK_BYTES
    setup.home.mkdir(parents=True)
    BACKENDS[setup.backend].prepare(setup.home, setup.sizing)
    first = Child(setup)
    filled = first.call("store", range(int(capacity * 0.8)))
    time.sleep(BACKENDS[setup.backend].settle_s)
    first.kill()
    disk = used_bytes(setup.home)
    with _opened(setup) as child:
        before = child.call("churn", 1000, 0, 0.0)["claimed_bytes"]
        after = child.call("churn", 2000, capacity, 8.0 / capacity)
    grown = (used_bytes(setup.home) - disk) / setup.sizing.capacity_bytes
    claimed = before / setup.sizing.capacity_bytes
    return {
        "acknowledged": filled + after["stored"],
        "what happened": f"usage after the restart reported as {claimed:.2f} of the capacity; "
        f"the disk use then grew by {grown:.2f} of it",
    }


def full_device(setup: Setup) -> Row:
    """Put the files on a file system of half the capacity that is configured."""
    if os.geteuid() != 0:
        return {"what happened": "not run: needs root to mount a small tmpfs"}
    setup.home.mkdir(parents=True)
    size = setup.sizing.capacity_bytes // 4
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "fx100-bench", str(setup.home)]
    subprocess.run(mount, check=True, timeout=30)
    try:
        with _opened(setup, new=True) as child:
            acknowledged = child.call("store", range(CHUNKS))
            row = _look(child)
        return {"acknowledged": acknowledged, **row, "what happened": "went on"}
    finally:
        subprocess.run(["umount", "--lazy", str(setup.home)], check=True, timeout=30)


def renamed_devices(setup: Setup) -> Row:
    """Give every file or device another name, ours in another order as well."""
    acknowledged = _store_and_kill(setup)
    moved = replace(setup, home=setup.home.with_name("renamed"))
    setup.home.rename(moved.home)
    config = moved.home / "fx100.yaml"
    if config.exists():
        whole = yaml.safe_load(config.read_text())
        paths = [Path(one["path"]).name for one in whole["volume"]["members"]]
        for number, one in enumerate(whole["volume"]["members"]):
            one["path"] = str(moved.home / paths[-1 - number])
        config.write_text(yaml.safe_dump(whole))
    with _opened(moved) as child:
        row = _look(child)
    lost = "nothing lost" if row["found"] == acknowledged else "everything or part lost"
    return {"acknowledged": acknowledged, **row, "what happened": lost}


FAILURES: dict[str, Callable[[Setup], Row]] = {
    "flipped bit": flipped_bit,
    "kill during store": kill_during_store,
    "restart, capacity": restart_and_capacity,
    "full device": full_device,
    "renamed devices": renamed_devices,
}
"""Rows by name. Path loss and return need a network: they are tests of the nvmet lab."""


if __name__ == "__main__":
    app()
