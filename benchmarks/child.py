"""One contender in a process of its own, which can be killed and started again."""

import contextlib
import multiprocessing
import os
import resource
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.backends import BACKENDS, Sizing, prepare_to_open
from benchmarks.common import busy_thread
from benchmarks.driver import Driver, Loaded, Writer
from benchmarks.l1 import Arena

WRITER_FIRST_CHUNK = 1 << 30
DEADLINE_S = 560.0


@dataclass(frozen=True)
class Setup:
    """Everything a child needs to open its contender."""

    backend: str
    home: Path
    sizing: Sizing
    arena: Path
    slots: int
    evict: bool = False


class Child:
    """The parent's end of a contender's process.

    Raises
    ------
    RuntimeError
        From a call that failed in the child, with its traceback.
    """

    def __init__(self, setup: Setup) -> None:
        os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"  # of LMCache's cloud clients
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(setup, other), daemon=True)
        self._process.start()
        other.close()

    def call(self, what: str, *args: Any) -> Any:
        """Call a method of :class:`Contender` in the child; give up after a deadline."""
        self.send(what, *args)
        return self.receive(what)

    def send(self, what: str, *args: Any) -> None:
        """Start a call without waiting for it."""
        self._pipe.send((what, args))

    def waits(self, patience_s: float) -> bool:
        """Whether the call that was sent ends in time; its result is still to be received."""
        return self._pipe.poll(patience_s)

    def receive(self, what: str = "call") -> Any:
        """Wait for the result of the call that was sent."""
        if not self.waits(DEADLINE_S):
            self.kill()
            raise RuntimeError(f"{what} did not return within {DEADLINE_S:g} s")
        try:
            failed, result = self._pipe.recv()
        except EOFError as problem:
            raise RuntimeError(f"the process ended during {what}") from problem
        if failed:
            raise RuntimeError(result)
        return result

    def kill(self) -> float:
        """SIGKILL the child; return the time, on the clock that all processes share."""
        at = time.monotonic()
        self._process.kill()
        self._process.join()
        self._pipe.close()
        return at

    def close(self) -> None:
        """Let the child close its contender and end; kill it if it does not."""
        with contextlib.suppress(OSError, RuntimeError):
            self._pipe.send(("close", ()))
            self._pipe.poll(20)
        self.kill()


def _serve(setup: Setup, pipe: Connection) -> None:
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    contender: Contender | None = None
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:  # the parent is gone
            return
        try:
            if contender is None:
                contender = Contender(setup)
            pipe.send((False, getattr(contender, what)(*args)))
        except Exception:  # noqa: BLE001 - goes to the parent whole
            pipe.send((True, traceback.format_exc()))


