"""Runs a gate: step by step, each result kept at once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fx100_lmcache.accept.bench import Bench
from fx100_lmcache.accept.state import Done, State
from fx100_lmcache.accept.steps import (
    CannotRunError,
    Outcome,
    Step,
    Verdict,
    gate_verdict,
    not_run,
)
from fx100_lmcache.errors import FX100Error


@dataclass(frozen=True)
class Gate:
    """One of the four.

    Attributes
    ----------
    name : str
        ``g1`` to ``g4``.
    """

    name: str
    title: str
    steps: tuple[Step, ...]

    @property
    def about_s(self) -> float:
        """How long all of it takes, roughly."""
        return sum(step.about_s for step in self.steps)


def run_gate(
    gate: Gate, bench: Bench, state: State, ended: Callable[[Step, Outcome], None]
) -> Verdict:
    """Run every step that has no result yet; return the verdict on all of them.

    Parameters
    ----------
    ended : callable
        Told of each step with its outcome, those of an earlier run included.
    """
    began = False
    for step in gate.steps:
        if step.name not in state.steps or (step.always and began):
            began = True
            bench.say(step.name)
            bench.commands = []
            started = time.monotonic()
            outcome = run_step(step, bench)
            state.steps[step.name] = Done(
                outcome, round(time.monotonic() - started, 3), bench.commands
            )
            state.save(bench.out)
        bench.earlier[step.name] = state.steps[step.name].outcome
        ended(step, bench.earlier[step.name])
    return gate_verdict(verdicts(gate, state))


def verdicts(gate: Gate, state: State) -> Iterable[Verdict]:
    """Return the verdict of each step; of one that never ended, that it was not run."""
    for step in gate.steps:
        done = state.steps.get(step.name)
        yield done.outcome.verdict if done else Verdict.NOT_RUN


def run_step(step: Step, bench: Bench) -> Outcome:
    """Run one step; what it lacks and what fails becomes its outcome."""
    missing = missing_tools(step.tools)
    if missing:
        return not_run(f"{' and '.join(missing)}: not installed")
    earlier = bench.earlier.get(step.needs)
    if earlier is not None and earlier.verdict is not Verdict.PASSED:
        return not_run(f"the step '{step.needs}' did not pass")
    try:
        return step.run(bench)
    except CannotRunError as problem:
        return not_run(str(problem))
    except (FX100Error, OSError) as problem:
        outcome = Outcome()
        outcome.judge(step.name, str(problem), "no error", passed=False)
        return outcome


def missing_tools(tools: Sequence[str]) -> list[str]:
    """Return the programs that are not installed."""
    return [tool for tool in tools if shutil.which(tool) is None]
