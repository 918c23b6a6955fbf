"""What the tests of the adapter share: volumes, memory objects, a patient client."""

import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener, L2StoreResult
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.config import Config, DeadlineConfig, IdentityConfig, MemberConfig, VolumeConfig
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.lmcache.l2_adapter import FX100L2Adapter
from fx100_lmcache.mount import Mounted
from fx100_lmcache.store import Store, StoreOptions
from fx100_lmcache.testing.harness import Rig, small_geometry
from fx100_lmcache.testing.memory import MemoryMember, memory_members
from fx100_lmcache.testing.volumes import file_volume
from fx100_lmcache.volume.format import format_volume
from fx100_lmcache.volume.volume import assemble
from support.releases import places

MODEL = "test/model"
WAIT_S = 30.0
CHUNK_BYTES = 64 * 1024


def write_config(directory: Path, *, members: int = 4, size: str = "8MiB", **sections: Any) -> Path:
    """Write a YAML of a file volume and format it."""
    small_io = {"max_write_in_flight": "64MiB", "reader_threads": 4, "writer_threads": 2}
    return file_volume(
        directory,
        members=members,
        size=size,
        volume={"object": CHUNK_BYTES},
        **{"io": small_io, "identity": {"model_tags": {MODEL: "r1"}}, **sections},
    )


@contextmanager
def opened(path: Path) -> Iterator["Client"]:
    """Open an adapter on a YAML, as LMCache would, and close it."""
    adapter = FX100L2Adapter({"config": str(path)})
    try:
        yield Client(adapter)
    finally:
        adapter.close()


def memory_config(**sections: Any) -> Config:
    """Make a configuration for stores whose members are in memory."""
    sections.setdefault("identity", IdentityConfig(model_tags={MODEL: "r1"}))
    members = (MemberConfig(path=Path("/memory")),)
    return Config(volume=VolumeConfig(members=members, object_bytes=CHUNK_BYTES), **sections)


def adapter_on(rig: Rig, config: Config | None = None, **options: Any) -> "Client":
    """Put an adapter on a rig: all I/O then happens within the call that asks for it."""
    mounted = Mounted(config or memory_config(), rig.store.volume, rig.engine, rig.store)
    return Client(FX100L2Adapter({}, mounted=mounted, **options))


