import pytest

from benchmarks.mooncake import best_hit_rate
from benchmarks.sessions import Request, full_load_s, parse_trace, percentile, returning_sessions
from fx100_lmcache.sizing import MODELS

LINE = '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}'


def test_sessions_share_no_chunk_and_scale_by_count() -> None:
    sessions = returning_sessions(3, 29_800, 256, 1.0)
    assert [len(one) for one in sessions] == [116] * 3
    assert len({chunk for one in sessions for chunk in one}) == 3 * 116
    assert len(returning_sessions(1, 29_800, 256, 0.125)[0]) == 14
    assert len(returning_sessions(1, 29_800, 256, 1e-9)[0]) == 1


def test_a_trace_gives_full_chunks_only() -> None:
    request = parse_trace([LINE], 256, 10)[0]
    assert request == Request(1100, (14, 15, 16, 17))
    assert parse_trace([LINE] * 5, 512, 2) == [Request(1100, (7, 8))] * 2


@pytest.mark.parametrize(
    "line", ["", "[]", '{"input_length": 1}', '{"input_length": 1, "hash_ids": 3}']
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        parse_trace([LINE, line], 256, 10)


def test_chunks_must_divide_the_blocks_of_a_trace() -> None:
    with pytest.raises(ValueError, match="300"):
        parse_trace([LINE], 300, 10)


def test_percentiles_are_of_the_values_given() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_a_scaled_load_is_scaled_back_by_bytes() -> None:
    assert full_load_s(0.1, 0.125, MODELS["qwen3-coder-480b-tp8"]) == pytest.approx(6.4)
    assert full_load_s(0.1, 0.125, MODELS["deepseek-v3-mla-tp8"]) == pytest.approx(0.8)


def test_the_best_hit_rate_counts_prefixes_only() -> None:
    requests = [Request(4, (1, 2, 3)), Request(4, (1, 2, 4)), Request(4, (9, 1, 2))]
    assert best_hit_rate(requests) == pytest.approx(2 / 9)
    assert best_hit_rate([]) == 0.0
