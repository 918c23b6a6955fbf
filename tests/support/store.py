"""What the store tests share."""

from collections.abc import Sequence

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout
from fx100_lmcache.store import LoadItem, LoadResult, PutItem, PutResult, StoreOptions
from fx100_lmcache.testing.harness import META, SCOPE, Rig, digest_of, value_of
from fx100_lmcache.testing.memory import Fault

CHUNK = 16 * 1024  # one frame of 4 KiB blocks, as the harness formats
OTHER_META = ChunkMeta(SCOPE, Layout("KV_2LTD", (("float8_e4m3fn", (2, 4, 16)),))).pack()
NEVER_CHECK = 1e9


def options(**how: float) -> StoreOptions:
    return StoreOptions(**{"claim_check_s": NEVER_CHECK} | how)  # type: ignore[arg-type]


def rig(members: int = 2, size_bytes: int = 256 * 1024, **how: float) -> Rig:
    return Rig.fresh(members, size_bytes, options=options(**how))


def chunk(name: str, version: int = 0, length: int = CHUNK) -> bytes:
    return value_of(name, version, length)


def data_from(store_rig: Rig, member: int = 0) -> int:
    """Where a member's data begin: before it lie labels, claims and inodes."""
    return store_rig.store.volume.geometry.block_offset(member, 0)


def stall_data_writes(store_rig: Rig, times: int = 1, after: int = 0) -> None:
    for number, member in enumerate(store_rig.members):
        first = data_from(store_rig, number)
        member.faults.append(Fault("stall", "write", after, times, first_byte=first))


def inode_writes(store_rig: Rig, kind: str, **how: int) -> None:
    """Have writes to the inode tables go wrong on every member."""
    geometry = store_rig.store.volume.geometry
    for number, member in enumerate(store_rig.members):
        first, last = geometry.table_offset, data_from(store_rig, number) - 1
        member.faults.append(Fault(kind, "write", first_byte=first, last_byte=last, **how))


def no_faults(store_rig: Rig) -> None:
    for member in store_rig.members:
        member.faults.clear()


def expire(store_rig: Rig, seconds: float) -> None:
    store_rig.clock.advance(seconds)
    store_rig.engine.expire_due()


def start_load(
    store_rig: Rig, name: str, *, hold: bool = True
) -> tuple[list[LoadResult], LoadItem]:
    buffer = zero_buffer(CHUNK)
    item = LoadItem(digest_of(name), buffer, lambda _meta, _length: True)
    results: list[LoadResult] = []
    store_rig.store.load([item], results.extend, hold=hold)
    return results, item


def has(store_rig: Rig, *names: str) -> list[bool]:
    return store_rig.store.lookup([digest_of(n) for n in names]).tolist()


def counts(store_rig: Rig) -> dict[str, int]:
    return store_rig.store.counts()


def put_all(store_rig: Rig, names: Sequence[str]) -> list[PutResult]:
    items = []
    for name in names:
        buffer = zero_buffer(CHUNK)
        buffer.view[:] = chunk(name)
        items.append(PutItem(digest_of(name), META, buffer))
    results: list[PutResult] = []
    store_rig.store.put(items, results.extend)
    return results