class GatedMember(MemoryMember):
    """A member that holds I/O back, in its threads, while the gate is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.held = 0

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._wait()
        return super().read_into(offset, buffer)

    def write_from(self, offset: int, buffer: memoryview) -> int:
        self._wait()
        return super().write_from(offset, buffer)

    def _wait(self) -> None:
        if not self.gate.is_set():
            self.held += 1
            self.gate.wait()


def threaded_store(
    members: Sequence[MemoryMember], options: StoreOptions, *, readers: int = 2
) -> tuple[LaneEngine, Store]:
    """Format memory members and open them with real threads."""
    format_volume(members, small_geometry(members, object_bytes=CHUNK_BYTES), unix_s=1)
    volume = assemble(members)
    engine = LaneEngine(
        volume.members, EngineOptions(reader_threads=readers, writer_threads=1, native=False)
    )
    return engine, Store(volume, engine, options=options)


def threaded_adapter(
    members: Sequence[MemoryMember],
    deadlines: DeadlineConfig,
    *,
    readers: int = 2,
    **options: Any,
) -> "Client":
    """Make an adapter on memory members with real threads and deadlines."""
    engine, store = threaded_store(
        members,
        StoreOptions(
            load_s=deadlines.load_s, store_s=deadlines.store_s, pin_ttl_s=deadlines.pin_ttl_s
        ),
        readers=readers,
    )
    config = memory_config(deadlines=deadlines)
    return Client(
        FX100L2Adapter({}, mounted=Mounted(config, store.volume, engine, store), **options)
    )


def gated_members(count: int, size_bytes: int) -> list[GatedMember]:
    return [GatedMember(size_bytes, index=n) for n in range(count)]


def plain_members(count: int, size_bytes: int) -> list[MemoryMember]:
    return memory_members(count, size_bytes)


def key(number: int | bytes, **fields: Any) -> ObjectKey:
    """Make a key; numbers become 32-byte hashes."""
    chunk_hash = number if isinstance(number, bytes) else number.to_bytes(32, "little")
    return ObjectKey(
        chunk_hash, fields.pop("model_name", MODEL), fields.pop("kv_rank", 0), **fields
    )


def keys(count: int, start: int = 0, **fields: Any) -> list[ObjectKey]:
    return [key(number, **fields) for number in range(start, start + count)]


def payload(name: object, length: int) -> bytes:
    """Bytes that differ by name in every 16 bytes."""
    unit = str(name).encode()[:12].ljust(12, b".")
    words = (unit + index.to_bytes(4, "little") for index in range(-(-length // 16)))
    return b"".join(words)[:length]


def memory_obj(
    data: bytes | int,
    *,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[Any] = (torch.bfloat16,),
    fmt: MemoryFormat = MemoryFormat.KV_2LTD,
    offset: int = 0,
) -> TensorMemoryObj:
    """Make an object of LMCache's that holds `data` (or so many zeros), `offset` off alignment."""
    length = data if isinstance(data, int) else len(data)
    pages = zero_buffer(-(-(length + offset) // 4096) * 4096)
    raw = torch.frombuffer(pages.view, dtype=torch.uint8)[offset : offset + length]
    if not isinstance(data, int):
        pages.view[offset : offset + length] = data
    if shapes is None:
        shapes = [[length // dtypes[0].itemsize]]
    made = [torch.Size(shape) for shape in shapes]
    metadata = MemoryObjMetadata(
        shape=made[0],
        dtype=dtypes[0],
        address=0,
        phy_size=length,
        ref_count=1,
        fmt=fmt,
        shapes=made,
        dtypes=list(dtypes),
    )
    obj = TensorMemoryObj(raw, metadata, parent_allocator=None)
    assert obj.get_size() == length, "shapes and data disagree"
    return obj


def bytes_of(obj: Any) -> bytes:
    return bytes(memoryview(obj.byte_array))


def desc(obj: TensorMemoryObj) -> MemoryLayoutDesc:
    return MemoryLayoutDesc(obj.get_shapes(), obj.get_dtypes())


@dataclass
class Recorder(L2AdapterListener):
    """A listener that keeps what an eviction policy would keep, and everything it heard."""

    present: dict[ObjectKey, int] = field(default_factory=dict)
    heard: list[tuple[str, list[ObjectKey]]] = field(default_factory=list)

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.heard.append(("stored", list(keys)))
        self.present.update(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.heard.append(("accessed", list(keys)))

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.heard.append(("deleted", list(keys)))
        for gone in keys:
            self.present.pop(gone, None)

    def told(self, what: str) -> list[ObjectKey]:
        return [one for kind, some in self.heard for one in some if kind == what]


class Client:
    """Calls the adapter as LMCache's controllers do, and waits for the answer."""

    made: ClassVar[list["Client"]] = []

    def __init__(self, adapter: FX100L2Adapter) -> None:
        self.made.append(self)
        self.adapter = adapter
        self.results: dict[int, L2StoreResult] = {}

    def store(self, keys: list[ObjectKey], objects: list[Any]) -> L2StoreResult:
        task = self.adapter.submit_store_task(keys, objects)
        return self.wait_store(task)

    def wait_store(self, task: int) -> L2StoreResult:
        while task not in self.results:
            self.wait(self.adapter.get_store_event_fd())
            self.results.update(self.adapter.pop_completed_store_tasks())
        return self.results.pop(task)

    def lookup(self, keys: list[ObjectKey], descs: dict[int, Any] | None = None) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, descs or {})
        self.wait(self.adapter.get_lookup_and_lock_event_fd())
        bitmap = self.adapter.query_lookup_and_lock_result(task)
        assert bitmap is not None
        assert places(bitmap) == len(keys)
        return [bitmap.test(place) for place in range(len(keys))]

    def has(self, one: ObjectKey, descs: dict[int, Any] | None = None) -> bool:
        """Look one key up, and unlock it again."""
        found = self.lookup([one], descs)[0]
        if found:
            self.adapter.submit_unlock([one])
        return found

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
        return self.wait_load(self.adapter.submit_load_task(keys, objects), len(keys))

    def wait_load(self, task: int, count: int) -> list[bool]:
        while (bitmap := self.adapter.query_load_result(task)) is None:
            self.wait(self.adapter.get_load_event_fd())
        assert places(bitmap) == count
        return [bitmap.test(place) for place in range(count)]

    def get(self, one: ObjectKey, like: TensorMemoryObj) -> bytes | None:
        """Load one key into a new object of the same kind; None is a miss."""
        obj = memory_obj(
            like.get_size(), shapes=like.get_shapes(), dtypes=like.get_dtypes(), fmt=like.meta.fmt
        )
        return bytes_of(obj) if self.load([one], [obj]) == [True] else None

    def wait(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(WAIT_S * 1000), "nothing was signalled"
        consume_fd(fd)

    def settle(self) -> None:
        """Wait until listeners have heard of everything so far."""
        assert self.adapter._events.settle(WAIT_S)

    def stop(self) -> None:
        """End the adapter's own threads, as far as they live; the store may hang."""
        self.adapter._watch.close()
        self.adapter._events.close(WAIT_S)
        if self.adapter._metrics is not None:
            self.adapter._metrics.close()

    def usage(self) -> int:
        used: int = self.adapter.get_usage().total_bytes_used
        return used
