"""Handles, threads and processes that go while operations are under way."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fx100_lmcache.engine.native_lane import _native, native_available
from support.native_tools import (
    BLOCK,
    PATIENCE_S,
    Arrived,
    Bench,
    GuardedMemory,
    bench,
    content,
    eventually,
    table,
)

pytestmark = [
    pytest.mark.skipif(
        not native_available(), reason="the native lane was not built (needs a C compiler)"
    ),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),  # that is the point
]

BUSY_READS = 500


@pytest.fixture
def native(tmp_path: Path) -> Iterator[Bench]:
    module = _native()
    assert module is not None
    with bench(module, tmp_path / "member") as made:
        yield made


def in_child(work: Callable[[], object]) -> None:
    """Do something in a forked child; it must come to an end, and well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    until = time.monotonic() + PATIENCE_S
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(found[1]) == 0


def busy(native: Bench, memories: Sequence[GuardedMemory]) -> tuple[list[object], object]:
    """Pools whose threads take and give their locks all the time, and a batch (of no reads)."""
    pools = [native.open(4) for _ in memories]
    wrong = native.read(memories[0]).but(align=0)
    batch = native.native.submit_batch(pools, 1 << 63, table([wrong.row(n) for n in range(2)]))
    for pool, memory in zip(pools, memories, strict=True):
        native.native.submit(pool, [one.fields for one in native.reads(memory)])
    return pools, batch


def test_in_a_forked_child_handles_are_inert_and_the_parent_is_not_disturbed(
    native: Bench,
) -> None:
    memories = [GuardedMemory(BUSY_READS * BLOCK) for _ in range(2)]
    module = native.native
    for _ in range(6):
        pools, batch = busy(native, memories)

        def use_all(pools: list[object] = pools, batch: object = batch) -> None:
            arrived: Arrived = []
            for pool in pools:
                module.wake(pool)
                module.drain(pool, arrived)
                assert module.cancel(pool, 1), "no thread of this process has it"
                module.close_pool(pool)
                with pytest.raises(ChildProcessError):
                    module.submit(pool, [])
            with pytest.raises(ChildProcessError):
                module.submit_batch(pools, 0, table([native.read(memories[0]).row()]))
            assert arrived == []
            assert module.watch_batch(batch) == bytes(2)

        def drop_all() -> None:
            nonlocal pools, batch
            native.pools.clear()
            pools, batch = [], None
            gc.collect()

        in_child(use_all)
        in_child(drop_all)
        for pool in pools:
            assert len(native.wait(pool, BUSY_READS + 1)) == BUSY_READS + 1
            module.close_pool(pool)
        native.pools.clear()


def test_a_forked_child_can_have_pools_of_its_own(native: Bench) -> None:
    memories = [GuardedMemory(BUSY_READS * BLOCK) for _ in range(2)]
    pools, _ = busy(native, memories)

    def read_one() -> None:
        own = GuardedMemory(BLOCK)
        pool = native.open()
        native.native.submit(pool, [native.read(own, 5, offset=BLOCK).fields])
        assert native.wait(pool, 1)[0][:2] == (5, 0)
        assert own[:BLOCK] == content(BLOCK, BLOCK)

    event_fd, native.event_fd = native.event_fd, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    in_child(read_one)
    os.close(native.event_fd)
    native.event_fd = event_fd
    for pool in pools:
        native.wait(pool, BUSY_READS + 1)


def test_a_handle_may_go_at_any_time(native: Bench) -> None:
    """The memory that is read into stays; threads end on their own."""
    memories = []  # of each round: its threads may be at it for a while
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    for _ in range(100):
        pool = native.open(4)
        memories.append(GuardedMemory(60 * BLOCK))
        reads = native.reads(memories[-1])
        batch = native.native.submit_batch([pool], 99, table([one.row() for one in reads[30:]]))
        native.native.submit(pool, [one.fields for one in reads[:30]])
        native.pools.clear()
        del pool, batch
    assert eventually(lambda: len(os.listdir("/proc/self/task")) <= threads)  # noqa: PTH208
    native.fd = os.dup(native.fd)  # nobody has said that the other one is not used any more


def test_threads_of_pools_take_no_signal_but_for_their_own_faults(native: Bench) -> None:
    before = set(os.listdir("/proc/self/task"))  # noqa: PTH208
    native.open(2)
    theirs = set(os.listdir("/proc/self/task")) - before  # noqa: PTH208
    assert len(theirs) == 2
    own = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
    for thread in theirs:
        # a thread blocks all of them until it has begun
        assert eventually(lambda t=thread: taken_by(t) == own), taken_by(thread)


def taken_by(thread: str) -> set[signal.Signals | int]:
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    never = {signal.SIGKILL, signal.SIGSTOP}
    return {n for n in signal.valid_signals() if not blocked >> (n - 1) & 1} - never
