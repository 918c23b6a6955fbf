"""Random operations against LMCache's own engine while everything fails now and then.

``FX100_RANDOM_OPS`` sets the number of operations of each mode (10,000 before a release).
"""

import asyncio
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from support.inprocess import (
    CHUNK_TOKENS,
    WAIT_S,
    counts,
    descriptors,
    key,
    mount_on,
    pins,
    pool_bytes,
    put,
    stand_in_for_mount,
    wait_until,
    wild_members,
    write_config,
)
from support.inprocess_engine import Served, Vllm, served

OPERATIONS = int(os.environ.get("FX100_RANDOM_OPS", "800"))
MODES = {
    "sync": {},
    "sync_with_ram": {"local_cpu": True},
    "async": {"enable_async_loading": True},
    "layerwise": {"use_layerwise": True},
}
DEADLINES = {"load": "150ms", "store": "150ms", "close": "1s", "pin_ttl": "5s"}
POOL_GIB = 40 * 32768 / 2**30
MAX_CHUNKS = 24
FAMILIES = 6


class Chaos:
    """One worker, random requests, and a second thread that asks at the same time."""

    def __init__(
        self, worker: Served, members: Any, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.worker = worker
        self.members = members
        self.rng = random.Random(seed)
        self.log: list[str] = []
        self.retrieved = self.refused = 0
        self.aborted: list[str] = []
        self.vllm = Vllm()
        self.vllm.install(monkeypatch)
        self._monkeypatch = monkeypatch
        self._stop = threading.Event()
        self.problems: list[BaseException] = []
        self._side = threading.Thread(target=self._ask)
        self.break_allocator()

    def break_allocator(self) -> None:
        """Fail an allocation now and then, as a pool does that is full."""
        backend = self.worker.manager.local_cpu_backend
        for name in ("allocate", "batched_allocate"):
            real = getattr(backend, name)

            def flaky(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                assert not kwargs.get("busy_loop", True), "an allocation without a bound"
                return None if self.rng.random() < 0.02 else real(*args, **kwargs)

            self._monkeypatch.setattr(backend, name, flaky)

    def run(self, operations: int) -> None:
        choices = [
            (self.store, 30),
            (self.request, 45),
            (self.abort, 4),
            (self.remove, 6),
            (self.get_directly, 8),
            (self.mood, 6),
            (self.clear, 0.3),
            (self.recreate, 0.3),
        ]
        calls, weights = zip(*choices, strict=True)
        self._side.start()
        try:
            for call in self.rng.choices(calls, weights, k=operations):
                self.log.append(call.__name__)
                call()
        finally:
            self._stop.set()
            self._side.join(WAIT_S)
        assert not self._side.is_alive()

    def prompt(self) -> list[int]:
        family = self.rng.randrange(FAMILIES)
        tokens = random.Random(family).choices(range(500), k=MAX_CHUNKS * CHUNK_TOKENS)
        return tokens[: self.rng.randint(1, MAX_CHUNKS) * CHUNK_TOKENS]

    def store(self) -> None:
        self.worker.store(self.prompt())

    def request(self) -> None:
        tokens = self.prompt()
        request, promised = self.worker.lookup(tokens)
        with self.vllm.step(promised):
            got = self.worker.retrieve(request, tokens, promised)
        assert got <= promised
        self.retrieved += got
        if self.vllm.take_invalid_tokens():
            self.refused += 1  # vLLM computes it
        else:
            assert self.worker.right(tokens[:got]), self.log[-20:]
            assert got == promised or not self.worker.layerwise

    def abort(self) -> None:
        """Look up and never load: the request was cancelled."""
        request, _ = self.worker.lookup(self.prompt())
        self.aborted.append(request)

    def remove(self) -> None:
        tokens = self.prompt()
        for _, _, one in list(self.worker.tokens.process_tokens(tokens))[-3:]:
            self.worker.manager.remove(one, ["fx100"])

    def get_directly(self) -> None:
        chunks = self.worker.chunk_keys(self.prompt())
        self.rng.shuffle(chunks)
        if self.rng.random() < 0.5:
            found = self.worker.manager.batched_get(chunks, "fx100")
            assert len(found) == len(chunks)
        else:
            coroutine = self.worker.plugin.batched_get_non_blocking("direct", chunks)
            found = asyncio.run_coroutine_threadsafe(coroutine, self.worker.manager.loop).result(
                WAIT_S
            )
            assert None not in found
        for obj in found:
            if obj is not None:
                obj.ref_count_down()

    def mood(self) -> None:
        for member in self.members:
            member.error_rate = self.rng.choice([0.0, 0.0, 0.02, 0.3])
            member.slow_rate = self.rng.choice([0.0, 0.02])
            member.stall_rate = self.rng.choice([0.0, 0.0, 0.0, 0.04])

    def clear(self) -> None:
        assert self.worker.engine.clear() >= 0

    def recreate(self) -> None:
        self.calm()  # else the volume cannot be opened, which is another test
        created = self.worker.manager.recreate_backend("fx100")
        assert created == {"fx100": "FX100StoragePlugin"}

    def calm(self) -> None:
        for member in self.members:
            member.calm()

    def _ask(self) -> None:
        """Look up, pin and unpin, as LMCache's lookup thread does."""
        rng = random.Random(99)
        try:
            while not self._stop.is_set():
                plugin = self.worker.manager.storage_backends.get("fx100")
                if plugin is None:
                    continue
                tokens = random.Random(rng.randrange(FAMILIES)).choices(range(500), k=256)
                chunks = [one for _, _, one in self.worker.tokens.process_tokens(tokens)]
                hits = plugin.batched_contains(chunks, pin=True)
                time.sleep(0.001)
                for one in chunks[:hits]:
                    plugin.unpin(one)
        except BaseException as problem:
            self.problems.append(problem)
            raise


@pytest.mark.timeout(60 + OPERATIONS // 5)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    path = write_config(tmp_path, deadlines=DEADLINES)
    before = descriptors()
    members = wild_members(2, 2 << 20)
    mount = mount_on(members)
    stand_in_for_mount(monkeypatch, mount)
    with served(path, max_local_cpu_size=POOL_GIB, **MODES[mode]) as worker:
        chaos = Chaos(worker, members, seed=len(mode), monkeypatch=monkeypatch)
        chaos.run(OPERATIONS)
        assert not chaos.problems
        assert chaos.retrieved > 0
        assert (chaos.refused > 0) == (mode == "layerwise")
        monkeypatch.undo()
        stand_in_for_mount(monkeypatch, mount)
        assert sum(member.errors for member in members) > 0
        assert sum(member.stalls for member in members) > 0
        chaos.calm()
        plugin, backend = worker.plugin, worker.manager.local_cpu_backend
        wait_until(lambda: plugin.report_status()["put_queue_bytes"] == 0)
        for request in chaos.aborted:
            worker.engine.lookup_unpin(request)
        if worker.config.local_cpu:
            backend.clear()
        wait_until(lambda: pool_bytes(backend) == 0)
        wait_until(lambda: plugin.report_status()["healthy"] or put_rarely_worked(plugin))
        assert pins(plugin) == 0
        assert counts(plugin).get("call_errors", 0) == 0
        put(plugin, [key(1)])
        plugin.remove(key(1))  # erases that failed are tried again with the next one
        wait_until(lambda: plugin.report_status()["blocks"]["quarantined"] == 0)
        blocks = plugin.report_status()["blocks"]
        assert blocks["free"] + blocks["used"] == blocks["total"]
    assert descriptors() == before


def put_rarely_worked(plugin: FX100StoragePlugin) -> bool:
    """Whether all that is wrong is what went wrong before."""
    return all("succeeded" in text or "erased" in text for text in plugin._store.problems())
