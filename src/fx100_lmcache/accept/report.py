"""The report: JSON for machines, and one HTML page that both sides can sign."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fx100_lmcache.accept import plots
from fx100_lmcache.accept.bench import Bench
from fx100_lmcache.accept.gate import Gate, verdicts
from fx100_lmcache.accept.state import Done, State
from fx100_lmcache.accept.steps import Check, Step, Table, Verdict, gate_verdict

JSON_FILE, HTML_FILE = "report.json", "report.html"
_MARKS = {True: "passed", False: "failed", None: "reported"}

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --page: #fff; --soft: #5c6670; --line: #d5dae0;
  --panel: #f5f7f9; --passed: #1a7f37; --failed: #b42318; --open: #8a5a00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --page: #14181d; --soft: #9aa5b1;
  --line: #38414b; --panel: #1c2229; --passed: #4ac26b; --failed: #ff7b6e; --open: #e3b341 } }
@page { size: A4; margin: 16mm }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem }
h1 { font-size: 1.6rem; margin: 0 0 .25rem } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem }
h3 { font-size: 1rem; margin: 0 }
p { margin: .3rem 0 } .soft { color: var(--soft) }
.passed { color: var(--passed) } .failed { color: var(--failed) }
.not-run, .incomplete { color: var(--open) } .does-not-apply, .reported { color: var(--soft) }
.verdict { font-size: 1.15rem; font-weight: 600; border-left: 6px solid; padding: .5rem .9rem;
  background: var(--panel); margin: 1rem 0 }
section { border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; margin: .8rem 0 }
section header { display: flex; gap: 1rem; align-items: baseline; justify-content: space-between }
.tag { font-weight: 600; white-space: nowrap }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .87rem; margin: .6rem 0 }
caption { text-align: left; color: var(--soft); padding: .2rem 0 }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word }
.checks td, .commands td:first-child { overflow-wrap: anywhere }
th { color: var(--soft); font-weight: 600 }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
table.checks { table-layout: fixed } .checks th:last-child { width: 6rem }
figure { margin: .8rem 0 } figure svg { max-width: 100%; height: auto }
figcaption { color: var(--soft); font-size: .87rem }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .7rem;
  font-size: .78rem; white-space: pre-wrap; overflow-wrap: anywhere }
.sign { display: grid; grid-template-columns: 1fr 1fr; gap: 3rem; margin-top: 3rem }
.sign div { border-top: 1px solid var(--ink); padding-top: .3rem; color: var(--soft) }
@media print { :root { color-scheme: light; --ink: #000; --page: #fff; --soft: #444; --line: #bbb;
  --panel: #fff; --passed: #1a7f37; --failed: #b42318; --open: #8a5a00 }
  main { max-width: none; padding: 0 } section, figure, .sign { break-inside: avoid }
  h2, h3 { break-after: avoid } table { font-size: .74rem } th, td { padding-right: .45rem } }
"""


def write_report(gate: Gate, bench: Bench, state: State, facts: dict[str, str]) -> dict[str, Any]:
    """Write both reports into the result's directory; return what the JSON holds."""
    plain = as_plain(gate, bench, state, facts)
    (bench.out / JSON_FILE).write_text(json.dumps(plain, indent=1) + "\n")
    (bench.out / HTML_FILE).write_text(page(gate, bench, state, plain))
    return plain


def as_plain(gate: Gate, bench: Bench, state: State, facts: dict[str, str]) -> dict[str, Any]:
    """Return the whole result as plain values."""
    steps: list[dict[str, Any]] = []
    for step, verdict in zip(gate.steps, verdicts(gate, state), strict=True):
        done = state.steps.get(step.name)
        steps.append(
            {
                "name": step.name,
                "proves": step.proves,
                "writes": step.writes,
                "verdict": verdict,
                "took_s": done.took_s if done else 0.0,
                "commands": [asdict(each) for each in done.commands] if done else [],
                "outcome": done.outcome.plain() if done else None,
            }
        )
    return {
        "gate": gate.name,
        "title": gate.title,
        "verdict": gate_verdict(verdicts(gate, state)),
        "scale": bench.scale,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(state.started_unix_s)),
        "took_s": round(sum(each["took_s"] for each in steps), 3),
        "facts": facts,
        "configuration": _text(bench.config_path),
        "criteria": bench.criteria.model_dump(mode="json", by_alias=True)[gate.name],
        "steps": steps,
    }


