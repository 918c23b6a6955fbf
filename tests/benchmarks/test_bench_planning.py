import math
from dataclasses import replace

import pytest

from fx100_lmcache.planning import (
    MODELS,
    PORT_BYTES_PER_S,
    WIRE_SHARE,
    Workload,
    break_even_tokens,
    check_published,
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
        make_plan(replace(WORK, **{field: 0}))


def test_the_median_of_a_queue() -> None:
    assert median_finish_s(1.0, 0.0, 1) == 1.0
    assert median_finish_s(1.0, 0.0, 3) == 2.0
    assert median_finish_s(1.0, 3.0, 3) == 7.0
    assert median_finish_s(3.0, 1.0, 3) == 7.0


def test_full_chunks_waste_only_inodes() -> None:
    assert stored_chunk_bytes(QWEN.chunk_bytes()) == 8_126_464 + 64 * 1024
    assert stored_chunk_bytes(1) == 32 * 1024 + 1024


def test_published_figures_are_all_judged() -> None:
    found = check_published()
    assert len(found) == 8
    assert all(
        "agrees" in f.verdict or "deviates" in f.verdict or "possible" in f.verdict for f in found
    )
    assert all("eeds hardware" in one.verdict for one in found)
    floor = next(one for one in found if one.what == "TTFT after, 8 sessions")
    assert "6.51 s" in floor.model
    assert "impossible when shared" in floor.verdict
