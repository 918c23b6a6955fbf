"""Run everything that benchmarks/README.md shows, and rewrite its tables.

Each table stands between two markers that name its command; running again replaces it.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import cell

README = Path(__file__).with_name("README.md")
RESULTS = Path(__file__).with_name("results")

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Part:
    """One table of the README.

    Attributes
    ----------
    full, quick : str
        Arguments of ``python -m benchmarks.``: for good numbers, and for a look.
    suffixes : tuple of str
        What the command appends to the name of the JSON file, when it writes several.
    """

    name: str
    full: str
    quick: str
    suffixes: tuple[str, ...] = ("",)


PARTS = (
    Part("plan", "plan --published", "plan --published", ("", "-published")),
    Part("engine", "engine", "engine --objects 24 --rounds 1 --runs 3", ("-idle", "-busy")),
    Part(
        "engine-1mib",
        "engine --object-bytes 1048576 --objects 900",
        "engine --object-bytes 1048576 --objects 64 --rounds 1 --runs 3",
        ("-idle", "-busy"),
    ),
    Part("disk", "disk", "disk --objects 24 --runs 3"),
    Part("replay", "replay --scale 0.06", "replay --scale 0.03 --concurrency 1,4 --runs 2"),
    Part(
        "replay-memory",
        "replay --directory /dev/shm --scale 0.06 --concurrency 1,8",
        "replay --directory /dev/shm --scale 0.03 --concurrency 1,4 --mode idle,busy --runs 2",
    ),
    Part(
        "ttft",
        "ttft --tokens 16384 --concurrency 1,4,8 --runs 2",
        "ttft --tokens 2048 --concurrency 1,2 --contenders ours --rounds 1",
    ),
    Part("members", "members", "members --concurrency 1,4 --runs 2"),
    Part("mooncake", "mooncake {trace}", "mooncake {trace} --requests 100 --backend ours"),
    Part("churn", "churn", "churn --times 2 --runs 2 --backend ours --backend fs_native-4"),
    Part("scale-entries", "scale entries", "scale entries --counts 1000,10000"),
    Part("scale-chunks", "scale chunks", "scale chunks --total-mib 128 --runs 3"),
    Part("scale-members", "scale members", "scale members --count 16 --runs 3"),
    Part("scale-processes", "scale processes", "scale processes --count 32 --runs 3"),
    Part("failures", "failures", "failures --failure 'flipped bit'"),
)


@app.command(help=__doc__)
def main(
    full: Annotated[bool, typer.Option("--full/--quick", help="Good numbers, or a look.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Parts to run; all if left out.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Mooncake JSONL file.")] = None,
    readme: Annotated[Path, typer.Option(help="File whose tables are rewritten.")] = README,
    results: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Run the command."""
    known = [part.name for part in PARTS]
    if unknown := set(only or ()) - set(known):
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    failed = []
    for part in PARTS:
        if (only and part.name not in only) or (part.name == "mooncake" and trace is None):
            continue
        command = part.full if full else part.quick
        typer.echo(f"--- {part.name}: python -m benchmarks.{command}")
        found = run(part, command.format(trace=shlex.quote(str(trace))), results)
        if not found:
            failed.append(part.name)
            continue
        text = "\n\n".join(markdown(one) for one in found)
        shown = command.format(trace="TRACE.jsonl")
        block = f"`python -m benchmarks.{shown}`\n\n{text}"
        readme.write_text(replace_block(readme.read_text(), part.name, block))
    if failed:
        typer.echo(f"failed, and left as they were: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def run(part: Part, command: str, results: Path) -> list[dict[str, Any]]:
    """Run one part in a process of its own; return its results, none if it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{part.name}.json"
        called = [sys.executable, "-m", *shlex.split(f"benchmarks.{command}"), "--json", str(path)]
        if subprocess.run(called, cwd=README.parents[1], check=False).returncode:
            return []
        results.mkdir(parents=True, exist_ok=True)
        found = []
        for suffix in part.suffixes:
            one = path.with_stem(path.stem + suffix)
            (results / one.name).write_bytes(one.read_bytes())
            found.append(json.loads(one.read_text()))
        return found


def markdown(result: dict[str, Any]) -> str:
    """Write a result as a Markdown table, with the facts of the machine under it."""
    rows = result["rows"]
    columns = list(dict.fromkeys(k for row in rows for k in row if not k.startswith("_")))
    lines = [f"**{result['title']}**", "", _line(columns), _line(["---"] * len(columns))]
    lines += [_line([cell(row.get(column, "")) for column in columns]) for row in rows]
    facts = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    text = "\n".join([*lines, "", f"<sub>{facts}</sub>"])
    return text.replace(f"{README.parents[1]}/", "")  # where the project lies is nobody's concern


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(one.replace("|", "\\|") for one in cells) + " |"


def replace_block(text: str, name: str, block: str) -> str:
    """Put a block between the markers of that name.

    Raises
    ------
    ValueError
        If the markers are not there, once each and in order.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"no markers `{begin}` and `{end}` in the text")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    app()
