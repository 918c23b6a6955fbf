"""Every public method of the plugin, with arguments of any kind, open and closed: no exception."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from fx100_lmcache.counters import PLUGIN, STORE
from fx100_lmcache.lmcache.inprocess.forward_pass import LayerLoadError
from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from support.inprocess import (
    LAYERS,
    free,
    holds,
    key,
    keys,
    new_obj,
    pool_bytes,
    put,
    settle,
    wait_until,
)
from support.strange import Strange

NOTHING = type(None)

ANSWERS: dict[str, tuple[type, ...]] = {
    "async_batched_submit_put_task": (NOTHING,),
    "batched_async_contains": (int,),
    "batched_contains": (int,),
    "batched_get_blocking": (list,),
    "batched_get_non_blocking": (list,),
    "batched_remove": (int,),
    "batched_submit_put_task": (NOTHING,),
    "cancel_request": (NOTHING,),
    "clear": (int,),
    "close": (NOTHING,),
    "contains": (bool,),
    "exists_in_put_tasks": (bool,),
    "get_allocator_backend": (LocalCPUBackend,),
    "get_blocking": (MemoryObj, NOTHING),
    "get_non_blocking": (NOTHING,),
    "pin": (bool,),
    "remove": (bool,),
    "report_status": (dict,),
    "touch_cache": (NOTHING,),
    "unpin": (bool,),
}


def hostile() -> list[Any]:
    layers = key(3).split_layers(LAYERS)
    return [
        None,
        [],
        {},
        "",
        "text",
        b"x",
        0,
        -1,
        2**70,
        float("nan"),
        object(),
        Strange(),
        [None],
        [object(), Strange()],
        [key(0), None, key(1)],
        [[]],
        keys(2000, 10),
        key(1, model_name="x" * 70_000),
        [key(1, worker_id=2**70), key(2, chunk_hash=2**300)],
        key(1, request_configs={"lmcache.tag.a": ["no", "hash"]}),
        layers[0],
        layers,
        [*layers[:2], key(0), None],
    ]


def well_meant(plugin: FX100StoragePlugin, name: str) -> Any:
    return {
        "key": key(0),
        "keys": keys(2),
        "objs": [new_obj(plugin.local_cpu_backend, n) for n in range(2)] if name == "objs" else [],
        "pin": True,
        "lookup_id": "request",
        "force": True,
        "req_id": "request",
    }.get(name)


def calls_of(plugin: Any, method: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments: one of them strange, and all of them strange alike."""
    names = list(inspect.signature(method).parameters)
    yield {name: well_meant(plugin, name) for name in names}
    for value in hostile():
        for name in names:
            others = {n: well_meant(plugin, n) for n in names if n != name}
            yield {**others, name: value}
        if len(names) > 1:
            yield dict.fromkeys(names, value)


def answer_of(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if not inspect.iscoroutinefunction(method):
        return method(**arguments)
    try:
        return asyncio.run(method(**arguments))
    except LayerLoadError:  # a layer is missing, and nobody can be told: the engine must stop
        return []


def call_all(plugin: FX100StoragePlugin, name: str) -> None:
    method = getattr(plugin, name)
    for arguments in calls_of(plugin, method):
        answer = answer_of(method, arguments)
        assert isinstance(answer, ANSWERS[name]), (name, arguments)
        if name == "batched_get_blocking":
            assert isinstance(answer, list)
            assert len(answer) == size_of(arguments["keys"])
        if isinstance(answer, list):
            free(answer)
        elif name == "get_blocking":
            free([answer])
        settle(plugin)
        given = arguments.get("objs")
        free([o for o in given if isinstance(o, MemoryObj)] if isinstance(given, list) else [])


def size_of(some: Any) -> int:
    try:
        return len(list(some))
    except (TypeError, RuntimeError):
        return 0


def test_every_method_is_looked_at() -> None:
    named = inspect.getmembers(FX100StoragePlugin, inspect.isfunction)
    assert {name for name, _ in named if not name.startswith("_")} == set(ANSWERS)


def test_nothing_is_raised_whatever_is_given(plugin: FX100StoragePlugin) -> None:
    for name in ANSWERS:
        if name == "close":
            continue
        put(plugin, keys(2))
        call_all(plugin, name)
        put(plugin, keys(2, 50))
        found = plugin.batched_get_blocking(keys(2, 50))
        assert all(holds(obj, n) for n, obj in enumerate(found, 50)), name
        free(found)
        wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)


def test_a_closed_plugin_answers_whatever_is_given(plugin: FX100StoragePlugin) -> None:
    put(plugin, keys(2))
    for name in ("close", *ANSWERS):
        call_all(plugin, name)
    assert "the plugin is closed" in plugin.report_status()["problems"]
    wait_until(lambda: pool_bytes(plugin.local_cpu_backend) == 0)


def test_counters_are_all_there_from_zero(plugin: FX100StoragePlugin) -> None:
    status = plugin.report_status()
    renewed = {"claim_renewals": status["counts"]["claim_renewals"]}  # once or more, to open
    assert status["counts"] == dict.fromkeys(STORE, 0) | renewed
    assert status["plugin_counts"] == dict.fromkeys(PLUGIN, 0)
