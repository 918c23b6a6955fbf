"""The fuzzer of what is read from the media: its short form, and that it would notice."""

import json
import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fx100_lmcache.engine.native_lane import native_available
from fx100_lmcache.ondisk.reason import Reason
from fx100_lmcache.testing import fuzz
from fx100_lmcache.testing.crash import Violation
from fx100_lmcache.testing.fuzz import Fuzzer, run
from fx100_lmcache.volume import verdict
from fx100_lmcache.volume.verdict import Judge

needs_native = pytest.mark.skipif(
    not native_available(), reason="the native lane was not built (needs a C compiler)"
)

SHORT = {"label": 1500, "claim": 1000, "tables": 1200, "store": 200}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "fx100_lmcache")


def test_no_case_breaks_a_promise_and_every_reason_is_reached() -> None:
    fuzzer = Fuzzer(seed=20)
    for kind, cases in SHORT.items():
        run(fuzzer, 0, cases, kind=kind)
    assert fuzzer.tally.cases == SHORT
    assert set(+fuzzer.tally.reasons) == {reason.value for reason in Reason}
    seen = fuzzer.tally.outcomes
    assert min(seen[what] for what in ("hit", "honest, loaded", "miss: checksum", "put again")) > 50
    assert {"label taken", "claim taken", "claimed by another host"} <= set(seen)
    assert sum(what.startswith("label refused") for what in seen) >= 8
    assert sum(what.startswith("not opened") for what in seen) >= 2


def test_a_case_is_made_from_seed_and_number_alone() -> None:
    one, other = Fuzzer(seed=3), Fuzzer(seed=3)
    run(one, 0, 40)
    run(other, 30, 10)
    again = Fuzzer(seed=3)
    run(again, 0, 30)
    assert one.tally.reasons - again.tally.reasons == other.tally.reasons
    assert one.tally.cases - again.tally.cases == other.tally.cases


@needs_native
def test_native_reads_stay_between_guard_pages(tmp_path: Path) -> None:
    """In a process of its own: one byte too far would end it."""
    command = [sys.executable, "-m", fuzz.__name__, "--files", "--kind", "store", "--cases", "60"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**_environment(), "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["cases"] == {"store": 60}
    assert told["outcomes"]["hit"] > 50
    assert told["outcomes"]["engine native"] > 50


@pytest.mark.parametrize("beyond", [0, -1])
def test_a_byte_beyond_a_guarded_buffer_ends_the_process(beyond: int) -> None:
    program = f"""
        import ctypes
        from fx100_lmcache.testing.guarded import GuardedBuffer

        buffer = GuardedBuffer(4096)
        ctypes.memset(buffer.buffer.address, 1, 4096)
        assert buffer.intact
        print("inside", flush=True)
        ctypes.memset(buffer.buffer.address + (4096 if {beyond} == 0 else -1), 1, 1)
        print("outside")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, env=_environment()
    )
    assert done.stdout == b"inside\n"
    assert done.returncode < 0


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(fuzz.__file__).parents[2])}


def _all_true(_judge: Judge, found: Any, *_: object) -> Any:
    return np.ones(len(found.slots), np.bool_)


def _all_named(_judge: Judge, found: Any, _words: object) -> Any:
    return np.ones(len(found.slots), np.bool_), np.ones(len(found.slots), np.bool_)


CHECKS = {
    "lengths": (Judge, "_filled", _all_true),
    "pieces": (Judge, "_laid_out", _all_true),
    "metadata and digests": (Judge, "_named", _all_named),
    "generations": (verdict, "MAX_LOST_CLEARS", 1 << 40),
    "epochs": (verdict, "MAX_EPOCHS_AHEAD", 1 << 40),
    "counters": (verdict, "MAX_COUNTER", (1 << 64) - 1),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("kind", ["tables", "store"])
def test_a_check_that_is_switched_off_is_noticed(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, what, instead = CHECKS[name]
    monkeypatch.setattr(where, what, instead)
    with pytest.raises(Violation):
        run(Fuzzer(seed=5), 0, 1000, kind=kind)
