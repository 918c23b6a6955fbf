"""Memory lacks anywhere in a round of the claims: whoever waits for it is answered at once."""

import threading
from collections.abc import Callable, Iterator

import pytest

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.store import ownership as rounds
from fx100_lmcache.store.ownership import Ownership
from fx100_lmcache.testing.failures import FailingCall, each_failing_call
from fx100_lmcache.testing.harness import Rig
from fx100_lmcache.testing.memory import Fault
from support.store import chunk, counts, no_faults, options

ALWAYS = -1.0  # the last look is never recent enough
WHERE = ("store/ownership.py", "buffers.py", "volume/claim.py", "ondisk", "engine/jobs.py")
SPARED = {
    # who asks, and small steps of the answer itself, which allocate nothing
    *("check", "renew", "give_back", "may_write", "_begin", "_look", "_judge", "_note_begun"),
    *("_looked", "_written", "_came_back", "_note_over", "done", "then", "end", "ok"),
    *("_ends_if_it_fails", "_answer_lookers", "_answer", "_conclude"),
    *("round_up", "fits_directly"),  # the engine's
}


class Impatient(threading.Event):
    """Nobody has to wait."""

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is None or self.is_set(), "somebody waits"
        return super().wait(timeout)


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Event", Impatient)
        yield


def a_store() -> Rig:
    store = Rig.fresh(options=options(claim_check_s=ALWAYS))
    store.defects = Defects()
    store.reopen()
    return store


def owner_of(store: Rig) -> Ownership:
    return store.store._owner


def while_a_look_stalls(store: Rig, ask: Callable[[], list[bool]]) -> list[bool]:
    """Ask while a look is under way, which then ends."""
    for member in store.members:
        member.faults = [Fault("stall", "read")]
    answers = ask()
    no_faults(store)
    store.lanes.release()
    return answers


def ask(store: Rig, what: str) -> list[bool]:
    """Ask for a look, a renewal, or both; return the answers that have come."""
    owner = owner_of(store)
    answers: list[bool] = []
    if "look" in what:
        owner.check(answers.append, look=True)
    if what != "look":
        owner.renew(answers.append, release=what == "release")
    return answers


@pytest.mark.parametrize("what", ["look", "renew", "release", "look late and renew"])
def test_a_failure_at_any_call_of_a_round_answers_everyone_at_once(what: str) -> None:
    store = a_store()

    def scenario(failing: FailingCall) -> None:
        owner = owner_of(store)
        before, defects = owner.status()[0]["renewals"], counts(store)["internal_errors"]
        for member in store.members:
            member.calls.clear()
        with failing:
            if "late" in what:
                answers = while_a_look_stalls(store, lambda: ask(store, what))
            else:
                answers = ask(store, what)
        assert len(answers) == 1 + ("late" in what), failing.failed
        written = any(call == "write" for member in store.members for call, _, _ in member.calls)
        assert owner._released == (written and what == "release"), failing.failed
        assert (owner.status()[0]["renewals"] > before) == written, failing.failed
        assert owner._round is None, failing.failed
        assert owner._busy == [0, 0], failing.failed
        assert (counts(store)["internal_errors"] > defects) == bool(failing.failed)
        assert not (failing.failed and all(answers)), failing.failed
        assert counts(store)["claim_lost"] == 0, failing.failed
        if what == "release":
            store.store.close()
            store.reopen()
        assert store.store.beat() is not None
        assert store.put("a", chunk("a")).stored, failing.failed

    failed = list(each_failing_call(WHERE, SPARED, scenario))
    assert {"_reachable", "_look_job", "zero_buffer"} <= set(failed)
    assert what == "look" or {"_write_jobs", "pack", "_write_job"} <= set(failed)
    store.reopen()
    assert store.get("a") == chunk("a")


def test_jobs_that_an_engine_does_not_take_are_not_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = a_store()
    owner = owner_of(store)
    answers: list[bool] = []
    real = store.engine.submit
    for refused in (1, 2):  # of the look, of the write
        calls: list[object] = []

        def submit(jobs: object, refused: int = refused, calls: list[object] = calls) -> None:
            calls.append(jobs)
            if len(calls) == refused:
                raise MemoryError
            real(jobs)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(store.engine, "submit", submit)
            owner.renew(answers.append)
        assert owner._busy == [0, 0]
    owner.renew(answers.append)
    assert answers == [False, False, True]
    assert counts(store)["claim_renewal_failures"] == 2
    assert not store.store.problems() or "renewal" not in str(store.store.problems())


def test_a_renewal_that_memory_lacked_for_is_counted_shown_and_soon_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = a_store()
    with monkeypatch.context() as lacking:
        lacking.setattr(rounds, "zero_buffer", no_memory)
        assert store.store.beat() == rounds._AGAIN_S
    assert (counts(store)["claim_renewal_failures"], counts(store)["internal_errors"]) == (1, 1)
    assert any("the last renewal of the claims failed" in one for one in store.store.problems())
    usual = store.options.claim_timing.heartbeat_s
    assert store.store.beat() == usual > rounds._AGAIN_S
    assert not any("renewal" in one for one in store.store.problems())


def no_memory(*_: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def test_a_store_that_has_no_memory_to_confirm_its_claims_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = a_store()
    store.store.close()
    before = store.claim_clock()
    with monkeypatch.context() as lacking:
        lacking.setattr(rounds, "zero_buffer", no_memory)
        with pytest.raises((OSError, FX100Error), match=r"confirmed.*Cannot allocate memory"):
            store.reopen()
    assert store.claim_clock() - before < 1.0, "nothing but the claims had to settle"
    store.reopen()
    assert store.put("a", chunk("a")).stored


def test_a_store_that_has_no_memory_to_give_its_claims_back_closes_at_once_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = a_store()
    with monkeypatch.context() as lacking:
        lacking.setattr(rounds, "zero_buffer", no_memory)
        assert store.store.close() == 0
    assert "claims not given back: [Errno 12] Cannot allocate memory" in caplog.text
    store.reopen()


def test_a_clear_that_has_no_memory_for_its_round_erases_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = a_store()
    assert store.put("a", chunk("a")).stored
    real, left = zero_buffer, [1]  # the look finds memory, the renewal does not

    def once(size_bytes: int) -> object:
        left[0] -= 1
        return real(size_bytes) if left[0] >= 0 else no_memory()

    with monkeypatch.context() as lacking:
        lacking.setattr(rounds, "zero_buffer", once)
        assert store.store.clear() == 1
    assert counts(store)["erase_failures"] == 1
    assert store.store.space().used == 0
    store.reopen()
    assert store.get("a") is None
    store.check_space()
