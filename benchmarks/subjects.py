"""Contenders that load a set of objects: our store, and LMCache's `fs_native` client."""

import mmap
import os
import select
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from fx100_lmcache.buffers import IoBuffer, address_of
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.members.device import create_file, open_member
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope
from fx100_lmcache.ondisk.geometry import plan_geometry
from fx100_lmcache.store import LoadItem, LoadResult, PutItem, PutResult, Store, StoreOptions
from fx100_lmcache.volume.format import format_volume

SCOPE = Scope("mp", "benchmark/model", 1)
WAIT_S = 120.0


class Arena:
    """Memory for a number of objects of one size, as LMCache's L1 would lend it."""

    def __init__(self, objects: int, object_bytes: int) -> None:
        self.stride = -(-object_bytes // 4096) * 4096
        self.object_bytes = object_bytes
        self._pages = mmap.mmap(-1, objects * self.stride)
        self.view = memoryview(self._pages)
        address = address_of(self._pages)
        self.buffers = [
            IoBuffer(
                self.view[i * self.stride : (i + 1) * self.stride],
                object_bytes,
                address + i * self.stride,
            )
            for i in range(objects)
        ]

    def fill(self) -> None:
        """Put different bytes into every page."""
        block = os.urandom(1 << 20)
        for at in range(0, len(self.view), len(block)):
            part = self.view[at : at + len(block)]
            part[:] = block[: len(part)]
        for number, at in enumerate(range(0, len(self.view), 4096)):
            self.view[at : at + 8] = number.to_bytes(8, "little")


class Subject(Protocol):
    """One contender."""

    name: str

    def store_all(self) -> None:
        """Store every object; return when all are stored."""
        ...

    def load_all(self) -> None:
        """Load every object; return when all are loaded."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class StoreSubject:
    """A store of ours that is open already."""

    def __init__(self, name: str, store: Store, source: Arena, target: Arena) -> None:
        self.name = name
        self.store = store
        layout = Layout("bytes", (("uint8", (source.object_bytes,)),))
        meta = ChunkMeta(SCOPE, layout).pack()
        digests = [SCOPE.digest(i.to_bytes(32, "big")) for i in range(len(source.buffers))]
        self._puts = [PutItem(d, meta, b) for d, b in zip(digests, source.buffers, strict=True)]
        self._loads = [
            LoadItem(d, b, lambda _m, _n: True)
            for d, b in zip(digests, target.buffers, strict=True)
        ]

    def store_all(self) -> None:
        """Store every object; return when all are stored."""
        done, results = threading.Event(), []

        def finished(found: list[PutResult]) -> None:
            results.extend(found)
            done.set()

        self.store.put(self._puts, finished)
        assert done.wait(WAIT_S)
        assert all(result.stored for result in results), results

    def load_all(self) -> None:
        """Load every object; return when all are loaded."""
        done, results = threading.Event(), []

        def finished(found: list[LoadResult]) -> None:
            results.extend(found)
            done.set()

        self.store.load(self._loads, finished)
        assert done.wait(WAIT_S)
        assert all(result.length for result in results), results

    def close(self) -> None:
        """Close the store."""
        self.store.close()


class OurStore(StoreSubject):
    """A new store on file members."""

    def __init__(
        self,
        name: str,
        home: Path,
        source: Arena,
        target: Arena,
        *,
        members: int = 4,
        engine: EngineOptions | None = None,
        width: int = 0,
    ) -> None:
        total = len(source.buffers) * source.stride
        size = total // members * 5 // 4 + (64 << 20)
        self.member_paths = [home / f"member-{index}" for index in range(members)]
        for path in self.member_paths:
            create_file(path, size // 4096 * 4096)
        self._members = [open_member(path) for path in self.member_paths]
        self.io_modes = [m.io_mode for m in self._members]
        geometry = plan_geometry(
            [m.size_bytes for m in self._members],
            object_bytes=source.object_bytes,
            bytes_per_inode=min(256 * 1024, source.object_bytes),
            io_align_bytes=max(m.logical_block_bytes for m in self._members),
        )
        volume = format_volume(self._members, geometry, unix_s=int(time.time()))
        lanes = LaneEngine(volume.members, engine or EngineOptions())
        store = Store(volume, lanes, options=StoreOptions(width=width))
        super().__init__(name, store, source, target)

    def close(self) -> None:
        """Close the store and its members."""
        super().close()
        for member in self._members:
            member.close()


class FsNative:
    """LMCache's C++ file client, one file for each object, direct I/O, no checksums."""

    def __init__(self, home: Path, source: Arena, target: Arena, workers: int) -> None:
        from lmcache.lmcache_fs import LMCacheFSClient

        self.name = f"fs_native, {workers} workers"
        home.mkdir(parents=True, exist_ok=True)
        self._client: Any = LMCacheFSClient(str(home), workers, "", True, 0)
        self._keys = [f"m@00000001@0@{i:064x}" for i in range(len(source.buffers))]
        self._source = [b.view for b in source.buffers]
        self._target = [b.view for b in target.buffers]
        self._poll = select.poll()
        self._poll.register(self._client.event_fd(), select.POLLIN)

    def store_all(self) -> None:
        """Store every object; return when all are stored."""
        self._client.submit_batch_set(self._keys, self._source)
        self._wait()

    def load_all(self) -> None:
        """Load every object; return when all are loaded."""
        self._client.submit_batch_get(self._keys, self._target)
        self._wait()

    def _wait(self) -> None:
        while True:
            assert self._poll.poll(WAIT_S * 1000)
            for _, ok, reason, _ in self._client.drain_completions():
                assert ok, reason
                return

    def close(self) -> None:
        """Give everything back."""
        self._client.close()
