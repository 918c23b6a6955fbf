from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.cli.adapter import adapter_spec
from fx100_lmcache.doctor.documents import read_document
from fx100_lmcache.doctor.mp import check_adapter
from fx100_lmcache.findings import Finding
from support.doctor import NOTE, OK, PROBLEM, WARNING, config_of, only, written


def judged(tmp_path: Path, **changes: Any) -> list[Finding]:
    path, config = tmp_path / "fx100.yaml", config_of()
    value = {**adapter_spec(config, path), **changes}
    document = read_document(written(tmp_path / "adapter.json", value), {})
    return list(check_adapter(document, config, path))


def test_what_fx100_prints_is_fine(tmp_path: Path) -> None:
    assert {each.severity for each in judged(tmp_path)} == {OK}


def test_without_it_what_was_not_checked_is_told(tmp_path: Path) -> None:
    [found] = check_adapter(None, config_of(), tmp_path / "fx100.yaml")
    assert found.severity is NOTE
    assert f"fx100 l2-adapter {tmp_path / 'fx100.yaml'}" in found.do


def test_another_type_is_a_problem(tmp_path: Path) -> None:
    assert "'fs'" in only(judged(tmp_path, type="fs"), PROBLEM).what


@pytest.mark.parametrize("params", [None, {}, {"config": ""}, {"config": "/x", "more": 1}, "x"])
def test_wrong_parameters_are_a_problem(tmp_path: Path, params: Any) -> None:
    assert "adapter_params" in only(judged(tmp_path, adapter_params=params), PROBLEM).what


def test_another_configuration_is_a_problem(tmp_path: Path) -> None:
    found = only(judged(tmp_path, adapter_params={"config": "/elsewhere.yaml"}), PROBLEM)
    assert "/elsewhere.yaml" in found.what


def test_no_eviction_block_is_a_warning(tmp_path: Path) -> None:
    assert "no eviction block" in only(judged(tmp_path, eviction=None), WARNING).what


def test_a_watermark_within_the_reserve_is_a_warning(tmp_path: Path) -> None:
    found = only(judged(tmp_path, eviction={"trigger_watermark": 0.98}), WARNING)
    assert "0.98" in found.what
    assert "0.97" in found.what
