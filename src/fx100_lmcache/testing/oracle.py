"""An oracle: what a store may and must hold after a crash at any point of its write journal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

Value = bytes | None


@dataclass(slots=True)
class Change:
    """One change of one object.

    Attributes
    ----------
    value : bytes or None
        What the object becomes; None for removed.
    begin, end : int
        Journal positions between which its writes lie. Before ``begin`` it has had no effect;
        from ``end`` on, when it was acknowledged, it has taken effect. ``end`` is None for a
        change that was never acknowledged: it may have taken effect or not.
    """

    value: Value
    begin: int
    end: int | None = None


@dataclass
class Oracle:
    """Changes of all objects, in order."""

    changes: defaultdict[str, list[Change]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, name: str, value: Value, at: int) -> Change:
        """Record that a change has begun."""
        change = Change(value, at)
        self.changes[name].append(change)
        return change

    def after_crash(self, name: str, at: int) -> set[Value]:
        """Values possible after the process died at a journal position.

        All writes before it arrived, none after it. One element means: it must be so.
        """
        possible: set[Value] = {None}
        for change in self.changes[name]:
            if change.end is not None and change.end <= at:
                possible = {change.value}
            elif change.begin < at:
                possible = possible | {change.value}
        return possible

    def after_power_cut(self, name: str, at: int, flushed_at: int) -> set[Value]:
        """Values possible after a power cut: writes since the last flush may be lost."""
        possible = self.after_crash(name, flushed_at)
        for change in self.changes[name]:
            if change.begin < at and (change.end is None or change.end > flushed_at):
                possible = possible | {change.value}
        return possible
