"""A small store on memory members, driven step by step: what most tests are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope
from fx100_lmcache.ondisk.geometry import Geometry, plan_geometry
from fx100_lmcache.store import LoadItem, LoadResult, PutItem, PutResult, Store, StoreOptions
from fx100_lmcache.testing.clock import SimulatedClock
from fx100_lmcache.testing.inline import InlineLanes, inline_engine
from fx100_lmcache.testing.memory import Journal, MemoryMember, memory_members
from fx100_lmcache.volume.format import format_volume
from fx100_lmcache.volume.machine import Machine, this_machine
from fx100_lmcache.volume.volume import assemble

SCOPE = Scope("mp", "test/model", 1)
META = ChunkMeta(SCOPE, Layout("KV_2LTD", (("bfloat16", (2, 4, 8)),))).pack()


def _answers(_: int, member: Member) -> Member | None:
    """Return a member that is there, which one that is gone is not."""
    return None if isinstance(member, MemoryMember) and member.gone else member


def digest_of(name: str) -> bytes:
    """Digest of a test object."""
    return SCOPE.digest(name.encode())


def value_of(name: str, version: int, length: int) -> bytes:
    """Contents of a test object: they differ in every 16 bytes, by name and by version."""
    unit = f"{name}.{version}".encode().ljust(12, b".")
    words = (unit[:12] + i.to_bytes(4, "little") for i in range(-(-length // 16)))
    return b"".join(words)[:length]


def small_geometry(
    members: Sequence[MemoryMember], *, object_bytes: int = 16384, shards: int = 1
) -> Geometry:
    """Geometry with blocks of 4 KiB, so that volumes of a few 100 KiB do."""
    return plan_geometry(
        [m.size_bytes for m in members],
        object_bytes=object_bytes,
        shards=shards,
        inode_bytes=512,
        bytes_per_inode=8192,
        io_align_bytes=max(m.logical_block_bytes for m in members),
        block_bytes=4096,
    )


@dataclass
class Rig:
    """A store with everything around it.

    Attributes
    ----------
    options : StoreOptions
        Kept over :meth:`reopen`.
    wall_s : int
        Unix time for claims; rises with every open.
    defects : Defects or None
        Where the next engine counts what handlers raise; None has it come out.
    machine : Machine
        Its clock is that of leases and watches, ``claim_clock``, which moves only when somebody
        sleeps, or when told to. Claims are renewed by ``store.beat()``.
    """

    members: list[MemoryMember]
    options: StoreOptions = field(default_factory=StoreOptions)
    journal: Journal = field(default_factory=Journal)
    wall_s: int = 1_000_000
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    evicted: list[bytes] = field(default_factory=list)
    defects: Defects | None = None
    claim_clock: SimulatedClock = field(default_factory=SimulatedClock)
    machine: Machine = field(init=False)
    store: Store = field(init=False)
    engine: LaneEngine = field(init=False)
    lanes: InlineLanes = field(init=False)

    def __post_init__(self) -> None:
        clock = self.claim_clock
        self.machine = replace(this_machine(), clock=clock, sleep=clock.advance)

    @classmethod
    def fresh(
        cls,
        members: int = 2,
        size_bytes: int | Sequence[int] = 256 * 1024,
        *,
        block: int = 512,
        object_bytes: int = 16384,
        options: StoreOptions | None = None,
    ) -> Rig:
        """Format a new volume and open it."""
        journal = Journal()
        made = memory_members(members, size_bytes, block=block, journal=journal)
        rig = cls(made, options or StoreOptions(), journal)
        rig.format(object_bytes)
        rig.open()
        return rig

    def format(self, object_bytes: int = 16384) -> None:
        """Write a new volume over the members."""
        geometry = small_geometry(self.members, object_bytes=object_bytes)
        format_volume(self.members, geometry, unix_s=self.wall_s)

    def open(self, *, take_over: bool = False) -> None:
        """Open the volume on a new engine, as a new process would."""
        volume = assemble(self.members)
        self.engine, self.lanes, _ = inline_engine(
            volume.members,
            clock=self.clock,
            probe=_answers,
            defects=self.defects,
        )
        self.store = Store(
            volume,
            self.engine,
            options=self.options,
            wall_clock=lambda: self.wall_s,
            take_over=take_over,
            machine=self.machine,
            heartbeat=False,
        )
        self.store.on_evicted(lambda gone: self.evicted.extend(d for d, _, _ in gone))

    def look(self) -> None:
        """Have the engine look at every member, as it does once a second."""
        for number in range(len(self.members)):
            self.engine.probe(number)

    def reopen(self) -> None:
        """Forget all process state and open again, as after SIGKILL."""
        self.wall_s += 1
        self.open()

    def put(self, name: str, data: bytes, *, meta: bytes = META) -> PutResult:
        """Store one object; the result must be there at once."""
        results = self.start_put(name, data, meta=meta)
        assert len(results) == 1, "the put has not finished"
        return results[0]

    def start_put(self, name: str, data: bytes, *, meta: bytes = META) -> list[PutResult]:
        """Begin to store one object; the list gets the result when there is one."""
        buffer = zero_buffer(max(4096, -(-len(data) // 4096) * 4096))
        buffer.view[: len(data)] = data
        buffer.length = len(data)
        results: list[PutResult] = []
        self.store.put([PutItem(digest_of(name), meta, buffer)], results.extend)
        return results

    def get(self, name: str) -> bytes | None:
        """Load one object; None is a miss."""
        result, data = self.get_with_reason(name)
        return data if result.length else None

    def get_with_reason(self, name: str) -> tuple[LoadResult, bytes]:
        """Load one object with its result."""
        length = next(
            (n for _, digest, n, _ in self.store.entries() if digest == digest_of(name)), 4096
        )
        buffer = zero_buffer(max(4096, -(-length // 4096) * 4096))
        buffer.length = length
        results: list[LoadResult] = []
        self.store.load([LoadItem(digest_of(name), buffer, lambda _m, _n: True)], results.extend)
        assert len(results) == 1, "the load has not finished"
        return results[0], bytes(buffer.view[:length])

    def check_space(self) -> None:
        """Assert that every block is accounted for, once."""
        space = self.store.space()
        parts = (space.free, space.used, space.quarantined, space.withheld)
        assert sum(parts) == space.total, space
        assert min(parts) >= 0, space
        core = self.store._core
        with core.lock:
            taken = core.space.free_blocks + core.space.withheld_blocks
            core.ledger.check(taken, core.catalog.used_blocks())
