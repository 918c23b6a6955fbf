from pathlib import Path

import pytest

from fx100_lmcache.admin.inspect import Report, ShardReport
from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.doctor.volume import check_claims, check_volume, shards_needed
from fx100_lmcache.findings import problem, warning
from support.doctor import NOTE, OK, PROBLEM, config_of, only

HOLDER = "host=a pid=42"


def claims(state: str, *, running: bool = False, holder: str = HOLDER) -> list:
    shard = ShardReport(3, state, holder, 1, 1)
    return list(check_claims([shard], Question(running=running), lambda _: "lmcache server"))


def test_a_free_shard_is_fine() -> None:
    [found] = claims("free", holder="")
    assert (found.severity, found.what) == (OK, "free")


def test_a_busy_shard_is_a_problem_that_names_its_holder() -> None:
    found = only(claims("in use"), PROBLEM)
    assert found.subject == "shard 3"
    assert HOLDER in found.what
    assert "lmcache server" in found.what
    assert "--running" in found.do


def test_a_shard_of_another_host_is_a_problem() -> None:
    assert "take-over" in only(claims("claimed by another host"), PROBLEM).do


def test_a_shard_of_the_dead_is_told() -> None:
    assert "died" in only(claims("left behind"), NOTE).why


def test_the_running_server_holds_its_shards() -> None:
    assert claims("in use", running=True)[0].severity is OK


@pytest.mark.parametrize("state", ["free", "left behind", "claimed by another host"])
def test_a_running_server_without_its_shards_is_a_problem(state: str) -> None:
    assert "not loaded" in only(claims(state, running=True), PROBLEM).why


def test_the_server_needs_all_shards_and_a_rank_its_own() -> None:
    config = config_of(volume={"shards": 8}, inprocess={"shard_base": 2})
    assert shards_needed(config, Question(frozenset({MP}), ranks=2), 8) == range(8)
    assert shards_needed(config, Question(frozenset({IN_PROCESS}), ranks=2), 8) == range(2, 4)
    assert shards_needed(config, Question(frozenset({IN_PROCESS}), ranks=9), 8) == range(2, 8)


def test_what_status_says_is_passed_on() -> None:
    report = Report(str(Path("/x")))
    report.findings += [problem("volume", "a is gone", "why", "do", "a")]
    report.findings += [warning("volume", "b grew", "why", "do", "b")]
    assert [str(each.severity) for each in check_volume(report)] == ["problem", "warning"]
    assert (report.problems, report.warnings) == (report.findings[:1], report.findings[1:])
