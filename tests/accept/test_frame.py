"""What all gates share: the plan, criteria, results, going on after an interruption."""

from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.accept import gate as gate_module
from fx100_lmcache.accept import node, plots
from fx100_lmcache.accept.criteria import Criteria, load_criteria
from fx100_lmcache.accept.scratch import check_scratch
from fx100_lmcache.accept.steps import (
    CannotRunError,
    Chart,
    Outcome,
    Verdict,
    gate_verdict,
    outcome_of,
)
from fx100_lmcache.config import load
from fx100_lmcache.config.errors import ConfigError
from support import ROOT
from support.acceptance import Site


def contents(site: Site) -> list[bytes]:
    return [path.read_bytes() for path in sorted(site.config.parent.glob("m*"))]


def test_the_shipped_criteria_are_the_defaults() -> None:
    assert load_criteria(ROOT / "configs" / "acceptance.yaml") == Criteria()


def test_the_shipped_scaled_criteria_load() -> None:
    assert load_criteria(ROOT / "configs" / "acceptance-scaled.yaml").g3.concurrency == (1, 4)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("g1: {fio: {depths: [1, 0]}}", "g1.fio.depths[1]"),
        ("g2: {engine_to_fi: 0.5}", "engine_to_fio"),
        ("g3: {goodput: soon}", "g3.goodput"),
        ("g4: {hours: 0}", "g4.hours"),
        ("[1]", "must be a mapping"),
    ],
)
def test_a_bad_criterion_is_named_by_its_place_in_the_file(
    tmp_path: Path, text: str, place: str
) -> None:
    file = tmp_path / "criteria.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_criteria(file)
    assert place in str(caught.value)


def test_bad_criteria_end_with_the_exit_code_for_could_not_run(site: Site) -> None:
    site.criteria.write_text("g2: {runs: 0}")
    done = site.accept("g2")
    assert done.exit_code == 2
    assert "g2.runs" in done.stderr


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (["passed", "does not apply"], "passed"),
        (["passed", "not run"], "incomplete"),
        (["not run", "failed"], "failed"),
        (["does not apply"], "incomplete"),
        ([], "incomplete"),
    ],
)
def test_a_gate_passes_only_if_all_of_it_was_run(found: list[str], verdict: str) -> None:
    assert gate_verdict(map(Verdict, found)) == verdict


def test_an_outcome_comes_back_from_plain_values() -> None:
    outcome = Outcome(why="so", raw={"a": [1]})
    outcome.judge("what", "found", "wanted", passed=False)
    assert outcome_of(outcome.plain()) == outcome
    assert outcome.verdict is Verdict.FAILED


def test_the_plan_writes_nothing_and_says_what_would_be_written(site: Site) -> None:
    before = contents(site)
    done = site.accept("g2", "--plan")
    assert done.exit_code == 0
    assert "of objects of its own into the free space" in done.stdout
    assert "Nothing is formatted" in done.stdout
    assert contents(site) == before
    assert not site.out("g2").exists()


def test_an_interrupted_gate_goes_on_where_it_was(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gate_module.run_step

    def interrupted(step: Any, bench: Any) -> Outcome:
        if step.name == node.LOAD:
            raise KeyboardInterrupt
        return whole(step, bench)

    monkeypatch.setattr(gate_module, "run_step", interrupted)
    assert site.accept("g2").exit_code == 130
    ran: list[str] = []

    def counted(step: Any, bench: Any) -> Outcome:
        ran.append(step.name)
        return whole(step, bench)

    monkeypatch.setattr(gate_module, "run_step", counted)
    done = site.accept("g2")
    assert done.exit_code == 0, done.output
    assert ran == [node.LOAD, node.ENGINE, node.VERIFY, node.CLEAN, plots.PLOTS]


def test_other_criteria_do_not_go_on_with_an_old_result(site: Site) -> None:
    assert site.accept("g1").exit_code == 2
    site.set("g1", member_spread=0.2)
    done = site.accept("g1")
    assert done.exit_code == 2
    assert "--fresh" in done.stderr


def test_the_report_has_facts_command_lines_and_what_programs_printed(site: Site) -> None:
    site.accept("g1")
    report = site.report("g1")
    assert report["facts"]["kernel"]
    assert report["configuration"] == site.config.read_text()
    commands = [each for step in report["steps"] for each in step["commands"]]
    assert [each["line"].split()[0] for each in commands] == ["fio"] * 4
    assert all((site.out("g1") / each["raw"]).stat().st_size for each in commands)
    page = (site.out("g1") / "report.html").read_text()
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert "<script" not in page
    assert "src=" not in page


def test_names_from_outside_do_not_become_html(tmp_path: Path, site: Site) -> None:
    evil = tmp_path / "<img onerror=x>"
    evil.write_bytes(bytes(1 << 20))
    site.accept("g1", "--destroy", evil)
    page = (site.out("g1") / "report.html").read_text()
    assert "<img" not in page
    assert "&lt;img onerror=x&gt;" in page


def test_a_chart_takes_the_colour_of_the_page() -> None:
    pytest.importorskip("matplotlib")
    svg = plots.draw(Chart("t", "x", "y", {"a": [(1, 2.0), (2, 3.0)], "b": []}, log_x=True))
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "#010203" not in svg


@pytest.mark.parametrize("name", ["m0", "link", "fx100-copy", "directory", "missing"])
def test_what_may_not_be_destroyed_is_refused(site: Site, tmp_path: Path, name: str) -> None:
    home = site.config.parent
    (home / "link").hardlink_to(home / "m1")
    (home / "fx100-copy").write_bytes((home / "m2").read_bytes())
    (home / "directory").mkdir()
    with pytest.raises(CannotRunError, match="--destroy"):
        check_scratch(load(site.config), [home / name])


def test_a_symbolic_link_to_a_member_is_refused(site: Site) -> None:
    link = site.config.parent / "link"
    link.symlink_to(site.config.parent / "m0")
    before = contents(site)
    done = site.accept("g1", "--destroy", link)
    assert done.exit_code == 2
    assert "member of the volume" in done.stderr
    assert contents(site) == before


def test_criteria_that_are_no_yaml_say_so(tmp_path: Path) -> None:
    file = tmp_path / "criteria.yaml"
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_criteria(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_criteria(tmp_path)


def test_a_finished_gate_is_not_run_again(site: Site) -> None:
    assert site.accept("g2").exit_code == 0
    before = site.report("g2")["steps"]
    assert site.accept("g2").exit_code == 0
    assert site.report("g2")["steps"] == before


def test_a_report_without_its_plots_is_incomplete(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    done = site.accept("g2")
    assert done.exit_code == 2
    assert "matplotlib is not installed" in done.stdout
    assert "incomplete: not run: plots" in done.stdout
