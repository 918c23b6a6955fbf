"""What the tests of the plugin share: volumes, LMCache's own objects, members that misbehave."""

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.storage_manager import StorageManager

from fx100_lmcache.config import Config
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.lmcache.inprocess import registry as inprocess_registry
from fx100_lmcache.lmcache.inprocess.checks import UnsupportedSetupError
from fx100_lmcache.lmcache.plugin import FX100StoragePlugin
from fx100_lmcache.mount import Mounted, store_options
from fx100_lmcache.ondisk.location import unpack_location
from fx100_lmcache.store import Store
from fx100_lmcache.testing.harness import small_geometry
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.testing.volumes import file_volume
from fx100_lmcache.volume.format import format_volume
from fx100_lmcache.volume.volume import assemble, read_label
from support.releases import inprocess as lmcache_inprocess

EventManager = lmcache_inprocess("event_manager").EventManager

MODEL = "test/model"
LAYERS, CHUNK_TOKENS, HEADS, HEAD_SIZE = 4, 16, 2, 64
KV_SHAPE = (LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD_SIZE)
SHAPE = torch.Size([2, LAYERS, CHUNK_TOKENS, HEADS * HEAD_SIZE])
LAYER_SHAPE = torch.Size([CHUNK_TOKENS, 2, HEADS * HEAD_SIZE])
CHUNK_BYTES = SHAPE.numel() * 2
WAIT_S = 30.0
POOL_BYTES = 8 << 20
SMALL_IO = {"max_write_in_flight": "64MiB", "reader_threads": 4, "writer_threads": 2}


# ----- volumes


def write_config(
    directory: Path, *, members: int = 2, size: str = "8MiB", shards: int = 1, **sections: Any
) -> Path:
    """Write a YAML of a file volume and format it."""
    return file_volume(
        directory,
        members=members,
        size=size,
        volume={"object": CHUNK_BYTES, "bytes_per_inode": CHUNK_BYTES, "shards": shards},
        **{"io": SMALL_IO, "identity": {"model_tags": {MODEL: "r1"}}, **sections},
    )


def rewrite_config(path: Path, **sections: Any) -> None:
    """Change sections of a YAML; the volume stays."""
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **sections}))


