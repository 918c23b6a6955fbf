"""Want of memory or of threads at every request that the extension makes, one after the other.

A build of its own, whose requests are counted and fail when told to; see faults.h.
"""

import ctypes
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from native.native_build import compiler, faulty_extension
from support.native_tools import (
    BLOCK,
    Arrived,
    Bench,
    GuardedMemory,
    bench,
    content,
    eventually,
    table,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs gcc")

THREADS = 3
READS = 4
HASH = ("create", "destroy", "reset", "update", "digest")


class Faults:
    """Counts what the extension requests in this thread, and lets one request fail."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.faults_live.restype = ctypes.c_long

    def fail_at(self, number: int) -> None:
        self._library.faults_fail_at(ctypes.c_long(number))

    @property
    def struck(self) -> bool:
        return bool(self._library.faults_struck())

    @property
    def live(self) -> int:
        """Allocations that are not freed; each thread has one."""
        return int(self._library.faults_live())

    def addresses(self) -> Iterator[int]:
        for name in HASH:
            found = ctypes.cast(self._library[f"faults_hash_{name}"], ctypes.c_void_p).value
            assert found is not None
            yield found

    def each(self, call: Callable[[], object], *errors: type[Exception]) -> Iterator[int]:
        """Let the first request of a call fail, then the second, until it gets by without."""
        for number in itertools.count(1):
            self.fail_at(number)
            try:
                call()
            except errors:
                assert self.struck, "it failed for another reason"
                yield number
            else:
                assert not self.struck, "what failed was not told"
                return
            finally:
                self.fail_at(0)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    path = faulty_extension(os.environ.get("FX100_SANITIZER", "plain"))
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.use_hasher(*Faults(path).addresses())
    return loaded


@pytest.fixture
def native(module: ModuleType, tmp_path: Path) -> Iterator[Bench]:
    with bench(module, tmp_path / "member") as made:
        yield made


@pytest.fixture
def faults(module: ModuleType) -> Iterator[Faults]:
    assert module.__file__ is not None
    made = Faults(Path(module.__file__))
    before = made.live
    yield made
    assert eventually(lambda: made.live == before), f"{made.live - before} allocations are left"


def threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def test_a_pool_that_cannot_be_opened_leaves_no_thread_and_no_memory(
    faults: Faults, native: Bench
) -> None:
    live, before = faults.live, threads()
    failed = 0
    for _ in faults.each(lambda: native.open(THREADS), OSError, MemoryError):
        failed += 1
        # without a handle the pool goes with its last thread; else it is gone
        assert eventually(lambda: (faults.live, threads()) == (live, before))
    assert failed == 2 + 2 * THREADS, "pool and handle, and for each thread its hash and itself"


def test_operations_that_cannot_be_queued_are_not_made(faults: Faults, native: Bench) -> None:
    pool = native.open(THREADS)
    memory = GuardedMemory(READS * BLOCK)
    operations = [one.fields for one in native.reads(memory)]
    live, failed = faults.live, 0
    for _ in faults.each(lambda: native.native.submit(pool, operations), MemoryError):
        failed += 1
        assert faults.live == live
        assert memory.untouched
    assert failed == READS
    assert len(native.wait(pool, READS)) == READS


def test_a_batch_that_cannot_be_queued_is_not_read(faults: Faults, native: Bench) -> None:
    pools = [native.open(THREADS) for _ in range(2)]
    memory = GuardedMemory(READS * BLOCK)
    rows = table([one.row(n % 2) for n, one in enumerate(native.reads(memory))])
    live, failed = faults.live, 0
    made = []
    for _ in faults.each(
        lambda: made.append(native.native.submit_batch(pools, 8, rows)), MemoryError
    ):
        failed += 1
        assert faults.live == live
        assert memory.untouched
    assert failed == 3 + READS, "queues, batch and handle, and each read"
    watched = list(faults.each(lambda: native.native.watch_batch(made[0]), MemoryError))
    assert watched == [1]
    for pool in pools:
        native.native.wake(pool)
    arrived = native.wait(pools[0], READS // 2) + native.wait(pools[1], READS // 2)
    assert sorted(ticket for ticket, _, _ in arrived) == [8, 9, 10, 11]
    assert memory[: READS * BLOCK] == content(0, BLOCK) * READS


@pytest.mark.parametrize("first", range(1, 2 * READS + 1))
def test_completions_that_python_has_no_memory_for_come_later_each_once_in_their_order(
    faults: Faults, native: Bench, first: int
) -> None:
    pool = native.open()
    wrong = native.read(GuardedMemory(BLOCK)).but(align=0)  # ends at once
    native.native.submit(pool, [wrong.but(ticket=n).fields for n in range(READS)])
    arrived: Arrived = []
    for number in (first, 1, 2, 1):
        faults.fail_at(number)
        with pytest.raises(MemoryError):
            native.native.drain(pool, arrived)
        faults.fail_at(0)
        if number == first:  # one that ends while others wait
            native.native.submit(pool, [wrong.but(ticket=READS).fields])
            first = 0
    native.native.drain(pool, arrived)
    assert [ticket for ticket, _, _ in arrived] == list(range(READS + 1))


def test_a_handle_that_goes_while_operations_are_under_way_leaves_nothing(
    faults: Faults, native: Bench
) -> None:
    memories = []  # of each round: its threads may be at it for a while
    for _ in range(50):
        pool = native.open(2)
        memories.append(GuardedMemory(30 * BLOCK))
        reads = native.reads(memories[-1])
        native.native.submit(pool, [one.fields for one in reads[:20]])
        batch = native.native.submit_batch([pool], 100, table([one.row() for one in reads[20:]]))
        native.native.wake(pool)
        native.pools.clear()
        del pool, batch
    assert eventually(lambda: faults.live == 0)
