"""The published FX100 evaluation of Qwen3-Coder-480B, held against arithmetic. Pure.

Source: code, data and reports of github.com/mingxin-tech/mingxin-kvcache-bench. Both sides ran
LMCache's in-process local disk with a patch that reads with 32 threads, on XFS: on md RAID0 of
four of the array's disks, and on one local Gen4 NVMe. Each session was read once, with the page
cache dropped and 4 GB of host memory for LMCache. Decoding, scheduling and the time to compute the
last turn are in the published figures and not in the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from fx100_lmcache.sizing import MODELS, PORT_BYTES_PER_S

SESSION_TOKENS = 118 * 256
"""30,208 tokens in 118 chunks: 7.145 GiB of KV over all ranks."""
SESSION_BYTES = SESSION_TOKENS * MODELS["qwen3-coder-480b-tp8"].bytes_per_token
LOCAL_BYTES_PER_S = 6.8e9
"""The baseline's one Gen4 NVMe."""
ARRAY_MEAN_BYTES_PER_S = (7.5e9, 9.3e9)
ARRAY_PEAK_BYTES_PER_S = 10.2e9
SEQUENTIAL_BYTES_PER_S = 0.98e9
"""Another test: Qwen2.5-32B on one accelerator, one member, one chunk at a time."""
PARALLEL_BYTES_PER_S = 5.23e9
"""The same set-up, four members in parallel."""
COMPUTED_AT_16_S = 149.5
"""TTFT p50 of 16 sessions that are computed again."""


@dataclass(frozen=True)
class Published:
    """One row of the published table: p50 of sessions that come back together.

    Attributes
    ----------
    local_s, array_s : float
        Time to first token from the local disk and from the array.
    throughput_gain : float
        Tokens per second of the array's run over the local disk's, less 1.
    """

    concurrency: int
    local_s: float
    array_s: float
    throughput_gain: float


PUBLISHED = (
    Published(8, 10.17, 7.53, 0.29),
    Published(16, 17.31, 11.85, 0.40),
    Published(32, 35.73, 26.35, 0.33),
)


@dataclass(frozen=True)
class Comparison:
    """One published figure against the arithmetic."""

    what: str
    published: str
    arithmetic: str
    verdict: str


def compare() -> list[Comparison]:
    """Put every published figure beside what arithmetic says of it."""
    return [
        _speedup(),
        *(_throughput(row) for row in PUBLISHED),
        *(_local(row) for row in PUBLISHED),
        *(_array(row) for row in PUBLISHED),
        _computed(),
    ]


def implied_bytes_per_s(row: Published, ttft_s: float) -> float:
    """Bandwidth of all sessions together, if they share it and loading is all of the TTFT."""
    return row.concurrency * SESSION_BYTES / ttft_s


def _speedup() -> Comparison:
    ratio = PARALLEL_BYTES_PER_S / SEQUENTIAL_BYTES_PER_S
    return Comparison(
        "parallel against sequential reading",
        f"5.23 / 0.98 GB/s = {ratio:.1f}x",
        "four members alone give at most 4x; the rest is more than one read in flight for each",
        f"agrees if both are counted; {PARALLEL_BYTES_PER_S / PORT_BYTES_PER_S:.0%} of one 100 GbE "
        "port, so the wire is not the limit",
    )


def _throughput(row: Published) -> Comparison:
    expected = row.local_s / row.array_s - 1
    points = abs(expected - row.throughput_gain) * 100
    return Comparison(
        f"throughput, {row.concurrency} sessions",
        f"TTFT {row.array_s / row.local_s - 1:+.0%}, throughput {row.throughput_gain:+.0%}",
        f"{expected:+.0%} in a closed loop bound by the time to first token (Little's law)",
        f"agrees within {points:.0f} points; decoding and think time move it",
    )


def _local(row: Published) -> Comparison:
    implied = implied_bytes_per_s(row, row.local_s)
    share = implied / LOCAL_BYTES_PER_S
    return Comparison(
        f"TTFT from the local disk, {row.concurrency} sessions",
        f"{row.local_s:.2f} s",
        f"all sessions sharing the disk: {implied / 1e9:.2f} GB/s",
        f"{share:.0%} of its 6.8 GB/s: "
        + ("the disk is the limit" if share > 0.9 else "the disk is not all of it"),
    )


def _array(row: Published) -> Comparison:
    implied = implied_bytes_per_s(row, row.array_s)
    low, high = ARRAY_MEAN_BYTES_PER_S
    if low <= implied <= high * 1.01:
        verdict = "within the published mean of 7.5 to 9.3 GB/s: the array is the limit"
    elif implied <= ARRAY_PEAK_BYTES_PER_S * 1.02:
        verdict = "above the published mean, at its peak of 10.2 GB/s: the array is the limit"
    else:
        verdict = "more than the published peak of 10.2 GB/s: not all of it was read"
    return Comparison(
        f"TTFT from the array, {row.concurrency} sessions",
        f"{row.array_s:.2f} s",
        f"all sessions sharing the array: {implied / 1e9:.2f} GB/s",
        verdict,
    )


def _computed() -> Comparison:
    row = next(row for row in PUBLISHED if row.concurrency == 16)
    # one after the other, the median of 16 has waited for 8.5 of them
    prefill = (row.concurrency + 1) / 2 * SESSION_TOKENS / COMPUTED_AT_16_S
    return Comparison(
        "TTFT computed again, 16 sessions",
        f"{COMPUTED_AT_16_S:.1f} s",
        f"{prefill:,.0f} tokens/s of prefill, if sessions are computed one after the other",
        f"loading from the array is {COMPUTED_AT_16_S / row.array_s:.0f} times as fast",
    )
