"""``fx100 accept``: the four gates of an acceptance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fx100_lmcache.accept import arrival, node, serving, stability
from fx100_lmcache.accept.bench import Bench
from fx100_lmcache.accept.criteria import load_criteria
from fx100_lmcache.accept.facts import facts
from fx100_lmcache.accept.gate import Gate, missing_tools, run_gate
from fx100_lmcache.accept.paths import hooked_paths
from fx100_lmcache.accept.report import HTML_FILE, duration, sentence, write_report
from fx100_lmcache.accept.scratch import check_scratch
from fx100_lmcache.accept.state import fingerprint, open_state
from fx100_lmcache.accept.steps import EXIT_CODES, Outcome, Step, Verdict
from fx100_lmcache.cli.console import ConfigPath, agreed, explained, human, print_error
from fx100_lmcache.config import load
from fx100_lmcache.errors import FX100Error

EXIT_COULD_NOT_RUN = EXIT_CODES[Verdict.INCOMPLETE]
_COLOURS = {Verdict.PASSED: "green", Verdict.FAILED: "bold red", Verdict.DOES_NOT_APPLY: "dim"}

app = typer.Typer(
    name="accept",
    help="Acceptance of an array in four gates, each with a report. Exit codes: 0 passed, "
    "1 failed, 2 incomplete or not run, 130 interrupted (the same command goes on).",
    no_args_is_help=True,
)

CriteriaPath = Annotated[
    Path | None,
    typer.Option("--criteria", metavar="PATH", help="YAML, as configs/acceptance.yaml."),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where results go: acceptance/gN.")
]
Scale = Annotated[
    float,
    typer.Option(min=0.0001, max=1, help="Shortens times, sizes and lists to this share."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Show the plan, and stop.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin again, also if something is done.")]
Destroy = Annotated[
    list[Path] | None,
    typer.Option(
        "--destroy",
        metavar="PATH",
        help="A file or namespace whose data the tests that write destroy. May be repeated.",
    ),
]
PathHook = Annotated[
    Path | None,
    typer.Option(
        "--path-hook",
        metavar="PROGRAM",
        help="Pulls paths: `PROGRAM list`, `PROGRAM down NAME`, `PROGRAM up NAME`.",
    ),
]


def _go(
    make: Callable[[Bench], Gate],
    config: Path,
    criteria: Path | None,
    out: Path | None,
    scale: float,
    yes: bool,
    plan: bool,
    fresh: bool,
    destroy: list[Path] | None = None,
    path_hook: Path | None = None,
) -> None:
    try:
        settings = load(config)
        bench = Bench(
            config.absolute(),
            settings,
            load_criteria(criteria),
            (out or Path("acceptance")).absolute(),
            scale,
            check_scratch(settings, destroy or ()),
        )
        bench.paths = hooked_paths(bench, path_hook)
        gate = make(bench)
        bench.out = (out or Path("acceptance") / gate.name).absolute()
        code = _run(gate, bench, yes=yes, plan=plan, fresh=fresh)
    except FX100Error as problem:
        print_error(problem)
        code = EXIT_COULD_NOT_RUN
    if code:
        raise typer.Exit(code)


def _run(gate: Gate, bench: Bench, *, yes: bool, plan: bool, fresh: bool) -> int:
    console = human()
    mark = fingerprint(
        bench.config_path.read_text(),
        bench.criteria.model_dump_json(),
        f"{bench.scale} {bench.destroy}",
    )
    state = open_state(bench.out, gate.name, mark, fresh=fresh)
    _show_plan(console, gate, bench, len(state.steps))
    if plan:
        return 0
    if not yes and not agreed("Start?"):
        console.print("Nothing was done. To start, answer y or give --yes.")
        return EXIT_COULD_NOT_RUN
    bench.out.mkdir(parents=True, exist_ok=True)
    with console.status("") as shown:
        bench.say = lambda text: shown.update(f"{text} ...")
        verdict = run_gate(gate, bench, state, lambda step, one: _show_step(console, step, one))
    write_report(gate, bench, state, facts())
    console.print(f"[{_COLOURS.get(verdict, 'yellow')}]{escape(sentence(gate, state))}[/]")
    console.print(f"report: {bench.out / HTML_FILE}", markup=False)
    return EXIT_CODES[verdict]


def _show_plan(console: Console, gate: Gate, bench: Bench, done: int) -> None:
    """Say what will be done, how long it takes, and what it writes."""
    console.print(f"[bold]{escape(gate.title)}[/], {len(gate.steps)} steps", end="")
    console.print(f", about {duration(gate.about_s)}", end="")
    console.print("" if bench.scale >= 1 else f", scaled to {bench.scale:g}")
    for step in gate.steps:
        console.print(
            f"  {step.name}: {step.proves} ({duration(step.about_s)})", markup=False, style=None
        )
        if step.writes:
            console.print(f"    [yellow]writes:[/] {escape(step.writes)}")
        if missing := missing_tools(step.tools):
            tools = " and ".join(missing)
            console.print(f"    [yellow]will not be run:[/] {tools}: not installed")
    console.print(
        "Nothing is formatted, and no volume, file or namespace in use is overwritten.\n"
        f"Results: {bench.out}",
        markup=False,
    )
    if done:
        console.print(f"{done} steps have been done before; this goes on from there")


def _show_step(console: Console, step: Step, outcome: Outcome) -> None:
    colour = _COLOURS.get(outcome.verdict, "yellow")
    console.print(f"[{colour}]{outcome.verdict}[/]  {escape(step.name)}")
    if outcome.why:
        console.print(f"    {outcome.why}", markup=False)
    for check in outcome.checks:
        if check.passed is False:
            console.print(f"    {check.what}: {check.found}; wanted: {check.wanted}", markup=False)


@app.command("g1")
@explained
def g1_command(
    config: ConfigPath,
    criteria: CriteriaPath = None,
    out: Out = None,
    scale: Scale = 1.0,
    yes: Yes = False,
    plan: PlanOnly = False,
    fresh: Fresh = False,
    destroy: Destroy = None,
    path_hook: PathHook = None,
) -> None:
    """Arrival: identity, paths, health, fio on every member, every path pulled once.

    Members are only read, and the volume may be in use; then the numbers are of what is left.
    """
    _go(arrival.gate, config, criteria, out, scale, yes, plan, fresh, destroy, path_hook)


@app.command("g2")
@explained
def g2_command(
    config: ConfigPath,
    criteria: CriteriaPath = None,
    out: Out = None,
    scale: Scale = 1.0,
    yes: Yes = False,
    plan: PlanOnly = False,
    fresh: Fresh = False,
) -> None:
    """Single node: our engine against fio, sessions at once, restart, doctor.

    The volume must be formatted and not in use. Objects go into its free space, and are removed.
    """
    _go(node.gate, config, criteria, out, scale, yes, plan, fresh)


@app.command("g3")
@explained
def g3_command(
    config: ConfigPath,
    criteria: CriteriaPath = None,
    out: Out = None,
    scale: Scale = 1.0,
    yes: Yes = False,
    plan: PlanOnly = False,
    fresh: Fresh = False,
) -> None:
    """Compare returning sessions through the inference server, with the store and without.

    Server, inference server and generator are command lines in the criteria. Ours only prepares
    prompts, restarts processes, and reads what the generator measured.
    """
    _go(serving.gate, config, criteria, out, scale, yes, plan, fresh)


@app.command("g4")
@explained
def g4_command(
    config: ConfigPath,
    criteria: CriteriaPath = None,
    out: Out = None,
    scale: Scale = 1.0,
    yes: Yes = False,
    plan: PlanOnly = False,
    fresh: Fresh = False,
    path_hook: PathHook = None,
) -> None:
    """Stability: 72 hours of loads and puts with faults, every byte checked.

    The volume must be formatted and not in use. Objects go into its free space, and are removed.
    """
    _go(stability.gate, config, criteria, out, scale, yes, plan, fresh, None, path_hook)
