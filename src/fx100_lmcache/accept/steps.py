"""What a gate is made of, and what comes out of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fx100_lmcache.errors import FX100Error

if TYPE_CHECKING:
    from fx100_lmcache.accept.bench import Bench


class Verdict(StrEnum):
    """How a step ended, or a whole gate.

    `NOT_RUN` of a step makes its gate `INCOMPLETE`; `DOES_NOT_APPLY` does not count.
    """

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"
    DOES_NOT_APPLY = "does not apply"
    INCOMPLETE = "incomplete"


class CannotRunError(FX100Error):
    """A step lacks what it needs: a tool, a volume that is free, a right."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes
    ----------
    passed : bool or None
        None: reported, not judged.
    wanted : str
        The criterion in words; empty if there is none.
    """

    what: str
    found: str
    wanted: str = ""
    passed: bool | None = None


@dataclass(frozen=True)
class Table:
    """Rows for the report; every row has a value for every column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Chart:
    """Lines for the report.

    Attributes
    ----------
    lines : dict
        Points ``(x, y)`` by the line's name.
    """

    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False


@dataclass
class Outcome:
    """What a step found.

    Attributes
    ----------
    why : str
        Why it was not run, or does not apply.
    raw : dict
        What it measured, for the JSON and for later steps.
    """

    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    why: str = ""
    raw: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict = Verdict.PASSED

    def judge(self, what: str, found: str, wanted: str, passed: bool) -> None:
        """Add a check that counts."""
        self.checks.append(Check(what, found, wanted, passed))
        if not passed:
            self.verdict = Verdict.FAILED

    def note(self, what: str, found: str) -> None:
        """Add what is only reported."""
        self.checks.append(Check(what, found))

    def plain(self) -> dict[str, Any]:
        """Return it as plain values; `outcome_of` is the inverse."""
        return asdict(self)


def outcome_of(plain: dict[str, Any]) -> Outcome:
    """Return the outcome that plain values from JSON stand for."""
    tables = [
        Table(each["title"], tuple(each["columns"]), tuple(tuple(row) for row in each["rows"]))
        for each in plain["tables"]
    ]
    return Outcome(
        [Check(**each) for each in plain["checks"]],
        tables,
        [Chart(**each) for each in plain["charts"]],
        plain["why"],
        plain["raw"],
        Verdict(plain["verdict"]),
    )


def not_run(why: str) -> Outcome:
    """Say what a step lacked."""
    return Outcome(why=why, verdict=Verdict.NOT_RUN)


def does_not_apply(why: str) -> Outcome:
    """Say why there is nothing to look at."""
    return Outcome(why=why, verdict=Verdict.DOES_NOT_APPLY)


@dataclass(frozen=True)
class Step:
    """One step of a gate.

    Attributes
    ----------
    about_s : float
        How long it takes, roughly, in seconds.
    writes : str
        What it writes and where; empty for nothing.
    tools : tuple of str
        Programs without which it is not run.
    needs : str
        Name of an earlier step without which there is nothing to look at.
    always : bool
        It clears up, and is run again when an interrupted gate goes on.
    """

    name: str
    proves: str
    run: Callable[[Bench], Outcome]
    about_s: float = 1.0
    writes: str = ""
    tools: tuple[str, ...] = ()
    needs: str = ""
    always: bool = False


def gate_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of a gate: a failure first, then what is missing."""
    found = set(verdicts)
    if Verdict.FAILED in found:
        return Verdict.FAILED
    if Verdict.NOT_RUN in found or not found & {Verdict.PASSED}:
        return Verdict.INCOMPLETE
    return Verdict.PASSED


EXIT_CODES = {Verdict.PASSED: 0, Verdict.FAILED: 1, Verdict.INCOMPLETE: 2}


def thinned(values: Sequence[Any], scale: float) -> list[Any]:
    """Return fewer values for a scaled run: the ends, and the middle from 5 % on."""
    if scale >= 1 or len(values) <= 2:
        return list(values)
    middle = [values[len(values) // 2]] if scale >= 0.05 and len(values) > 2 else []
    return [values[0], *middle, values[-1]]
