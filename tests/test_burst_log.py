"""One line for a burst of failures, however many there are."""

import logging
from typing import Any

import pytest

from fx100_lmcache.burst_log import BURST_S, SHOWN, BurstLog
from fx100_lmcache.testing.clock import SimulatedClock

log = logging.getLogger(__name__)


def lines(caplog: pytest.LogCaptureFixture) -> Any:
    return [record.getMessage() for record in caplog.records]


def test_the_first_is_told_at_once_and_the_rest_with_the_next_burst(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SimulatedClock()
    burst = BurstLog(log, "device 1", clock=clock)
    for _ in range(1000):
        burst.note("input/output error")
    assert lines(caplog) == ["device 1: 1 x input/output error (further ones are summed up)"]
    clock.advance(BURST_S)
    burst.note("no such device")
    assert lines(caplog)[1:] == [
        "device 1: 999 x input/output error, 1 x no such device (further ones are summed up)"
    ]


def test_a_line_stays_short(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    burst = BurstLog(log, "device 1", clock=clock)
    for number in range(100):
        burst.note(f"error at {number}")
    clock.advance(BURST_S)
    burst.note("error at 1")
    [_, summary] = lines(caplog)
    assert summary.startswith("device 1: 2 x error at 1, ")
    assert summary.count(" x ") == SHOWN
    assert f"and {99 - SHOWN} others" in summary
