"""A close from another thread, at every line that a load, put, remove or clear executes."""

from collections.abc import Callable
from typing import Any

import pytest

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.store import LoadItem, LoadResult, PutItem, PutResult
from fx100_lmcache.testing.harness import META, Rig, digest_of
from fx100_lmcache.testing.interpose import Interposed, at_every_line
from fx100_lmcache.testing.memory import Fault
from support.store import CHUNK, OTHER_META, chunk, put_all, rig

STORED = ["a", "b", "c", "d"]
Answers = list[list[Any]]


def load(store: Rig, answers: Answers) -> int:
    """Hits, a miss, a damaged object, and one that is removed by its only reader's end."""
    store.members[0].faults = [Fault("flip", "read", after=1)]
    items = [
        LoadItem(digest_of(name), zero_buffer(CHUNK), lambda _m, _n: True)
        for name in ["a", "x", "b", "c"]
    ]
    store.store.load(items, answers.append)
    return len(items)


def put(store: Rig, answers: Answers) -> int:
    """A new object, one that is there, and one that replaces another layout."""
    items = []
    for name, meta in (("new", META), ("a", META), ("b", OTHER_META)):
        buffer = zero_buffer(CHUNK)
        buffer.view[:] = chunk(name)
        items.append(PutItem(digest_of(name), meta, buffer))
    store.store.put(items, answers.append)
    return len(items)


def put_into_a_full_store(store: Rig, answers: Answers) -> int:
    """Evictions, and puts that wait for them."""
    items = []
    for number in range(12):
        buffer = zero_buffer(CHUNK)
        buffer.view[:] = chunk(f"more{number}")
        items.append(PutItem(digest_of(f"more{number}"), META, buffer))
    store.store.put(items, answers.append)
    return len(items)


def remove(store: Rig, answers: Answers) -> int:
    removed = store.store.remove([digest_of(name) for name in ("a", "b", "x")])
    answers.append(removed)
    return len(removed)


def clear(store: Rig, answers: Answers) -> int:
    answers.append([store.store.clear()])
    return 1


def refuse_everything(store: Rig) -> None:
    """Have any use of a member fail the test, as if another file had its descriptor by now."""

    def used(*_: object) -> int:
        pytest.fail("a member was used after it was closed")

    for member in store.members:
        member.read_into = member.write_from = member.flush = used  # type: ignore[assignment]


@pytest.mark.parametrize("operation", [load, put, put_into_a_full_store, remove, clear])
def test_a_close_at_every_line_answers_once_and_leaves_the_members_alone(
    operation: Callable[[Rig, Answers], int],
) -> None:
    def scenario(points: Interposed) -> None:
        store = rig(members=2, size_bytes=128 * 1024, load_s=1.0)
        put_all(store, STORED)
        answers: Answers = []
        expected: list[int] = []

        def close() -> None:
            if store.store.close(0.0) == 0:
                refuse_everything(store)

        def operate() -> None:
            expected.append(operation(store, answers))

        points.armed = True
        points.run(operate, close)
        assert [len(answer) for answer in answers] == expected
        for result in answers[0]:
            if isinstance(result, LoadResult):
                assert bool(result.reason) != bool(result.length)
            elif isinstance(result, PutResult):
                assert bool(result.reason) != result.stored
        store.lanes.release()
        assert store.engine.open_jobs == 0
        assert store.store._core.catalog._readers.sum() == 0
        store.check_space()

    for _ in at_every_line(("engine", "store"), scenario):
        pass
