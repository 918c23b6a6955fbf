"""Standard input, output and error: open, and able to take every character.

What a terminal cannot show comes as plain characters or as an escape; that is decided here, once,
and not where something is printed.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from typing import Literal, TextIO

PLAIN = "fx100-plain"
"""Name of the error handler of the output's encoding."""

_LOOKALIKES = {
    "\u2026": "...",  # where a table cuts a cell
    "\u2022": "*",
    "\u2588": "#",
    **dict.fromkeys(
        "\u2500\u2501\u2504\u2505\u2508\u2509\u254c\u254d\u2550\u2574\u2576\u2578", "-"
    ),
    **dict.fromkeys("\u257a\u2013\u2014", "-"),
    **dict.fromkeys("\u2502\u2503\u2506\u2507\u250a\u250b\u254e\u254f\u2551\u2575\u2577", "|"),
}


def prepare_streams() -> None:
    """Make the standard streams usable. To be called before anything is opened.

    A stream that is closed leads to ``/dev/null`` from then on: else its number would be given to
    the next file that is opened, and what is written to it would go into a member of the volume.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # the lowest free number is given: this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or _text(0, "r")
    sys.stdout = sys.stdout or _text(1, "w")
    sys.stderr = sys.stderr or _text(2, "w")
    codecs.register_error(PLAIN, _plain)
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, PLAIN), (sys.stderr, PLAIN)):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # else somebody else's stream, as in tests
            reconfigure(errors=errors)


def _text(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", closefd=False)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replace what cannot be encoded: box drawing by ``+-|``, all else by an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain_character, error.object[error.start : error.end])), error.end


def _plain_character(character: str) -> str:
    if character in _LOOKALIKES:
        return _LOOKALIKES[character]
    if "\u2500" <= character <= "\u257f":
        return "+"
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is no text
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("ascii", "backslashreplace").decode("ascii")


def flush_output() -> None:
    """Write out what is left.

    Raises
    ------
    OSError
        If that fails; what is left is dropped then, so that it does not fail again at the exit.
    """
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        raise