class Contender:
    """A contender open in this process. Its methods are what :meth:`Child.call` names."""

    def __init__(self, setup: Setup) -> None:
        backend = BACKENDS[setup.backend]
        self._home = setup.home
        self.arena = Arena(setup.arena, setup.slots, setup.sizing.chunk_bytes)
        self.spec = backend.spec(setup.home, setup.sizing)
        opener = prepare_to_open(self.spec)
        started = time.perf_counter()
        self.adapter = opener(self.arena)
        self._open_s = time.perf_counter() - started
        self.driver = Driver(self.adapter, self.arena, backend.window)
        if setup.evict:
            _start_evictor(self.adapter)

    def facts(self) -> dict[str, Any]:
        """Say what was opened, in how many seconds."""
        return {"spec": self.spec, "open_s": self._open_s, "pid": os.getpid()}

    def store(self, chunks: Sequence[int]) -> int:
        """Store chunks, stamped with their numbers; return how many were acknowledged."""
        stored = 0
        for at in range(0, len(chunks), self.arena.slots):
            part = chunks[at : at + self.arena.slots]
            for slot, chunk in enumerate(part):
                self.arena.stamp(slot, chunk)
            stored += self.driver.store(part, range(len(part)))
        return stored

    def first_hit(self, chunk: int) -> float:
        """Load one chunk, check it, and say when that was, on the clock of all processes."""
        self.arena.erase(0)
        result = self.driver.load([([chunk], [0])])[0]
        if not (result.loaded and self.arena.holds(0, chunk)):
            raise RuntimeError(f"chunk {chunk} was not loaded back")
        return time.monotonic()

    def load(
        self, sessions: list[Sequence[int]], mode: str, verify: bool = False
    ) -> dict[str, Any]:
        """Load sessions that come at once; return seconds, bytes and what was found.

        Parameters
        ----------
        mode : str
            ``idle``, ``busy`` (a Python thread spins) or ``stores`` (stores run beside).
        verify : bool
            Erase the slots before and check every page after, outside the measured time.
        """
        placed = self._place(sessions)
        if verify:
            for slot in (slot for _, slots in placed for slot in slots):
                self.arena.erase(slot)
        with self._beside(mode, placed) as writer:
            before, started = _usage(), time.perf_counter()
            results = self.driver.load(placed)
            wall = time.perf_counter() - started
            after = _usage()
        return {
            "wall_s": wall,
            "cpu_s": after["cpu_s"] - before["cpu_s"],
            "device_read_bytes": after["read_bytes"] - before["read_bytes"],
            "session_s": [one.wall_s for one in results],
            "asked": sum(len(chunks) for chunks, _ in placed),
            "loaded": sum(one.loaded for one in results),
            "wrong": self._wrong(placed, results) if verify else 0,
            "stored_beside_per_s": writer.chunks_per_s if writer else 0.0,
        }

    def _place(self, sessions: list[Sequence[int]]) -> list[tuple[Sequence[int], range]]:
        placed, at = [], 0
        for chunks in sessions:
            placed.append((chunks, range(at, at + len(chunks))))
            at += len(chunks)
        if at > self.arena.slots:
            raise ValueError(f"{at} chunks do not fit {self.arena.slots} slots")
        return placed

    def _wrong(self, placed: list[tuple[Sequence[int], range]], results: list[Loaded]) -> int:
        """Count chunks said to be loaded whose pages do not carry their stamps."""
        right = sum(
            self.arena.holds(slot, chunk)
            for chunks, slots in placed
            for chunk, slot in zip(chunks, slots, strict=True)
        )
        return sum(one.loaded for one in results) - right

    @contextlib.contextmanager
    def _beside(
        self, mode: str, placed: list[tuple[Sequence[int], range]]
    ) -> Iterator[Writer | None]:
        used = sum(len(chunks) for chunks, _ in placed)
        if mode != "stores":
            with busy_thread(mode == "busy"):
                yield None
            return
        slots = range(used, min(used + 8, self.arena.slots))
        if not slots:
            raise ValueError("no slots are left to store from")
        with Writer(self.driver, self.adapter, slots, WRITER_FIRST_CHUNK, 32) as writer:
            time.sleep(0.2)  # let it reach its speed
            yield writer

    def io_flags(self, chunks: Sequence[int]) -> dict[str, bool]:
        """Load once and say for each file or device of ours whether its descriptor is O_DIRECT."""
        found: dict[str, bool] = {}
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                _note_descriptors(self._home, found)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        for _ in range(3):
            self.driver.load(self._place([chunks]))
        stop.set()
        thread.join()
        return found

    def churn(self, first: int, count: int, pace_s: float) -> dict[str, Any]:
        """Store so many new chunks, one in ``pace_s`` at most; say how many were taken."""
        started, stored = time.perf_counter(), 0
        for at in range(0, count, self.arena.slots):
            part = range(first + at, first + min(at + self.arena.slots, count))
            stored += self.store(part)
            due = started + (at + len(part)) * pace_s
            time.sleep(max(0.0, due - time.perf_counter()))
        return {
            "stored": stored,
            "claimed_bytes": self.adapter.get_usage().total_bytes_used,
        }

    def replay(self, requests: list[Sequence[int]]) -> list[tuple[float, int, int]]:
        """Serve requests of a trace that come at once: load the known prefix, store the rest.

        Returns
        -------
        list of (seconds, chunks asked, chunks loaded)
        """
        placed = self._place(requests)
        results = self.driver.load(placed)
        missing = {
            chunk: slot
            for (chunks, slots), result in zip(placed, results, strict=True)
            for chunk, slot in list(zip(chunks, slots, strict=True))[result.loaded :]
        }
        for chunk, slot in missing.items():
            self.arena.stamp(slot, chunk)
        self.driver.store(list(missing), list(missing.values()))
        return [
            (one.wall_s, len(chunks), one.loaded)
            for (chunks, _), one in zip(placed, results, strict=True)
        ]

    def close(self) -> None:
        """Close the adapter."""
        self.adapter.close()


def _start_evictor(adapter: Any) -> None:
    """Evict as ``lmcache server`` does, by LRU above nine tenths of the capacity."""
    from lmcache.v1.distributed.config import EvictionConfig
    from lmcache.v1.distributed.storage_controllers.eviction_controller import (
        L2AdapterEvictionState,
        L2EvictionController,
    )

    config = EvictionConfig("LRU", trigger_watermark=0.9, eviction_ratio=0.2)
    L2EvictionController([L2AdapterEvictionState(0, adapter, config)]).start()


def _usage() -> dict[str, float]:
    times = resource.getrusage(resource.RUSAGE_SELF)
    lines = Path("/proc/self/io").read_text().splitlines()
    read = next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    return {"cpu_s": times.ru_utime + times.ru_stime, "read_bytes": read}


def _note_descriptors(home: Path, found: dict[str, bool]) -> None:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, StopIteration):
            target = str(entry.readlink())
            if target.startswith((str(home), "/dev/loop", "/dev/nvme")):
                info = Path(f"/proc/self/fdinfo/{entry.name}").read_text()
                flags = next(line for line in info.splitlines() if line.startswith("flags"))
                direct = bool(int(flags.split()[1], 8) & os.O_DIRECT)
                found[target] = found.get(target, False) or direct