def page(gate: Gate, bench: Bench, state: State, plain: dict[str, Any]) -> str:
    """Return the HTML page, which needs nothing beside it."""
    verdict = Verdict(plain["verdict"])
    scaled = "" if bench.scale >= 1 else f", scaled to {bench.scale:g} of the whole"
    parts = [
        f"<h1>Acceptance gate {_e(gate.title)}</h1>",
        f'<p class="soft">{_e(plain["facts"]["host"])}, begun {_e(plain["started"])}, '
        f"{duration(plain['took_s'])}{_e(scaled)}</p>",
        f'<p class="verdict {_class(verdict)}">{_e(sentence(gate, state))}</p>',
        *_overview(gate, state),
        "<h2>Steps</h2>",
        *(_step(step, state.steps.get(step.name)) for step in gate.steps),
        "<h2>Machine and versions</h2>",
        _table(Table("", ("what", "found"), tuple(plain["facts"].items()))),
        "<h2>Configuration</h2>",
        f"<pre>{_e(plain['configuration'])}</pre>",
        "<h2>Criteria</h2>",
        f"<pre>{_e(json.dumps(plain['criteria'], indent=1))}</pre>",
        "<h2>Command lines</h2>",
        _commands(plain),
        '<div class="sign"><div>for the buyer: name, date</div>'
        "<div>for the vendor: name, date</div></div>",
    ]
    title = _e(f"{gate.title}: {verdict}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def sentence(gate: Gate, state: State) -> str:
    """Say the verdict, and which steps are why."""
    found = dict(zip((step.name for step in gate.steps), verdicts(gate, state), strict=True))
    verdict = gate_verdict(found.values())
    if verdict is Verdict.PASSED:
        return "passed"
    failed = [name for name, each in found.items() if each is Verdict.FAILED]
    open_steps = [name for name, each in found.items() if each is Verdict.NOT_RUN]
    parts = [f"failed: {', '.join(failed)}"] if failed else []
    parts += [f"{'' if failed else 'incomplete: '}not run: {', '.join(open_steps)}"] * bool(
        open_steps
    )
    return "; ".join(parts)


def duration(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _overview(gate: Gate, state: State) -> Iterable[str]:
    rows = []
    for step, verdict in zip(gate.steps, verdicts(gate, state), strict=True):
        done = state.steps.get(step.name)
        rows.append((step.name, step.proves, verdict, duration(done.took_s) if done else ""))
    head = "".join(f"<th>{each}</th>" for each in ("step", "what it shows", "verdict", "took"))
    yield f'<div class="wide"><table><tr>{head}</tr>'
    for name, proves, verdict, took in rows:
        yield (
            f'<tr><td>{_e(name)}</td><td>{_e(proves)}</td><td class="tag {_class(verdict)}">'
            f"{verdict}</td><td>{took}</td></tr>"
        )
    yield "</table></div>"


def _step(step: Step, done: Done | None) -> str:
    verdict = done.outcome.verdict if done else Verdict.NOT_RUN
    parts = [
        f"<section><header><h3>{_e(step.name)}</h3>"
        f'<span class="tag {_class(verdict)}">{verdict}</span></header>',
        f'<p class="soft">{_e(step.proves)}</p>',
    ]
    if step.writes:
        parts.append(f'<p class="soft">writes: {_e(step.writes)}</p>')
    if done:
        outcome = done.outcome
        parts += [f"<p>{_e(outcome.why)}</p>"] if outcome.why else []
        parts += [_checks(outcome.checks)] if outcome.checks else []
        parts += [
            f"<figure>{plots.draw(chart)}<figcaption>{_e(chart.title)}</figcaption></figure>"
            for chart in outcome.charts
            if plots.can_draw()
        ]
        parts += [_table(each) for each in outcome.tables]
    return "\n".join([*parts, "</section>"])


def _checks(checks: list[Check]) -> str:
    rows = "".join(
        f"<tr><td>{_e(each.what)}</td><td>{_e(each.found)}</td><td>{_e(each.wanted)}</td>"
        f'<td class="tag {_MARKS[each.passed]}">{_MARKS[each.passed]}</td></tr>'
        for each in checks
    )
    head = "<tr><th>looked at</th><th>found</th><th>wanted</th><th></th></tr>"
    return f'<div class="wide"><table class="checks">{head}{rows}</table></div>'


def _table(table: Table) -> str:
    caption = f"<caption>{_e(table.title)}</caption>" if table.title else ""
    first = table.rows[0] if table.rows else ("",) * len(table.columns)
    head = "".join(
        f"<th{_kind(value)}>{_e(name)}</th>"
        for name, value in zip(table.columns, first, strict=True)
    )
    rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table>{caption}<tr>{head}</tr>{rows}</table></div>'


def _cell(value: Any) -> str:
    return f"<td{_kind(value)}>{_e(f'{value:g}' if isinstance(value, float) else value)}</td>"


def _kind(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return ' class="number"' if number else ""


def _commands(plain: dict[str, Any]) -> str:
    rows = [
        (each["line"], each["code"], each["took_s"], each["raw"])
        for step in plain["steps"]
        for each in step["commands"]
    ]
    columns = ("command", "exit code", "seconds", "what it printed")
    return f'<div class="commands">{_table(Table("", columns, tuple(rows)))}</div>'


def _class(verdict: Verdict) -> str:
    return verdict.replace(" ", "-")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as problem:
        return f"cannot be read: {problem}"


def _e(value: object) -> str:
    return html.escape(str(value))
