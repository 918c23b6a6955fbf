"""What a step works with: the configuration, the criteria, and the commands it runs."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fx100_lmcache.accept.criteria import Criteria
from fx100_lmcache.accept.steps import CannotRunError, Outcome
from fx100_lmcache.child import Ended, TooMuchOutputError, run_child
from fx100_lmcache.config import Config

LOAD = (sys.executable, "-m", "fx100_lmcache.accept.load")
"""The process that G4 kills."""
FX100 = (sys.executable, "-c", "from fx100_lmcache.cli import main; main()")
MAX_RAW_BYTES = 64 << 20


class Paths(Protocol):
    """Pulls and returns one path at a time; a lab's, or a person's."""

    def names(self) -> Sequence[str]:
        """Return the paths that may be pulled."""

    def down(self, name: str) -> None:
        """Take a path away."""

    def up(self, name: str) -> None:
        """Give it back."""


@dataclass(frozen=True)
class Command:
    """A program that was run, and how it ended.

    Attributes
    ----------
    line : str
        As it can be typed again.
    raw : str
        The file with what it printed, below the result's directory.
    """

    line: str
    code: int
    took_s: float
    raw: str


@dataclass
class Bench:
    """Everything that steps share.

    Attributes
    ----------
    config_path : Path
        The volume's YAML.
    out : Path
        The result's directory; raw results go into ``raw`` in it.
    scale : float
        1 is the whole; less shortens times, sizes and lists.
    destroy : tuple of Path
        Files and namespaces whose data the user gave away.
    earlier : dict
        Outcomes of this gate's steps so far, by name.
    say : callable
        Shows what is being done, in a few words.
    sysfs : Path
        Where the kernel shows its devices.
    load : tuple of str
        The program of G4's load.
    now, pause : callable
        Time in seconds, and sleeping.
    """

    config_path: Path
    config: Config
    criteria: Criteria
    out: Path
    scale: float = 1.0
    destroy: tuple[Path, ...] = ()
    paths: Paths | None = None
    earlier: dict[str, Outcome] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    sysfs: Path = Path("/sys")
    load: tuple[str, ...] = field(default_factory=lambda: LOAD)
    say: Callable[[str], None] = lambda _text: None
    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    @property
    def raw(self) -> Path:
        """Where raw results go; made when first asked for."""
        directory = self.out / "raw"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def scaled_bytes(self, size_bytes: int, unit: int, least: int = 1) -> int:
        """Return a size for this scale, in whole units and at least so many of them."""
        return max(least, int(size_bytes * min(1.0, self.scale)) // unit) * unit

    def scaled_s(self, seconds: float, least_s: float = 0.5) -> float:
        """Return a time for this scale."""
        return max(min(seconds, least_s), seconds * min(1.0, self.scale))

    def run(
        self,
        argv: Sequence[str],
        name: str,
        timeout_s: float,
        *,
        shown: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run a program, and keep its command line and all that it printed.

        Parameters
        ----------
        name : str
            For the file with what it printed.
        shown : str
            The command line for people, where they would type another one.

        Raises
        ------
        CannotRunError
            If it is not installed, does not end in time or prints too much.
        """
        if shutil.which(argv[0]) is None:
            raise CannotRunError(f"{argv[0]} is not installed")
        started = time.monotonic()
        try:
            ended = asyncio.run(
                run_child(argv, timeout_s, environment=environment, limit_bytes=MAX_RAW_BYTES)
            )
        except TimeoutError:
            raise CannotRunError(f"{argv[0]} did not end within {timeout_s:.0f} s") from None
        except (OSError, TooMuchOutputError) as problem:
            raise CannotRunError(f"{argv[0]}: {problem}") from problem
        file = self.raw / f"{name}.out"
        file.write_bytes(ended.stdout + (b"\n" + ended.stderr if ended.stderr else b""))
        line = shown or shlex.join(argv)
        took_s = time.monotonic() - started
        self.commands.append(
            Command(line, ended.code, round(took_s, 3), str(file.relative_to(self.out)))
        )
        return ended

    def fx100(self, *arguments: str, timeout_s: float = 600.0) -> tuple[int, dict[str, Any]]:
        """Run one of our own commands with ``--json``; return its exit code and its answer.

        Raises
        ------
        CannotRunError
            If it gives no answer; with what it said.
        """
        words = [*arguments, "--json"]
        name = "-".join(word for word in arguments if word.isalpha())
        shown = shlex.join(["fx100", *words])
        ended = self.run([*FX100, *words], f"fx100-{name}", timeout_s, shown=shown)
        try:
            answer = json.loads(ended.stdout)
        except ValueError:
            said = ended.stderr.decode(errors="replace").strip()
            raise CannotRunError(f"`{shown}` gave no answer: {said}") from None
        return ended.code, answer


def judge_findings(
    outcome: Outcome, code: int, findings: Sequence[Mapping[str, Any]], noted: Collection[str]
) -> None:
    """Judge what one of our own commands found: nothing of it may be a problem.

    Parameters
    ----------
    noted : collection of str
        Severities that are reported, and not judged.
    """
    bad = [
        f"{each['subject']}: {each['what']}" for each in findings if each["severity"] == "problem"
    ]
    outcome.judge("problems", "; ".join(bad) or "none", "none", code == 0 and not bad)
    for each in findings:
        if each["severity"] in noted:
            outcome.note(f"{each['severity']}: {each['subject']}", each["what"])
