"""Both faces of LMCache over members that are NVMe identities, before and after a lost path.

They need LMCache, whose import takes about a minute in the guest; so it is imported once, and only
when one of these tests runs.
"""

import argparse
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fx100_lmcache.nvmf.plan import HostIdentity
from support.nvmet_store import Array, fx100, wait_until
from support.nvmet_target import Target
from support.with_lmcache import import_quietly

CHUNKS = 8
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning"),
]


def shared(name: str, *needed: str) -> ModuleType:
    """Import what the tests of a face share, and LMCache with it."""
    import_quietly(*needed, name)
    return sys.modules[name]


@pytest.fixture
def array(target: Target, host: HostIdentity, tmp_path: Path) -> Array:
    made = Array(target, host, tmp_path)
    made.add()
    made.add()
    return made


def prepared(array: Array, model: str, chunk_bytes: int) -> Path:
    """Write the YAML of a face, connect and format; each chunk lies on one member."""
    config = array.configure(
        identity={"namespaces": {model: "r1"}},
        stripe={"width": 1},
        volume={"object": chunk_bytes, "bytes_per_inode": chunk_bytes},
    )
    array.connect()
    array.format()
    return config


def test_l2_adapter_of_the_server(array: Array) -> None:
    tools = shared("support.l2", "lmcache.v1.distributed.l2_adapters")
    adapter = opened_as_the_server_does(prepared(array, tools.MODEL, tools.CHUNK_BYTES))
    client, wanted = tools.Client(adapter), tools.keys(CHUNKS)
    try:
        store(tools, client, wanted)
        assert load(tools, client, wanted) == CHUNKS
        array.ports[0][0].take_away()
        wait_until("the adapter tells", lambda: not healthy_after_loads(tools, client, wanted))
        found = sum(client.has(one) for one in wanted)
        assert 0 < found < CHUNKS
        assert load(tools, client, wanted) == found
        later = tools.keys(CHUNKS, start=CHUNKS)
        store(tools, client, later)
        array.ports[0][0].give_back()
        wait_until("the adapter is well", lambda: adapter.report_status()["is_healthy"])
        assert load(tools, client, wanted + later) == 2 * CHUNKS
        counts = adapter.report_status()["counts"]
        assert counts["load_miss_error"] > 0
        print(f"\nl2 adapter: {found} of {CHUNKS} while the path was lost; {counts}")
    finally:
        adapter.close()


def opened_as_the_server_does(config: Path) -> Any:
    """Open the adapter from the value of ``lmcache server --l2-adapter``."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

    told = fx100("l2-adapter", config)
    assert told.exit_code == 0, told.output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LMCache imports the adapters of all others first
        parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[told.stdout]))
        return create_l2_adapter(parsed.adapters[0])


def content(tools: ModuleType, one: Any) -> bytes:
    data: bytes = tools.payload(one.chunk_hash.hex(), tools.CHUNK_BYTES)
    return data


def store(tools: ModuleType, client: Any, wanted: list) -> None:
    objects = [tools.memory_obj(content(tools, one)) for one in wanted]
    assert client.store(wanted, objects).is_successful()


def load(tools: ModuleType, client: Any, wanted: list) -> int:
    """Load; return how many came, all of them with the right bytes."""
    objects = [tools.memory_obj(tools.CHUNK_BYTES) for _ in wanted]
    loaded = client.load(wanted, objects)
    for one, obj, came in zip(wanted, objects, loaded, strict=True):
        right = tools.bytes_of(obj) == content(tools, one)
        assert right or not came, f"wrong bytes of {one}"
    return sum(loaded)


def healthy_after_loads(tools: ModuleType, client: Any, wanted: list) -> bool:
    load(tools, client, wanted)
    healthy: bool = client.adapter.report_status()["is_healthy"]
    return healthy


def test_plugin_inside_vllm(array: Array) -> None:
    rig = shared(
        "support.inprocess",
        "lmcache.v1.storage_backend.storage_manager",
        "fx100_lmcache.lmcache.plugin",
    )
    config = prepared(array, rig.MODEL, rig.CHUNK_BYTES)
    wanted = rig.keys(CHUNKS)
    with rig.plugin_on(config) as plugin:
        rig.put(plugin, wanted)
        assert got(rig, plugin, wanted) == CHUNKS
        array.ports[0][0].take_away()

        def told() -> bool:
            got(rig, plugin, wanted)
            return plugin._store.problems() != []

        wait_until("the store tells", told)
        found = got(rig, plugin, wanted)
        assert 0 < found < CHUNKS
        later = rig.keys(CHUNKS, start=CHUNKS)
        rig.put(plugin, later)
        array.ports[0][0].give_back()
        wait_until("the store is well", lambda: plugin._store.problems() == [])
        assert got(rig, plugin, wanted + later) == 2 * CHUNKS
        counts = rig.counts(plugin)
        assert counts["load_miss_error"] > 0
        print(f"\nplugin: {found} of {CHUNKS} while the path was lost; {counts}")


def got(rig: ModuleType, plugin: Any, wanted: list) -> int:
    """Load; return how many came, all of them with the right bytes."""
    found = plugin.batched_get_blocking(wanted)
    pairs = zip(wanted, found, strict=True)
    assert all(obj is None or rig.holds(obj, one.chunk_hash) for one, obj in pairs)
    came = sum(obj is not None for obj in found)
    rig.free(found)
    return came
