import math
from dataclasses import replace

import pytest

from benchmarks.published import PUBLISHED, SESSION_BYTES, Published, compare, implied_bytes_per_s
from fx100_lmcache.sizing import (
    MODELS,
    PORT_BYTES_PER_S,
    WIRE_SHARE,
    Workload,
    break_even_tokens,
    make_plan,
    median_finish_s,
    stored_chunk_bytes,
)

QWEN = MODELS["qwen3-coder-480b-tp8"]
WORK = Workload(QWEN)


@pytest.mark.parametrize(
    ("name", "per_token", "chunk"),
    [
        ("qwen3-coder-480b-tp8", 253_952, 8_126_464),
        ("qwen3-coder-480b-tp8-fp8", 126_976, 4_063_232),
        ("qwen3-coder-480b-tp4", 253_952, 16_252_928),
        ("qwen2.5-32b-tp1", 262_144, 67_108_864),
        ("deepseek-v3-mla-tp8", 70_272, 17_989_632),
        ("llama-3.1-70b-tp4", 327_680, 20_971_520),
        ("tiny-demo", 4096, 1_048_576),
    ],
)
def test_kv_shapes_are_those_of_the_models(name: str, per_token: int, chunk: int) -> None:
    assert MODELS[name].bytes_per_token == per_token
    assert MODELS[name].chunk_bytes() == chunk


def test_heads_are_replicated_past_one_a_rank() -> None:
    assert replace(QWEN, tensor_parallel=16).bytes_per_token == 2 * QWEN.bytes_per_token


def test_a_session_of_the_480b_model() -> None:
    plan = make_plan(WORK)
    assert plan.kv_bytes == 29_800 * 253_952
    assert plan.restored_tokens == 116 * 256
    assert plan.chunks == 116 * 8
    assert plan.load_s == pytest.approx(116 * 256 * 253_952 / 5.23e9)
    assert plan.l1_bytes == 8 * 116 * 256 * 253_952
    assert plan.limited_by == "array"


def test_the_wire_limits_a_faster_array() -> None:
    plan = make_plan(replace(WORK, array_bytes_per_s=100e9))
    assert plan.limited_by == "wire"
    assert plan.bandwidth_bytes_per_s == PORT_BYTES_PER_S * WIRE_SHARE
    assert make_plan(replace(WORK, array_bytes_per_s=100e9, ports=20)).limited_by == "array"


def test_a_hit_slower_than_computing_is_seen() -> None:
    slow = replace(WORK, array_bytes_per_s=0.1e9)
    assert break_even_tokens(slow) is None
    plan = make_plan(slow)
    assert plan.ttft_restored_s > plan.ttft_computed_s
    assert plan.break_even_bytes_per_s == pytest.approx(8_000 * 253_952)


def test_break_even_is_where_loading_begins_to_win() -> None:
    work = replace(WORK, concurrency=1, new_tokens=0)
    tokens = break_even_tokens(work)
    assert tokens is not None
    wins, loses = (make_plan(replace(work, tokens=t)) for t in (tokens, tokens - 256))
    assert wins.ttft_restored_s < wins.ttft_computed_s
    assert loses.ttft_restored_s >= loses.ttft_computed_s


def test_a_context_shorter_than_a_chunk_restores_nothing() -> None:
    plan = make_plan(replace(WORK, tokens=255))
    assert (plan.restored_tokens, plan.chunks, plan.sessions_per_tb) == (0, 0, 0)
    assert math.isinf(plan.break_even_bytes_per_s)


@pytest.mark.parametrize("field", ["tokens", "concurrency", "array_bytes_per_s", "ports"])
def test_numbers_must_be_positive(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make_plan(replace(WORK, **{field: 0}))  # type: ignore[arg-type]


def test_the_median_of_a_queue() -> None:
    assert median_finish_s(1.0, 0.0, 1) == 1.0
    assert median_finish_s(1.0, 0.0, 3) == 2.0
    assert median_finish_s(1.0, 3.0, 3) == 7.0
    assert median_finish_s(3.0, 1.0, 3) == 7.0


def test_full_chunks_waste_only_inodes() -> None:
    assert stored_chunk_bytes(QWEN.chunk_bytes()) == 8_126_464 + 64 * 1024
    assert stored_chunk_bytes(1) == 32 * 1024 + 1024


def test_the_published_rows_are_those_of_the_published_table() -> None:
    rows = {row.concurrency: row for row in PUBLISHED}
    assert {n: (row.local_s, row.array_s) for n, row in rows.items()} == {
        8: (10.17, 7.53),
        16: (17.31, 11.85),
        32: (35.73, 26.35),
    }
    assert pytest.approx(7.145, abs=0.001) == SESSION_BYTES / 2**30
    # TTFT fell by 26 to 32 percent, as published
    assert [round(1 - row.array_s / row.local_s, 2) for row in PUBLISHED] == [0.26, 0.32, 0.26]


def test_published_figures_are_held_against_bandwidth() -> None:
    verdicts = {one.what: one.verdict for one in compare()}
    assert "the disk is the limit" in verdicts["TTFT from the local disk, 32 sessions"]
    assert "the disk is not all of it" in verdicts["TTFT from the local disk, 8 sessions"]
    for sessions in (8, 16, 32):
        assert "the array is the limit" in verdicts[f"TTFT from the array, {sessions} sessions"]
    assert "13 times" in verdicts["TTFT computed again, 16 sessions"]


def test_an_impossible_figure_is_seen() -> None:
    row = Published(32, 35.73, 11.85, 0.4)  # a row of two tables: 20 GB/s on one port
    assert implied_bytes_per_s(row, row.array_s) > 1.5 * PORT_BYTES_PER_S
