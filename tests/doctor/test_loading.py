import sys
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.doctor import loading
from fx100_lmcache.doctor.documents import read_document
from fx100_lmcache.doctor.loading import (
    ADAPTER,
    PLUGIN,
    Outcome,
    Target,
    check_loading,
    targets,
    try_imports,
)
from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from support.doctor import OK, PROBLEM, inprocess_settings, only, written

MODULE = """
import sys
print("noise on stdout")
class Base: ...
class Good(Base): ...
class Other: ...
not_a_class = 1
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nothing_like_this")
    (tmp_path / "raising.py").write_text("raise RuntimeError('no such device')")
    (tmp_path / "ending.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def tried(module: str, name: str, base: str = "mine:Base") -> Outcome:
    return try_imports([Target("plugin", module, name, base)])[0]


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("module", "name", "outcome", "detail"),
    [
        ("mine", "Good", "ok", ""),
        ("mien", "Good", "no module", "No module named 'mien'"),
        ("mine.deeper", "Good", "no module", "mine"),
        ("broken", "Good", "import failed", "nothing_like_this"),
        ("raising", "Good", "import failed", "no such device"),
        ("ending", "Good", "import failed", "Python ended with 7"),
        ("mine", "God", "no class", ""),
        ("mine", "not_a_class", "no class", ""),
        ("mine", "Other", "wrong base", "Base"),
        ("", "Good", "import failed", "Empty module name"),
    ],
)
def test_imports_are_really_tried(module: str, name: str, outcome: str, detail: str) -> None:
    found = tried(module, name)
    assert found.outcome == outcome
    assert detail in found.detail


@pytest.mark.usefixtures("modules")
def test_a_base_class_that_is_gone_is_told() -> None:
    assert tried("mine", "Good", "mine:Gone").outcome == "no base"
    assert tried("mine", "Good", "gone:Base").outcome == "no base"


@pytest.mark.usefixtures("modules")
def test_all_are_tried_in_one_process() -> None:
    asked = [Target("a", "mine", "Good", "mine:Base"), Target("b", "mine", "Other", "mine:Base")]
    assert [each.outcome for each in try_imports(asked)] == ["ok", "wrong base"]
    assert try_imports([]) == []


@pytest.mark.usefixtures("modules")
def test_an_import_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(loading, "TIMEOUT_S", 1.0)
    assert "not done after 1 s" in tried("hanging", "Good").detail


@pytest.mark.usefixtures("modules")
def test_the_current_directory_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    assert tried("mine", "Good").outcome == "no module"


def judged(outcome: Outcome, target: Target = PLUGIN) -> Any:
    return list(check_loading([target], [outcome]))


def test_what_can_be_loaded_is_fine() -> None:
    assert judged(Outcome("ok"))[0].severity is OK


def test_a_typo_in_the_module_is_named() -> None:
    typo = Target("in-process: plugin fx100", "fx100_lmcache.lmcache.plugn", "X", PLUGIN.base)
    found = only(judged(Outcome("no module", "No module named '...'"), typo), PROBLEM)
    assert "fx100_lmcache.lmcache.plugn" in found.what
    assert "LMCache only logs" in found.why
    assert "module_path: fx100_lmcache.lmcache.plugin" in found.do


def test_a_typo_in_the_class_is_named_with_what_was_meant() -> None:
    typo = Target("p", PLUGIN.module_path, "FX100StorgePlugin", PLUGIN.base)
    names = ("FX100StoragePlugin", "Any")
    found = only(judged(Outcome("no class", "", names), typo), PROBLEM)
    assert "did you mean 'FX100StoragePlugin'" in found.what
    assert "class_name: FX100StoragePlugin" in found.do
    assert "mean" not in only(judged(Outcome("no class", "", ("Any",)), typo), PROBLEM).what


@pytest.mark.parametrize("outcome", ["import failed", "wrong base", "no base"])
def test_whatever_else_goes_wrong_is_a_problem(outcome: str) -> None:
    assert "because" in only(judged(Outcome(outcome, "because")), PROBLEM).what


def test_the_server_does_not_start_without_its_adapter() -> None:
    found = only(judged(Outcome("no module", "x"), ADAPTER), PROBLEM)
    assert "does not start" in found.why
    assert "FX100L2Adapter" in found.do


def test_without_a_document_our_own_classes_are_tried() -> None:
    assert targets(Question(), None) == [ADAPTER, PLUGIN]
    assert targets(Question(frozenset({MP})), None) == [ADAPTER]
    assert targets(Question(frozenset({IN_PROCESS})), None) == [PLUGIN]


def test_classes_that_the_document_names_are_tried(tmp_path: Path) -> None:
    extra = {"storage_plugin.fx100.class_name": "Typo"}
    path = written(tmp_path / "a", inprocess_settings(None, extra_config=extra))
    found = targets(Question(), read_document(path, {}))
    assert found[0] == ADAPTER
    assert (found[1].subject, found[1].class_name) == ("in-process: plugin fx100", "Typo")
    value = {"type": "plugin", "module_path": "m", "class_name": "C"}
    found = targets(Question(), read_document(written(tmp_path / "b", value), {}))
    assert (found[0].module_path, found[0].class_name) == ("m", "C")


def test_plugins_that_are_not_fully_named_are_judged_elsewhere(tmp_path: Path) -> None:
    content = {"storage_plugins": ["fx100"], "extra_config": {}}
    document = read_document(written(tmp_path / "a", content), {})
    assert targets(Question(frozenset({IN_PROCESS})), document) == []


@pytest.mark.lmcache
def test_our_own_classes_can_be_loaded() -> None:
    pytest.importorskip("torch", reason="needs the lmcache package")
    before = "lmcache.v1.distributed" in sys.modules
    wanted = targets(Question(), None)
    assert [each.severity for each in check_loading(wanted, try_imports(wanted))] == [OK, OK]
    assert ("lmcache.v1.distributed" in sys.modules) == before, "tried in a process of its own"
