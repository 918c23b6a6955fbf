import contextlib
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fx100_lmcache.config import format_size, parse_duration, parse_size
from fx100_lmcache.config.values import DURATION_UNITS, SIZE_UNITS

ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("512B", 512),
        ("8MiB", 8 << 20),
        ("8 MiB", 8 << 20),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("0.5KiB", 512),
        ("1PiB", 1 << 50),
    ],
)
def test_sizes(written: int | str, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize(
    "written",
    [
        0, -1, "0", "-1", "0MiB", "-8MiB", "+8MiB", 1.0, 1.5, True, False, None, [], {}, b"8MiB",
        "", " ", "MiB", "8M", "8MB", "8mb", "8mib", "8MIB", "8m", "8k", "8G", "8  MiB", " 8MiB",
        "8MiB ", "8MiB\n", "1_000", "1,000", "010", "08MiB", "0x10", "1e6", "1.MiB", ".5MiB",
        "0.3KiB", "1.5", "1.5B", "1/2MiB", "8MiBit", "\u0668MiB", "nan", "inf", "9" * 5000,
    ],
)  # fmt: skip
def test_ambiguous_or_impossible_sizes_are_refused(written: Any) -> None:
    with pytest.raises(ValueError, match=r"size|unit|whole number of bytes"):
        parse_size(written)


def test_an_ambiguous_unit_is_answered_with_the_units_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'MB' is ambiguous or unknown: use B, KiB, MiB, GiB"):
        parse_size("8MB")


@ANY_SPEED
@given(st.integers(min_value=1, max_value=1 << 64))
def test_size_round_trip(size_bytes: Any) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes
    assert parse_size(str(size_bytes)) == parse_size(size_bytes) == size_bytes


@ANY_SPEED
@given(st.integers(1, 10**6), st.sampled_from(sorted(SIZE_UNITS)))
def test_size_round_trip_from_text(number: Any, unit: Any) -> None:
    size_bytes = parse_size(f"{number}{unit}")
    assert size_bytes == number * SIZE_UNITS[unit]
    assert parse_size(format_size(size_bytes)) == size_bytes


@ANY_SPEED
@given(st.text())
def test_any_text_is_a_size_or_a_value_error(text: Any) -> None:
    with contextlib.suppress(ValueError):
        assert parse_size(text) > 0


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(2, 2.0), (0.25, 0.25), ("2", 2.0), ("500ms", 0.5), ("2s", 2.0), ("1.5 s", 1.5), ("1m", 60.0)],
)
def test_durations(written: float | int | str, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        0, -1, 0.0, -0.5, "0s", "-1s", True, None, [], math.nan, math.inf, -math.inf, 10**400,
        "", "s", "1h", "1min", "1us", "1M", "1S", "1:30", "2s ", "soon", "010s", "1e3s",
    ],
)  # fmt: skip
def test_impossible_durations_are_refused(written: Any) -> None:
    with pytest.raises(ValueError, match=r"duration|unit"):
        parse_duration(written)


@ANY_SPEED
@given(st.integers(1, 10**6), st.sampled_from(sorted(DURATION_UNITS)))
def test_duration_round_trip(number: Any, unit: Any) -> None:
    assert parse_duration(f"{number}{unit}") == float(number * DURATION_UNITS[unit])
