"""Memory lacks at any call of a load: every item is answered once, or the load raises."""

import pytest

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine import engine as lane_engine
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.store import LoadItem, LoadResult
from fx100_lmcache.store import load as load_module
from fx100_lmcache.testing.failures import FailingCall, each_failing_call
from fx100_lmcache.testing.harness import Rig, digest_of
from fx100_lmcache.testing.memory import Fault
from support.store import CHUNK, chunk, options, put_all

NAMES = ["a", "b", "x", "c", "a", "d", "y"]

WHERE = ("engine", "store/load.py", "store/columns.py", "catalog")
SPARED = {
    # small steps of the answer itself: what they call may fail, but not that they are called
    *("guard", "__init__", "__enter__", "__exit__", "caught", "_add", "now", "begin", "end"),
    *("finish", "done", "_report", "_collect", "_let_go", "stop_reading"),
    *("submit", "_read_batch", "_hand_over", "expire_due", "pop", "heappop"),
    # of the entry that is erased after its last reader
    *("release", "free"),
}


def store_of_four() -> Rig:
    store = Rig.fresh(2, 128 * 1024, options=options(load_s=5.0))
    put_all(store, ["a", "b", "c", "d"])
    store.defects = Defects()
    store.reopen()
    return store


@pytest.mark.parametrize("trouble", ["none", "stall", "flip"])
def test_a_failure_at_any_call_of_a_load_answers_each_item_once(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "_SLICE", 3)  # several batches
    monkeypatch.setattr(lane_engine, "_SLICE", 2)  # of several submissions
    raised = []

    def scenario(failing: FailingCall) -> None:
        store = store_of_four()
        if trouble != "none":
            store.members[0].faults = [Fault(trouble, "read", after=1)]
        buffers = [zero_buffer(CHUNK) for _ in NAMES]
        items = [
            LoadItem(digest_of(name), buffer, lambda _m, _n: True)
            for name, buffer in zip(NAMES, buffers, strict=True)
        ]
        answers: list[list[LoadResult]] = []
        then: list[list[bytes]] = []

        def contents() -> list[bytes]:
            return [bytes(buffer.view) for buffer in buffers]

        def answered(results: list[LoadResult]) -> None:
            answers.append(results)
            then.append(contents())

        with failing:
            try:
                store.store.load(items, answered, hold=True)
            except MemoryError:
                raised.append(failing.failed)
                answered([])
            store.clock.advance(5.0)
            store.engine.expire_due()
            store.lanes.release()
        store.clock.advance(100.0)  # what could not be done for want of memory is done by now
        store.engine.expire_due()
        store.lanes.release()
        assert len(answers) == 1, failing.failed
        assert contents() == then[0], "a buffer was written to after the answer"
        for name, result, found in zip(NAMES, answers[0], then[0], strict=False):
            assert not result.length or found == chunk(name), failing.failed
        assert len(answers[0]) in (0, len(NAMES))
        assert not failing.failed or not answers[0] or store.engine.defects.count, failing.failed
        assert store.engine.open_jobs == 0, failing.failed
        assert store.store._core.catalog._readers.sum() == 0, failing.failed
        store.check_space()

    failed = list(each_failing_call(WHERE, SPARED, scenario))
    assert len(failed) > 50
    assert 0 < len(raised) < len(failed)
