"""What was looked at, and how it is: what, why it matters, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    subject : str
        Controller, subsystem, device, setting, or ``volume``.
    what : str
        What was found.
    why : str
        Why it matters; empty if all is well.
    do : str
        What to type or change; empty if nothing.
    member : str or None
        Path of the member of a volume that is concerned, if it is one.
    """

    severity: Severity
    subject: str
    what: str
    why: str = ""
    do: str = ""
    member: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.subject}: {self.what}"]
        lines += [f"  why: {self.why}"] if self.why else []
        lines += [f"  do: {self.do}"] if self.do else []
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """All but the severity, on one line; for a log."""
        why = f": {self.why}" if self.why else ""
        do = f" (do: {self.do})" if self.do else ""
        return f"{self.subject}: {self.what}{why}{do}"


def ok(subject: str, what: str) -> Finding:
    """Say what is well."""
    return Finding(Severity.OK, subject, what)


def note(subject: str, what: str, why: str, do: str = "") -> Finding:
    """Say what was not checked, or is merely good to know."""
    return Finding(Severity.NOTE, subject, what, why, do)


def warning(subject: str, what: str, why: str, do: str, member: str | None = None) -> Finding:
    """Say what works, but not as well or as surely as it could."""
    return Finding(Severity.WARNING, subject, what, why, do, member)


def problem(subject: str, what: str, why: str, do: str, member: str | None = None) -> Finding:
    """Say what would not work."""
    return Finding(Severity.PROBLEM, subject, what, why, do, member)


def worst(findings: Iterable[Finding]) -> Severity:
    """Return the gravest severity, `Severity.OK` for none."""
    order = list(Severity)
    return max((each.severity for each in findings), key=order.index, default=Severity.OK)
