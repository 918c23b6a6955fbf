"""Values as users write them: sizes, durations, numbers in a range, paths, hexadecimal ids.

Each ``*_field`` function returns a pydantic validator. All of them raise `ValueError` with a
sentence that says what is allowed; `fx100_lmcache.config.errors` adds the place and the value.
"""

import math
import os
import re
import sys
from fractions import Fraction
from pathlib import Path

from pydantic import BeforeValidator, ValidationInfo

SIZE_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
DURATION_UNITS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60)}
LOGICAL_BLOCK_BYTES = 4096
"""Largest logical block size of the devices in scope; sizes of I/O are multiples of it."""

MAX_PATH_BYTES = 4096
"""Linux takes no longer path in one call."""

_NUMBER_WITH_UNIT = re.compile(
    r"(?P<number>(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,9})?) ?(?P<unit>[A-Za-z]*)"
)


def parse_size(value: object) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    value
        A positive int (bytes), or text such as ``"8MiB"``, ``"1.5GiB"``, ``"4096"``.

    Returns
    -------
    int
        Bytes, greater than zero.

    Raises
    ------
    ValueError
        For anything else: zero, negative, a fraction of a byte, and decimal or one-letter units
        (``MB``, ``M``), which some tools read as powers of ten and others as powers of two.
    """
    allowed = "must be a size such as 8MiB, 1.5GiB or 4096 (bytes)"
    if isinstance(value, int) and not isinstance(value, bool):
        size_bytes = Fraction(value)
    elif isinstance(value, str) and (match := _NUMBER_WITH_UNIT.fullmatch(value)):
        unit = match["unit"] or "B"
        if unit not in SIZE_UNITS:
            raise ValueError(f"unit {unit!r} is ambiguous or unknown: use {', '.join(SIZE_UNITS)}")
        size_bytes = Fraction(match["number"]) * SIZE_UNITS[unit]
    else:
        raise ValueError(allowed)
    if size_bytes <= 0:
        raise ValueError(f"{allowed}, greater than zero")
    if size_bytes.denominator != 1:
        raise ValueError("is not a whole number of bytes")
    return int(size_bytes)


def format_size(size_bytes: int) -> str:
    """Return a size in the largest unit that states it exactly: the inverse of `parse_size`."""
    for unit, unit_bytes in reversed(SIZE_UNITS.items()):
        if size_bytes % unit_bytes == 0 and size_bytes:
            return f"{size_bytes // unit_bytes}{unit}"
    return f"{size_bytes}B"


def parse_duration(value: object) -> float:
    """Return a duration in seconds.

    Parameters
    ----------
    value
        A positive number of seconds, or text with a unit: ``"500ms"``, ``"2s"``, ``"1m"``.

    Returns
    -------
    float
        Seconds, greater than zero and finite.

    Raises
    ------
    ValueError
        For anything else.
    """
    allowed = "must be a duration: a number of seconds, or 500ms, 2s, 1m"
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e18 else math.inf
    elif isinstance(value, str) and (match := _NUMBER_WITH_UNIT.fullmatch(value)):
        unit = match["unit"] or "s"
        if unit not in DURATION_UNITS:
            raise ValueError(f"unit {unit!r} is unknown: use {', '.join(DURATION_UNITS)}")
        seconds = float(Fraction(match["number"]) * DURATION_UNITS[unit])
    else:
        raise ValueError(allowed)
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{allowed}, greater than zero")
    return seconds


def size_field(
    low_bytes: int, high_bytes: int, multiple_of: int = 1, power_of_two: bool = False
) -> BeforeValidator:
    """Accept a size from `low_bytes` to `high_bytes`, both included."""
    allowed = f"must be a size from {format_size(low_bytes)} to {format_size(high_bytes)}"
    if power_of_two:
        allowed += ", a power of two"
    elif multiple_of > 1:
        allowed += f", a multiple of {multiple_of}"

    def check(value: object) -> int:
        size_bytes = parse_size(value)
        fits = low_bytes <= size_bytes <= high_bytes and size_bytes % multiple_of == 0
        if not fits or (power_of_two and size_bytes & (size_bytes - 1)):
            raise ValueError(allowed)
        return size_bytes

    return BeforeValidator(check)


def duration_field(low_s: float, high_s: float, whole: bool = False) -> BeforeValidator:
    """Accept a duration from `low_s` to `high_s` seconds; `whole` asks for whole seconds.

    Only where `low_s` is 0 may it be nothing.
    """
    allowed = f"must be {'whole seconds' if whole else 'a duration'} from {low_s:g}s to {high_s:g}s"

    def check(value: object) -> float | int:
        nothing = low_s == 0 and not isinstance(value, bool) and value in (0, "0", "0s")
        seconds = 0.0 if nothing else parse_duration(value)
        if not low_s <= seconds <= high_s or (whole and not seconds.is_integer()):
            raise ValueError(allowed)
        return int(seconds) if whole else seconds

    return BeforeValidator(check)


def count_field(low: int, high: int) -> BeforeValidator:
    """Accept a whole number from `low` to `high`, both included."""

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return BeforeValidator(check)


def count_or_word_field(low: int, high: int, word: str) -> BeforeValidator:
    """Accept a whole number from `low` to `high`, or `word`."""

    def check(value: object) -> object:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value != word and not (whole and low <= value <= high):  # type: ignore[operator]
            raise ValueError(f"must be {word!r} or a whole number from {low} to {high}")
        return value

    return BeforeValidator(check)


def fraction_field(low: float, high: float) -> BeforeValidator:
    """Accept a number from `low` to `high`, both included."""

    def check(value: object) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # type: ignore[operator]
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return float(value)  # type: ignore[arg-type]

    return BeforeValidator(check)


def text_field(pattern: str, allowed: str) -> BeforeValidator:
    """Accept text that matches `pattern` in full."""
    compiled = re.compile(pattern)

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be text ({allowed}): put it in quotes")
        if not compiled.fullmatch(value):
            raise ValueError(f"must be {allowed}")
        return value

    return BeforeValidator(check)


def hex_field(digits: int) -> BeforeValidator:
    """Accept an identifier of `digits` hexadecimal digits; dashes and colons are ignored."""
    allowed = f"must be {digits} hexadecimal digits (dashes and colons are ignored)"

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{allowed}: put it in quotes")
        normal = value.replace("-", "").replace(":", "").lower()
        if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", normal):
            raise ValueError(allowed)
        if not normal.strip("0"):
            raise ValueError("is all zero, which means that the namespace has no such identifier")
        return normal

    return BeforeValidator(check)


def _path(value: object, info: ValidationInfo) -> Path:
    """Expand ``~`` and make a path absolute; links are kept, they are names that last."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("must be a path")
    try:
        too_long = len(os.fsencode(value)) >= MAX_PATH_BYTES
    except UnicodeEncodeError:
        raise ValueError(
            f"must be a path: file names here are {sys.getfilesystemencoding()}, which has no such "
            "characters (LC_ALL=C.UTF-8 has)"
        ) from None
    if too_long:
        raise ValueError(f"must be a path: shorter than {MAX_PATH_BYTES} bytes")
    expanded = os.path.expanduser(value)  # noqa: PTH111 - Path.expanduser raises without a home
    if expanded.startswith("~"):
        raise ValueError("must be a path: there is no such user's home directory")
    base = (info.context or {}).get("base_dir", Path.cwd())
    return Path(os.path.normpath(base / expanded))


PATH_FIELD = BeforeValidator(_path)


def _sequence(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


SEQUENCE_FIELD = BeforeValidator(_sequence)
"""Turn a YAML list into the tuple that a frozen model holds."""
