"""Which chunks are asked for: returning sessions, and traces in Mooncake's JSONL form. Pure."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fx100_lmcache.sizing import ModelShape

TRACE_BLOCK_TOKENS = 512
"""Tokens that one of ``hash_ids`` stands for."""


def returning_sessions(count: int, tokens: int, chunk_tokens: int, scale: float) -> list[range]:
    """Give numbers to the chunks of sessions that share nothing.

    Parameters
    ----------
    scale : float
        Share of a session's chunks that is really stored and loaded; their size stays.
    """
    chunks = max(1, round(tokens // chunk_tokens * scale))
    return [range(number * chunks, (number + 1) * chunks) for number in range(count)]


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes
    ----------
    chunks : tuple of int
        Its full chunks; equal numbers are equal tokens after equal prefixes.
    """

    tokens: int
    chunks: tuple[int, ...]


def parse_trace(lines: Iterable[str], chunk_tokens: int, limit: int) -> list[Request]:
    """Read the first requests of a trace: ``input_length`` tokens in blocks ``hash_ids``.

    Raises
    ------
    ValueError
        If a line is not such a request; names it.
    """
    if TRACE_BLOCK_TOKENS % chunk_tokens:
        raise ValueError(f"chunks of {chunk_tokens} tokens do not divide blocks of 512")
    per_block = TRACE_BLOCK_TOKENS // chunk_tokens
    found: list[Request] = []
    for number, line in enumerate(lines, 1):
        if len(found) == limit:
            break
        try:
            fields = json.loads(line)
            tokens, ids = int(fields["input_length"]), [int(i) for i in fields["hash_ids"]]
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"line {number} is not a request of a trace: {problem}") from problem
        chunks = tuple(i * per_block + part for i in ids for part in range(per_block))
        found.append(Request(tokens, chunks[: tokens // chunk_tokens]))
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile.

    Raises
    ------
    ValueError
        If there are no values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def full_load_s(measured_s: float, scale: float, model: ModelShape) -> float:
    """Estimate a whole session's load on one node from a scaled one of one rank.

    All stored ranks' chunks go over the same path, so bytes decide.
    """
    return measured_s / scale * model.stored_ranks
