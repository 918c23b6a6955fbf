"""`fx100 plan`: what it says, for people and for machines, and what it refuses."""

import json
import math

import pytest
import typer
from typer.testing import CliRunner, Result

from fx100_lmcache.cli import app
from fx100_lmcache.cli.plan import BASIS, figures, workloads
from fx100_lmcache.sizing import MODELS, Workload, make_plan

QWEN = "qwen3-coder-480b-tp8"


def plan(*arguments: object) -> Result:
    words = ["plan", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_every_figure_says_what_it_rests_on() -> None:
    assert list(figures(make_plan(Workload(MODELS[QWEN])))) == list(BASIS)


def test_the_table_for_people() -> None:
    said = plan()
    assert said.exit_code == 0
    rows = {}
    for line in said.stdout.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) == 5:
            rows[cells[1]] = cells[2:4]
    assert set(rows) == set(BASIS)
    assert rows["KV GB"] == ["7.57", "arithmetic"]
    assert rows["chunk bytes"][0] == "8,126,464"
    assert rows["load s"][1].startswith("needs hardware")
    assert rows["L1 GB"][0] == "60.3"
    assert rows["limit"][0] == "array"


def test_several_models_side_by_side() -> None:
    said = plan("--model", "tiny-demo", "--model", "llama-3.1-70b-tp4", "--array-gb-per-s", 0.2)
    assert "tiny-demo" in said.stdout
    assert "never" in next(line for line in said.stdout.splitlines() if "break-even" in line)


def test_json_holds_the_same_plan() -> None:
    said = plan("--json", "--tokens", 8_192, "--concurrency", 1, "--ports", 2, "--prefill", 500)
    result = json.loads(said.stdout)
    (one,) = result["plans"]
    work = Workload(MODELS[QWEN], 8_192, concurrency=1, ports=2, prefill_tokens_per_s=500.0)
    assert one["model"]["name"] == QWEN
    assert one["kv_bytes"] == 8_192 * 253_952
    assert one["ttft_restored_s"] == make_plan(work).ttft_restored_s
    assert one["wire_bytes_per_s"] == make_plan(work).wire_bytes_per_s
    assert result["basis"] == BASIS


def test_json_has_null_where_no_number_is() -> None:
    (one,) = json.loads(plan("--json", "--tokens", 255).stdout, parse_constant=pytest.fail)["plans"]
    assert one["break_even_bytes_per_s"] is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model", "gpt-99"),
        ("--tokens", 0),
        ("--tokens", "many"),
        ("--concurrency", -1),
        ("--array-gb-per-s", 0),
        ("--ports", 0),
        ("--prefill", "inf"),
    ],
)
def test_a_bad_value_is_named(option: str, value: object) -> None:
    said = plan(option, value)
    assert said.exit_code == 2
    assert option in said.stderr
    assert "Traceback" not in said.stderr


def test_an_unknown_model_is_told_the_known_ones() -> None:
    assert "deepseek-v3-mla-tp8" in plan("--model", "gpt-99").stderr


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="nan is not a number"):
        workloads([QWEN], 1, 0, 1, 1.0, 1, math.nan)
