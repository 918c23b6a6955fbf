"""What is done of a gate, on disk: an interrupted gate goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fx100_lmcache.accept.bench import Command
from fx100_lmcache.accept.steps import CannotRunError, Outcome, Verdict, outcome_of

STATE_FILE = "state.json"
_VERSION = 1


@dataclass
class Done:
    """One step that has ended."""

    outcome: Outcome
    took_s: float
    commands: list[Command]


@dataclass
class State:
    """Steps that have ended, by name.

    Attributes
    ----------
    fingerprint : str
        Of configuration, criteria and options: with others a gate cannot go on.
    started_unix_s : float
        When the gate began.
    """

    gate: str
    fingerprint: str
    started_unix_s: float = field(default_factory=time.time)
    steps: dict[str, Done] = field(default_factory=dict)

    def save(self, out: Path) -> None:
        """Write it so that a crash leaves the old or the new one."""
        steps = {
            name: {
                "outcome": done.outcome.plain(),
                "took_s": done.took_s,
                "commands": [asdict(each) for each in done.commands],
            }
            for name, done in self.steps.items()
        }
        plain = {
            "version": _VERSION,
            "gate": self.gate,
            "fingerprint": self.fingerprint,
            "started_unix_s": self.started_unix_s,
            "steps": steps,
        }
        new = out / f"{STATE_FILE}.new"
        with new.open("w") as file:
            json.dump(plain, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(out / STATE_FILE)


def fingerprint(*parts: str) -> str:
    """Return a short name for what a gate was asked to do."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def open_state(out: Path, gate: str, mark: str, *, fresh: bool) -> State:
    """Return what was done before, or an empty state.

    Steps that were not run are to be tried again.

    Raises
    ------
    CannotRunError
        If the directory holds another gate's result, or one of another configuration.
    """
    file = out / STATE_FILE
    if fresh or not file.exists():
        return State(gate, mark)
    remedy = "name another directory with --out, or give --fresh to begin again"
    try:
        plain: dict[str, Any] = json.loads(file.read_text())
        if plain["version"] != _VERSION or plain["gate"] != gate or plain["fingerprint"] != mark:
            raise CannotRunError(
                f"{file} is of another gate, configuration, criteria or options", remedy=remedy
            )
        steps = {
            name: Done(
                outcome_of(done["outcome"]),
                done["took_s"],
                [Command(**each) for each in done["commands"]],
            )
            for name, done in plain["steps"].items()
        }
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CannotRunError(f"{file} cannot be read: {problem}", remedy=remedy) from problem
    kept = {name: d for name, d in steps.items() if d.outcome.verdict is not Verdict.NOT_RUN}
    return State(gate, mark, plain["started_unix_s"], kept)
