from typing import Any

import pytest

from fx100_lmcache.doctor.engine import check_engine
from fx100_lmcache.doctor.ours import check_identity, check_shards, check_space
from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from support.doctor import OK, PROBLEM, WARNING, config_of, graded, only

MIB = 1 << 20
BOTH = Question()


def test_reserve_and_watermark_that_fit_are_fine() -> None:
    found = list(check_space(config_of(), 1000 * MIB, BOTH))
    assert [each.severity for each in found] == [OK, OK]


def test_a_reserve_of_less_than_one_object_is_a_warning() -> None:
    found = list(check_space(config_of(space={"reserve_fraction": 0.0}), 1000 * MIB, BOTH))
    assert "space.reserve_fraction: 0.01" in only(found, WARNING).do
    assert graded(list(check_space(config_of(), 10 * MIB, BOTH)), WARNING)


def test_a_watermark_next_to_the_reserve_is_a_warning_in_mp() -> None:
    config = config_of(space={"trigger_watermark": 0.97})
    found = list(check_space(config, 1000 * MIB, BOTH))
    assert "trigger_watermark: 0.92" in only(found, WARNING).do
    alone = Question(frozenset({IN_PROCESS}))
    assert not graded(list(check_space(config, 1000 * MIB, alone)), WARNING)


def test_without_a_volume_nothing_is_said_of_space() -> None:
    assert list(check_space(config_of(), None, BOTH)) == []


@pytest.mark.parametrize(
    ("identity", "severity"),
    [
        ({}, WARNING),
        ({"model_tags": {"m": "1"}}, OK),
        ({"model_tags": {"m": "1"}, "require_model_tag": True}, OK),
        ({"default_model_tag": "all"}, OK),
        ({"require_model_tag": True}, PROBLEM),
    ],
)
def test_models_should_have_tags(identity: dict[str, Any], severity: Any) -> None:
    found = check_identity(config_of(identity=identity))
    assert found.severity is severity
    assert bool(found.do) is (severity is not OK)


def shards(configured: int, formatted: int, ranks: int, base: int = 0) -> list:
    config = config_of(volume={"shards": configured}, inprocess={"shard_base": base})
    return list(check_shards(config, formatted, Question(ranks=ranks)))


def test_every_rank_needs_a_shard() -> None:
    assert {each.severity for each in shards(8, 8, 4, base=4)} == {OK}
    found = only(shards(8, 8, 4, base=5), PROBLEM)
    assert "need 9 shards, there are 8" in found.what


def test_the_server_opens_all_shards_there_are() -> None:
    found = list(check_shards(config_of(), 1, Question(frozenset({MP}), ranks=8)))
    assert not found


def test_another_number_of_shards_than_formatted_is_a_warning() -> None:
    assert "volume.shards: 4" in only(shards(2, 4, 2), WARNING).do
    assert only(shards(4, 2, 4), PROBLEM)


@pytest.mark.parametrize(
    ("engine", "built", "works", "severity", "told"),
    [
        ("auto", True, True, OK, "native"),
        ("auto", False, False, WARNING, "was not built"),
        ("native", True, False, WARNING, "libxxhash"),
        ("python", False, False, OK, "io.engine"),
    ],
)
def test_the_engine_in_use_is_told(
    engine: str, built: bool, works: bool, severity: Any, told: str
) -> None:
    found = check_engine(config_of(io={"engine": engine}), built=built, works=works)
    assert found.severity is severity
    assert told in found.what