class WildMember(MemoryMember):
    """A member that fails, is slow, or hangs at random while it is wild; in its own threads."""

    def __init__(self, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rng = random.Random(seed)
        self.error_rate = self.slow_rate = self.stall_rate = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.held = self.errors = self.stalls = 0

    def calm(self) -> None:
        """Let everything go, and work from now on."""
        self.error_rate = self.slow_rate = self.stall_rate = 0.0
        self.gate.set()

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._misbehave()
        return super().read_into(offset, buffer)

    def write_from(self, offset: int, buffer: memoryview) -> int:
        self._misbehave()
        return super().write_from(offset, buffer)

    def _misbehave(self) -> None:
        dice = self._rng.random()
        if not self.gate.is_set():
            self.held += 1
            self.gate.wait()
        if dice < self.stall_rate:
            self.stalls += 1
            time.sleep(0.3)
        elif dice < self.stall_rate + self.slow_rate:
            time.sleep(0.01)
        elif dice < self.stall_rate + self.slow_rate + self.error_rate:
            self.errors += 1
            raise OSError(5, "injected error")


def wild_members(count: int, size_bytes: int) -> list[WildMember]:
    return [WildMember(size_bytes, index=n, seed=n) for n in range(count)]


def flip_bit(plugin: FX100StoragePlugin, members: Sequence[MemoryMember], one: Any) -> None:
    """Damage the object of a key where it lies."""
    core = plugin._store._core
    row = core.catalog.find_one(plugin._keys.digest(one))
    location, _ = core.catalog.entry(row).pieces[0]
    member, block, _ = unpack_location(location)
    members[member].media[core.geometry.block_offset(member, block)] ^= 1


def probe(_: int, member: Any) -> Any:
    """Look whether a member works again."""
    try:
        read_label(member)
    except OSError:
        return None
    return member


def mount_on(
    members: Sequence[MemoryMember], *, object_bytes: int = CHUNK_BYTES, shards: int = 1
) -> Callable[..., Mounted]:
    """Format members in memory; return what stands in for `mount`."""
    geometry = small_geometry(members, object_bytes=object_bytes, shards=shards)
    format_volume(members, geometry, unix_s=1)

    def mount(config: Config, *, shards: Sequence[int]) -> Mounted:
        volume = assemble(members)
        options = EngineOptions(
            reader_threads=4, writer_threads=2, native=False, probe_interval_s=0.02
        )
        engine = LaneEngine(volume.members, options, probe)
        store = Store(volume, engine, shards=shards, options=store_options(config))
        return Mounted(config, volume, engine, store)

    return mount


# ----- LMCache


def engine_config(path: Path | None, **fields: Any) -> LMCacheEngineConfig:
    """Make LMCache's configuration with the plugin in it."""
    extra = {
        "storage_plugin.fx100.module_path": "fx100_lmcache.lmcache.plugin",
        "storage_plugin.fx100.class_name": "FX100StoragePlugin",
        **fields.pop("extra_config", {}),
    }
    if path is not None:
        extra["fx100.config"] = str(path)
    defaults = {
        "chunk_size": CHUNK_TOKENS,
        "local_cpu": False,
        "max_local_cpu_size": POOL_BYTES / 2**30,
        "pre_caching_hash_algorithm": "sha256_cbor",
        "lmcache_instance_id": "test",
        "storage_plugins": ["fx100"],
        "extra_config": extra,
    }
    return LMCacheEngineConfig.from_defaults(**{**defaults, **fields})


def metadata(**fields: Any) -> LMCacheMetadata:
    defaults = {
        "model_name": MODEL,
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": KV_SHAPE,
        "chunk_size": CHUNK_TOKENS,
        "role": "worker",
    }
    return LMCacheMetadata(**{**defaults, **fields})


@contextmanager
def plugin_on(
    path: Path | None, meta: LMCacheMetadata | None = None, **fields: Any
) -> Iterator[FX100StoragePlugin]:
    """Open a plugin with a real `LocalCPUBackend`, as LMCache does, and close both."""
    config, told = engine_config(path, **fields), meta or metadata()
    backend = LocalCPUBackend(config, told, "cpu")
    try:
        plugin = FX100StoragePlugin(
            config=config, metadata=told, local_cpu_backend=backend, loop=None, dst_device="cpu"
        )
        try:
            yield plugin
        finally:
            plugin.close()
    finally:
        backend.memory_allocator.close()


class Responses:
    """Stands in for the lookup server of asynchronous mode."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def send_response_to_scheduler(self, lookup_id: str, tokens: int) -> None:
        self.tokens[lookup_id] = tokens


@contextmanager
def manager_on(
    path: Path | None, meta: LMCacheMetadata | None = None, **fields: Any
) -> Iterator[StorageManager]:
    """Open LMCache's own storage manager with the plugin loaded by it, and close it."""
    manager = StorageManager(
        engine_config(path, **fields),
        meta or metadata(),
        EventManager(),
        async_lookup_server=Responses(),
    )
    try:
        yield manager
    finally:
        pool = manager.local_cpu_backend.memory_allocator
        manager.close()
        manager.thread.join(WAIT_S)
        manager.loop.close()  # LMCache leaves it to the garbage collector
        pool.close()


# ----- keys and objects


def key(number: int, *, like: LMCacheMetadata | None = None, **fields: Any) -> CacheEngineKey:
    told = like or metadata()
    defaults = {
        "model_name": told.model_name,
        "world_size": told.world_size,
        "worker_id": told.worker_id,
        "chunk_hash": number,
        "dtype": told.kv_dtype,
    }
    return CacheEngineKey(**{**defaults, **fields})


def keys(count: int, start: int = 0, **fields: Any) -> list[CacheEngineKey]:
    return [key(number, **fields) for number in range(start, start + count)]


def payload(name: object, length: int) -> bytes:
    """Bytes that differ by name in every 16 bytes."""
    unit = str(name).encode()[-12:].ljust(12, b".")
    words = (unit + index.to_bytes(4, "little") for index in range(-(-length // 16)))
    return b"".join(words)[:length]


def fill(obj: Any, name: object) -> None:
    data = torch.frombuffer(bytearray(payload(name, obj.get_size())), dtype=torch.uint8)
    obj.raw_data[: len(data)].copy_(data)


def holds(obj: Any, name: object) -> bool:
    return bytes(memoryview(obj.byte_array)) == payload(name, obj.get_size())


def new_obj(
    backend: LocalCPUBackend,
    name: object,
    shape: Any = SHAPE,
    dtype: Any = torch.bfloat16,
    fmt: MemoryFormat = MemoryFormat.KV_2LTD,
) -> Any:
    obj = backend.allocate(shape, dtype, fmt, busy_loop=False)
    assert obj is not None, "the pool of the test is too small"
    fill(obj, name)
    return obj


def refused(path: Any, meta: Any = None, **fields: Any) -> str:
    """Return what a set-up is refused with."""
    with pytest.raises(UnsupportedSetupError) as caught, plugin_on(path, meta, **fields):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(plugin: FX100StoragePlugin, wanted: Sequence[CacheEngineKey], **kind: Any) -> None:
    """Store objects that hold their hash, as `StorageManager.batched_put` would, and wait."""
    objs = [new_obj(plugin.local_cpu_backend, k.chunk_hash, **kind) for k in wanted]
    plugin.batched_submit_put_task(list(wanted), objs)
    for obj in objs:
        obj.ref_count_down()
    settle(plugin)


def settle(plugin: FX100StoragePlugin) -> None:
    """Wait until nothing is on its way."""
    wait_until(lambda: plugin._puts.held_bytes == 0)


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.002)


def pool_bytes(backend: Any) -> int:
    """Host memory in use."""
    return int(backend.memory_allocator.pin_allocator.total_allocated_size)


def pins(plugin: FX100StoragePlugin) -> int:
    return int(plugin._store._core.catalog._pins.sum())


def live_pins(plugin: FX100StoragePlugin) -> int:
    """Entries that a pin still keeps from eviction."""
    core = plugin._store._core
    with core.lock:
        return sum(core.catalog.pinned(r, core.engine.now()) for r in core.catalog.live_rows())


def counts(plugin: FX100StoragePlugin) -> dict[str, int]:
    return {**plugin._store.counts(), **plugin._opened.counts.snapshot()}


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def free(objs: Sequence[Any]) -> None:
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()


def stand_in_for_mount(monkeypatch: Any, mount: Callable[..., Mounted]) -> None:
    monkeypatch.setattr(inprocess_registry, "mount", mount)
