"""Every public method, with arguments of any kind, open, while closing and closed: no exception.

The only ones that LMCache's interface knows are ValueErrors for pages and for empty names.
"""

import inspect
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyListPage, MemoryLayoutDesc
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage

from fx100_lmcache.config import DeadlineConfig
from fx100_lmcache.lmcache.compat.mp import memory_tags
from fx100_lmcache.lmcache.l2_adapter import FX100L2Adapter
from fx100_lmcache.testing.harness import Rig
from support.l2 import Client, Recorder, adapter_on, gated_members, key, keys, memory_obj, payload
from support.l2 import threaded_adapter as threaded
from support.releases import places
from support.strange import Strange

SIZE = 4096
NOTHING = type(None)

# what comes back, and what may be raised
ANSWERS: dict[str, tuple[tuple[type, ...], tuple[type[Exception], ...]]] = {
    "close": ((NOTHING,), ()),
    "delete": ((NOTHING,), ()),
    "get_load_event_fd": ((int,), ()),
    "get_lookup_and_lock_event_fd": ((int,), ()),
    "get_memory_tags": ((type(memory_tags(remote=False)),), ()),
    "get_store_event_fd": ((int,), ()),
    "get_usage": ((AdapterUsage,), ()),
    "list_l2_keys": ((KeyListPage,), (ValueError,)),
    "pop_completed_store_tasks": ((dict,), ()),
    "query_load_result": ((Bitmap, NOTHING), ()),
    "query_lookup_and_lock_result": ((Bitmap, NOTHING), ()),
    "register_listener": ((NOTHING,), ()),
    "report_status": ((dict,), ()),
    # LMCache's own: it asks what it is given
    "set_backend_identity": ((NOTHING,), (ValueError, RuntimeError)),
    "submit_load_task": ((int,), ()),
    "submit_lookup_and_lock_task": ((int,), ()),
    "submit_store_task": ((int,), ()),
    "submit_touch": ((NOTHING,), ()),
    "submit_unlock": ((NOTHING,), ()),
}


def hostile() -> list[Any]:
    return [
        None,
        [],
        (),
        {},
        "",
        "some text",
        b"",
        0,
        -1,
        2**70,
        1.5,
        float("nan"),
        object(),
        Strange(),
        [None],
        [object()],
        [Strange()],
        [key(0), None],
        [[]],
        {0: None},
        {0: MemoryLayoutDesc([], [])},
        "9" * 18,
        "9" * 400,
        keys(3000),
        [memory_obj(SIZE), "text"],
        [key(0, model_name="x" * 70_000)],
        [key(0, kv_rank=-1), key(0, kv_rank=2**80), key(0, kv_rank=None)],
        [key(b"", cache_salt="\udcff"), key(b"x" * 31), key(b"x" * 10_000)],
    ]


def well_meant() -> dict[str, Any]:
    return {
        "keys": keys(2),
        "objects": [memory_obj(payload(n, SIZE)) for n in range(2)],
        "group_layout_descs": {},
        "task_id": 0,
        "listener": Recorder(),
        "model_name": None,
        "page_size": 10,
        "cursor": None,
        "name": "fx100",
        "shared": False,
    }


def methods() -> list[str]:
    named = inspect.getmembers(FX100L2Adapter, inspect.isfunction)
    return [name for name, _ in named if not name.startswith("_")]


