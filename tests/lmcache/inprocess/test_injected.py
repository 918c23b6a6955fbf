"""Whatever raises, and whenever: nothing leaves the plugin, and no memory, pin or reader stays."""

import asyncio
import gc
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache.v1.memory_management import MemoryFormat, TensorMemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.inprocess import forward_pass as inprocess_step
from fx100_lmcache.lmcache.inprocess import layers as inprocess_layers
from fx100_lmcache.lmcache.inprocess import loads as inprocess_loads
from fx100_lmcache.lmcache.inprocess import puts as inprocess_puts
from fx100_lmcache.lmcache.inprocess.keys import KeyNamer
from fx100_lmcache.lmcache.inprocess.loads import Loads
from fx100_lmcache.lmcache.inprocess.puts import PutQueue
from fx100_lmcache.store import Store
from support.injected import InjectedError, Injection, each_call
from support.inprocess import (
    LAYER_SHAPE,
    LAYERS,
    free,
    holds,
    key,
    keys,
    live_pins,
    mount_on,
    new_obj,
    plugin_on,
    pool_bytes,
    put,
    settle,
    stand_in_for_mount,
    wait_until,
    wild_members,
    write_config,
)

SHORT = {"load": "300ms", "store": "300ms", "pin_ttl": "1s"}
LAYER = {"shape": LAYER_SHAPE, "fmt": MemoryFormat.KV_T2D}
DOWN = TensorMemoryObj.ref_count_down

Into = Callable[[Injection, pytest.MonkeyPatch], None]


def into(owner: Any, *names: str) -> Into:
    return lambda injection, patch: injection.into(patch, owner, *names)


def into_step(injection: Injection, patch: pytest.MonkeyPatch) -> None:
    injection.into(patch, inprocess_step, "find_connector")


def into_buffers(injection: Injection, patch: pytest.MonkeyPatch) -> None:
    injection.into(patch, inprocess_puts, "io_buffer", "layout_of", "packed_meta")
    injection.into(patch, inprocess_loads, "io_buffer")


