from typing import Any

from fx100_lmcache.doctor.documents import EngineSettings
from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.doctor.sizes import check_sizes
from fx100_lmcache.findings import Finding
from support.doctor import NOTE, OK, PROBLEM, WARNING, config_of, graded, only

GIB = 1 << 30
TOKENS, TOKEN_BYTES = 1024, 1 << 20  # one session is 1 GiB a rank, a chunk 256 MiB


def judged(
    modes: set[str],
    *,
    engine: EngineSettings | None = None,
    capacity_bytes: int | None = None,
    inode_slots: int | None = None,
    config: dict[str, Any] | None = None,
    **question: Any,
) -> list[Finding]:
    asked = {"model_tokens": TOKENS, "kv_bytes_per_token": TOKEN_BYTES, **question}
    settings = config_of(**(config or {"volume": {"object": 256 << 20}}))
    wanted = Question(frozenset(modes), **asked)
    return list(check_sizes(settings, wanted, engine, capacity_bytes, inode_slots))


def test_without_numbers_what_was_not_checked_is_told() -> None:
    assert "--model-len" in only(judged({MP}, model_tokens=None), NOTE).do
    assert only(judged({MP}, kv_bytes_per_token=None), NOTE)


def test_a_pool_that_holds_a_session_is_fine() -> None:
    found = judged({IN_PROCESS}, engine=EngineSettings(max_local_cpu_size=1.0))
    assert [each.severity for each in found] == [OK]


def test_a_pool_that_is_too_small_is_a_problem_with_the_right_size() -> None:
    found = only(judged({IN_PROCESS}, engine=EngineSettings(max_local_cpu_size=0.99)), PROBLEM)
    assert found.do == "set max_local_cpu_size: 1.00"
    assert "in part" in found.why


def test_the_pool_is_per_rank() -> None:
    found = judged({IN_PROCESS}, engine=EngineSettings(max_local_cpu_size=1.0), ranks=8)
    assert not graded(found, PROBLEM)


def test_layerwise_could_use_nothing() -> None:
    engine = EngineSettings(max_local_cpu_size=0.5, use_layerwise=True)
    assert "refuses to start" in only(judged({IN_PROCESS}, engine=engine), PROBLEM).why


def test_a_context_takes_whole_chunks() -> None:
    engine = EngineSettings(max_local_cpu_size=1.0)
    found = only(judged({IN_PROCESS}, engine=engine, model_tokens=TOKENS + 1), PROBLEM)
    assert found.do == "set max_local_cpu_size: 1.25"


def test_l1_holds_a_session_of_all_ranks_before_it_evicts() -> None:
    assert not graded(judged({MP}, l1_bytes=5 * GIB, ranks=4), PROBLEM)
    found = only(judged({MP}, l1_bytes=4 * GIB, ranks=4), PROBLEM)
    assert found.do == "lmcache server --l1-size-gb 5.00"


def test_unknown_l1_is_told() -> None:
    assert "--l1-size-gb" in only(judged({MP}), NOTE).do


def test_a_chunk_larger_than_the_write_bound_is_a_problem() -> None:
    found = judged({MP}, config={"io": {"max_write_in_flight": "64MiB"}}, l1_bytes=5 * GIB)
    assert "every put is dropped" in only(found, PROBLEM).why


def test_a_chunk_of_another_size_is_told() -> None:
    found = only(judged({MP}, config={"volume": {"object": "1MiB"}}, l1_bytes=5 * GIB), NOTE)
    assert "volume.object: 268435456" in found.do


def test_a_volume_smaller_than_a_session_is_a_warning() -> None:
    assert only(judged({MP}, l1_bytes=5 * GIB, capacity_bytes=GIB), WARNING).subject == "capacity"
    found = judged({MP}, l1_bytes=5 * GIB, capacity_bytes=2 * GIB)
    assert {each.severity for each in found} == {OK}


def test_chunks_that_use_the_inodes_up_before_the_space_are_warned_of() -> None:
    enough = judged({MP}, l1_bytes=5 * GIB, capacity_bytes=16 * GIB, inode_slots=64)
    assert not graded(enough, WARNING)
    found = only(judged({MP}, l1_bytes=5 * GIB, capacity_bytes=16 * GIB, inode_slots=32), WARNING)
    assert "32 chunks of 268435456 bytes use all inodes, but 50% of the space" in found.what
    assert "volume.object: 268435456" in found.do