def calls_of(method: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments: one of them strange, and all of them strange alike."""
    names = list(inspect.signature(method).parameters)
    yield {name: well_meant()[name] for name in names}
    for value in hostile():
        for name in names:
            yield {**{n: well_meant()[n] for n in names}, name: value}
        if len(names) > 1:
            yield dict.fromkeys(names, value)


def size_of(some: Any) -> int:
    try:
        return len(list(some))
    except (TypeError, RuntimeError):
        return 0


def call_all(client: Client, name: str) -> None:
    kinds, may_raise = ANSWERS[name]
    method = getattr(client.adapter, name)
    for arguments in calls_of(method):
        try:
            answer = method(**arguments)
        except may_raise:
            continue
        assert type(answer) in kinds or isinstance(answer, kinds), (name, arguments)
        if name == "submit_store_task":
            assert isinstance(result_of_store(client, answer), L2StoreResult)
        elif name == "submit_load_task":
            bitmap = polled(partial(client.adapter.query_load_result, answer))
            assert places(bitmap) == size_of(arguments["keys"])
        elif name == "submit_lookup_and_lock_task":
            bitmap = client.adapter.query_lookup_and_lock_result(answer)
            assert bitmap is not None
            assert places(bitmap) == size_of(arguments["keys"])


def result_of_store(client: Client, task: int) -> L2StoreResult:
    def look() -> L2StoreResult | None:
        client.results.update(client.adapter.pop_completed_store_tasks())
        return client.results.pop(task, None)

    return polled(look)


def polled(look: Callable[[], Any]) -> Any:
    until = time.monotonic() + 30
    while (found := look()) is None:
        assert time.monotonic() < until, "there is no result"
        time.sleep(0.0005)
    return found


def test_every_method_is_looked_at() -> None:
    assert set(methods()) == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("when", ["open", "closed"])
def test_nothing_is_raised_whatever_is_given(name: str, when: str) -> None:
    client = adapter_on(Rig.fresh(2, 512 * 1024))
    client.store(keys(2), [memory_obj(payload(n, SIZE)) for n in range(2)])
    if when == "closed":
        client.adapter.close()
    call_all(client, name)
    if when == "open" and name != "close":
        assert client.get(key(0), memory_obj(SIZE)) in (payload(0, SIZE), None)
        assert client.store([key(7)], [memory_obj(SIZE)]).is_successful()


def test_every_method_answers_while_the_adapter_is_closing() -> None:
    members = gated_members(2, 4 << 20)
    client = threaded(members, DeadlineConfig(load_s=2.0, store_s=2.0, close_s=1.0))
    client.store(keys(2), [memory_obj(payload(n, SIZE)) for n in range(2)])
    for member in members:
        member.gate.clear()
    stuck = client.adapter.submit_load_task(keys(2), [memory_obj(SIZE) for _ in range(2)])
    closer = threading.Thread(target=client.adapter.close)
    closer.start()
    while not client.adapter._store.closing:
        time.sleep(0.001)
    for name in ANSWERS:
        method = getattr(client.adapter, name)
        names = inspect.signature(method).parameters
        answer = method(**{each: well_meant()[each] for each in names})
        assert isinstance(answer, ANSWERS[name][0]), name
    assert client.adapter.query_load_result(stuck) is None, "the kernel has its buffers"
    closer.join(10)
    assert not closer.is_alive()
    for member in members:
        member.gate.set()
    assert places(polled(lambda: client.adapter.query_load_result(stuck))) == 2


def test_calls_race_with_close_and_each_is_answered() -> None:
    members = gated_members(2, 4 << 20)
    for turn in range(20):
        client = threaded(members, DeadlineConfig())
        adapter = client.adapter
        loads: list[int] = []
        stores: list[int] = []

        def work(adapter: Any = adapter, loads: Any = loads, stores: Any = stores) -> None:
            for number in range(60):
                stores.append(adapter.submit_store_task([key(number)], [memory_obj(SIZE)]))
                loads.append(adapter.submit_load_task([key(number)], [memory_obj(SIZE)]))

        worker = threading.Thread(target=work)
        worker.start()
        time.sleep(turn / 2000)
        adapter.close()
        worker.join(30)
        for task in stores:
            result_of_store(client, task)
        for task in loads:
            polled(partial(adapter.query_load_result, task))


def test_a_forked_childs_adapter_still_answers() -> None:
    client = adapter_on(Rig.fresh(2, 512 * 1024))
    client.store([key(0)], [memory_obj(payload(0, SIZE))])
    client.settle()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads
        child = os.fork()
    if child == 0:
        os._exit(0 if answers(client) else 1)
    until = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.005)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0), "it hangs, or has no answer"
    assert client.get(key(0), memory_obj(SIZE)) == payload(0, SIZE)


def answers(client: Client) -> bool:
    """Whether a lookup and a load come to an end, in a process without the adapter's threads."""
    adapter = client.adapter
    lookup = adapter.submit_lookup_and_lock_task([key(1)], {})
    load = adapter.submit_load_task([key(1)], [memory_obj(SIZE)])
    results = (adapter.query_lookup_and_lock_result(lookup), adapter.query_load_result(load))
    return all(bitmap is not None and bitmap.popcount() == 0 for bitmap in results)