PLACES: dict[str, Into] = {
    "key namer": into(KeyNamer, "digests", "scope_of"),
    "lookups": into(Store, "lookup"),
    "unpins": into(Store, "unpin"),
    "puts": into(Store, "put"),
    "descriptions": into(Store, "describe"),
    "loads": into(Store, "load"),
    "removals": into(Store, "remove"),
    "clear": into(Store, "clear"),
    "queue of puts": into(PutQueue, "offer", "holds"),
    "both kinds of loads": into(Loads, "get", "get_async"),
    "promises": into(inprocess_layers.Promises, "make", "end", "stands"),
    "counters": into(Counts, "add"),
    "step": into_step,
    "buffers": into_buffers,
    "allocator": into(LocalCPUBackend, "allocate"),
    "references": into(TensorMemoryObj, "ref_count_up", "ref_count_down"),
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration whose volume is in memory, with short deadlines."""
    path = write_config(tmp_path, deadlines=SHORT)
    stand_in_for_mount(monkeypatch, mount_on(wild_members(2, 8 << 20)))
    monkeypatch.setattr(inprocess_puts, "AFTER_S", 0.01)
    return path


@pytest.fixture
def _no_log() -> Iterator[Any]:
    """A traceback that is kept keeps what it has seen."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Traffic:
    """What LMCache does with a plugin, in all of its modes; every answer is looked at."""

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin
        # made before anything fails
        backend = plugin.local_cpu_backend
        self.objects = [new_obj(backend, n) for n in range(3)]
        self.layers = key(7).split_layers(LAYERS)
        self.of_layers = [new_obj(backend, 7, **LAYER) for _ in self.layers]
        self.loaded: list[Any] = []

    def run(self) -> None:
        plugin = self.plugin
        told: list[Any] = []
        plugin.batched_submit_put_task(keys(3), self.objects, on_complete_callback=told.append)
        plugin.batched_submit_put_task(self.layers, self.of_layers)
        plugin.batched_submit_put_task(keys(1, 9), [None])
        assert plugin.exists_in_put_tasks(key(0)) in (True, False)
        settle(plugin)
        self._look_up_and_unpin()
        self._load(plugin.batched_get_blocking(keys(4)), 4)
        self._load([plugin.get_blocking(key(0))], 1)
        asyncio.run(self._asynchronously())
        self._layer_by_layer()
        assert plugin.remove(key(0)) in (True, False)
        assert plugin.batched_remove(keys(3)) in range(4)
        assert plugin.report_status()["shard"] == 0
        assert plugin.clear() >= 0

    def _look_up_and_unpin(self) -> None:
        plugin = self.plugin
        for one in keys(plugin.batched_contains(keys(4), pin=True)):
            assert plugin.unpin(one) in (True, False)
        for pin in (plugin.pin, lambda one: plugin.contains(one, pin=True)):
            if pin(key(1)):
                plugin.unpin(key(1))

    def _load(self, found: list[Any], count: int) -> None:
        assert len(found) == count
        self.loaded += [obj for obj in found if obj is not None]
        assert all(obj is None or holds(obj, n) for n, obj in enumerate(found))

    async def _asynchronously(self) -> None:
        plugin = self.plugin
        found = await plugin.batched_async_contains("request", keys(3), pin=True)
        loaded = await plugin.batched_get_non_blocking("request", keys(3))
        assert found in range(4)
        self._load(loaded, len(loaded))

    def _layer_by_layer(self) -> None:
        plugin, layers = self.plugin, self.layers
        for one in layers[: plugin.batched_contains(layers, pin=True)]:
            plugin.unpin(one)
        if plugin.contains(layers[0], pin=True):
            plugin.unpin(layers[0])

    def let_go(self) -> None:
        for obj in (*self.objects, *self.of_layers, *self.loaded):
            DOWN(obj)
        self.__dict__.clear()


# what LMCache has handed out, or taken back, by a call that then fails is beyond anybody's reach
AFTER = [name for name in PLACES if name not in ("both kinds of loads", "allocator", "references")]


def nothing_is_taken(plugin: Any) -> bool:
    if pool_bytes(plugin.local_cpu_backend):
        gc.collect()  # an object that LMCache did not take back frees itself
    return pool_bytes(plugin.local_cpu_backend) == 0


@pytest.mark.parametrize(
    ("place", "after"), [*((n, False) for n in PLACES), *((n, True) for n in AFTER)]
)
@pytest.mark.usefixtures("_no_log")
def test_nothing_is_raised_and_nothing_stays_whichever_call_fails(
    config: Path, place: Any, after: Any
) -> None:
    with plugin_on(config) as plugin:
        core = plugin._store._core

        def run(injection: Injection) -> None:
            traffic = Traffic(plugin)
            with pytest.MonkeyPatch.context() as patch:
                PLACES[place](injection, patch)
                traffic.run()
                wait_until(lambda: plugin._puts.held_bytes == 0)
            traffic.let_go()
            plugin.clear()
            wait_until(lambda: nothing_is_taken(plugin))
            wait_until(lambda: live_pins(plugin) == 0)
            assert not [r for r in core.catalog.live_rows() if core.catalog.being_read(r)]

        assert each_call(run, after=after) > 0
        put(plugin, keys(2))
        found = plugin.batched_get_blocking(keys(2))
        assert all(holds(obj, n) for n, obj in enumerate(found))
        free(found)


def test_a_load_of_which_a_part_failed_keeps_what_is_out(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may still write to the memory of the part that is out."""
    with plugin_on(config, max_local_cpu_size=64 / 1024) as plugin:
        members: Any = plugin._opened.mounted.volume.members  # gated, by the configuration
        wanted = [one.split_layers(LAYERS)[0] for one in keys(100)]
        put(plugin, wanted, **LAYER)
        engine = plugin._opened.mounted.engine
        read, batches = engine.read, itertools.count(1)

        def read_but_not_the_second(several: Any) -> None:
            for batch in several:
                if next(batches) == 2:
                    raise MemoryError
                read([batch])

        monkeypatch.setattr(engine, "read", read_but_not_the_second)
        for member in members:
            member.gate.clear()
        assert plugin.batched_get_blocking(wanted) == [None] * 100
        assert pool_bytes(plugin.local_cpu_backend) > 0
        for member in members:
            member.gate.set()
        wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)


def test_an_abandoned_load_whose_loop_is_gone_gives_its_memory_back_once(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[Any] = []
    with plugin_on(config) as plugin:
        put(plugin, keys(4))
        members: Any = plugin._opened.mounted.volume.members  # gated, by the configuration
        for member in members:
            member.gate.clear()
        monkeypatch.setattr(
            TensorMemoryObj,
            "ref_count_down",
            lambda self: (given_back.append(id(self)), DOWN(self))[1],
        )
        loop = asyncio.new_event_loop()
        task = loop.create_task(plugin.batched_get_non_blocking("a", keys(4)))
        loop.run_until_complete(asyncio.sleep(0.05))
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        for member in members:
            member.gate.set()
        wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)
        plugin._loads._events.settle(10)
    assert len(given_back) == len(set(given_back)) == 4


def test_a_defect_is_a_problem_in_the_status(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with plugin_on(config) as plugin:
        assert plugin.report_status()["healthy"]
        monkeypatch.setattr(plugin._store, "lookup", Injection(1).around(plugin._store.lookup))
        assert plugin.contains(key(1)) is False
        status = plugin.report_status()
        assert status["healthy"] is False
        assert "1 call_errors" in " ".join(status["problems"])
        assert plugin.contains(key(1)) is False
        assert plugin.report_status()["plugin_counts"]["call_errors"] == 1


def test_a_constructor_that_fails_anywhere_leaves_the_shard_free(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fx100_lmcache.lmcache import events, plugin
    from fx100_lmcache.lmcache.inprocess import registry as inprocess_registry

    def run(injection: Injection) -> None:
        with monkeypatch.context() as patch:
            injection.into(patch, events.EventThread, "start")
            injection.into(patch, inprocess_registry, "PutQueue", "Loads")
            injection.into(patch, plugin, "KeyNamer", "LayeredChunks", "ForwardPass")
            if injection.fail_at:
                with pytest.raises(InjectedError), plugin_on(config):
                    pass
            else:
                with plugin_on(config):
                    pass

    assert each_call(run) == 7
    with plugin_on(config) as opened:
        put(opened, [key(1)])
        assert opened.contains(key(1))
