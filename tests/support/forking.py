"""Forks a process with a mounted store; the children use and close their copies."""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

from fx100_lmcache import config as settings
from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.jobs import Job, Status, Transfer
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.store import LoadItem, PutItem
from fx100_lmcache.testing.harness import META, digest_of, value_of
from support.engine import buffer_of

LENGTH = 64 * 1024
FORKS = 4
CHILD_S = 20.0


def put(mounted: Mounted, name: str) -> list[object]:
    buffer = zero_buffer(LENGTH)
    buffer.view[:] = value_of(name, 0, LENGTH)
    return answered(lambda done: mounted.store.put([PutItem(digest_of(name), META, buffer)], done))


def load(mounted: Mounted, name: str) -> tuple[list[object], bytes]:
    buffer = zero_buffer(LENGTH)
    item = LoadItem(digest_of(name), buffer, lambda _m, _n: True)
    return answered(lambda done: mounted.store.load([item], done)), bytes(buffer.view)


def answered(ask: object) -> list[object]:
    answer: list[list[object]] = []
    there = threading.Event()

    def done(results: list[object]) -> None:
        answer.append(results)
        there.set()

    ask(done)  # type: ignore[operator]
    assert there.wait(10.0), "never answered"
    assert len(answer) == 1
    return answer[0]


def check_copy(mounted: Mounted) -> None:
    """Be the child: everything answers at once, and nothing is done."""
    store, engine = mounted.store, mounted.engine
    assert store.lookup([digest_of("a")], pin=True).tolist() == [False]
    (result,), _ = load(mounted, "a")
    assert (result.length, result.reason) == (0, "forked")  # type: ignore[attr-defined]
    assert [r.stored for r in put(mounted, "b")] == [False]  # type: ignore[attr-defined]
    assert store.remove([digest_of("a")]) == []
    assert (store.clear(), store.unpin([digest_of("a")])) == (0, 0)
    assert store.status()["entries"] == 1
    reports: list[list[Status]] = []
    move = Transfer(0, 0, buffer_of(bytes(4096)), 0, 4096)
    engine.submit(
        [
            Job(
                True,
                [move],
                engine.now() + 60,
                lambda j: reports.append([t.status for t in j.transfers]),
            )
        ]
    )
    assert reports == [[Status.ERROR]]
    started = time.monotonic()
    assert (store.close(5.0), engine.close(5.0), mounted.close()) == (0, 0, 0)
    assert time.monotonic() - started < 4.0, "a close of a copy waits for nobody"


def fork_once(mounted: Mounted) -> None:
    """Fork while other threads hold every lock that they can."""
    held, let_go = threading.Event(), threading.Event()
    core, engine = mounted.store._core, mounted.engine

    def hold() -> None:
        with core.lock, engine._expiry._changed, engine._stripe._lock, engine.defects._lock:
            held.set()
            let_go.wait(CHILD_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(CHILD_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(CHILD_S))
        check_copy(mounted)
        del mounted, core, engine
        gc.collect()
        sys.exit(0)  # through the interpreter's end, which drops what is left
    let_go.set()
    holder.join()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"


def main() -> None:
    config = settings.load(Path(sys.argv[1]))
    mounted = mount(config)
    put(mounted, "a")
    stop, problems = threading.Event(), []

    def traffic() -> None:
        while not stop.is_set():
            (result,), data = load(mounted, "a")
            if data != value_of("a", 0, LENGTH):
                problems.append(result)

    busy = threading.Thread(target=traffic)
    busy.start()
    for _ in range(FORKS):
        fork_once(mounted)
    try:
        mount(config)
    except ClaimError:
        pass
    else:
        raise AssertionError("the parent's shards are anybody's after a fork")
    stop.set()
    busy.join(CHILD_S)
    assert not problems
    assert put(mounted, "c")[0].stored  # type: ignore[attr-defined]
    assert mounted.store.problems() == []
    assert mounted.close() == 0
    again = mount(config)
    assert load(again, "a")[1] == value_of("a", 0, LENGTH)
    assert again.close() == 0
    print("passed", flush=True)


main()
