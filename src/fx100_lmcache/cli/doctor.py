"""``fx100 doctor``: whether a configuration would really work."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fx100_lmcache.admin.inspect import Report, inspect
from fx100_lmcache.cli.console import (
    EXIT_FAILED,
    ConfigPath,
    JsonFlag,
    explained,
    human,
    print_json,
)
from fx100_lmcache.cli.nvme_views import show_finding
from fx100_lmcache.cli.waiting import Wait, wait_as_asked
from fx100_lmcache.config import Config, load, subsystems_named
from fx100_lmcache.doctor.documents import Document, DocumentError, read_document
from fx100_lmcache.doctor.engine import check_engine
from fx100_lmcache.doctor.loading import check_loading, targets, try_imports
from fx100_lmcache.doctor.mp import check_adapter
from fx100_lmcache.doctor.nvme import check_reconnect
from fx100_lmcache.doctor.ours import check_identity, check_shards, check_space
from fx100_lmcache.doctor.proof import prove_io
from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.doctor.sizes import check_sizes
from fx100_lmcache.doctor.volume import check_claims, check_volume, shards_needed
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.findings import Finding, Severity, note, problem, worst
from fx100_lmcache.nvmf.check import check
from fx100_lmcache.nvmf.connect import with_numbers
from fx100_lmcache.nvmf.scope import part_of_volume
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.ondisk.claim_block import words_of
from fx100_lmcache.volume.claim import same_kernel
from fx100_lmcache.volume.machine import this_machine
from fx100_lmcache.volume.opening import reconnect_obstacles

GIB = 1 << 30


class Mode(StrEnum):
    """How LMCache runs."""

    MP = MP
    IN_PROCESS = IN_PROCESS
    BOTH = "both"


@explained
def doctor_command(
    config: ConfigPath,
    mode: Annotated[
        Mode, typer.Option(help="mp: `lmcache server`; in-process: LMCache inside vLLM.")
    ] = Mode.BOTH,
    lmcache_config: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            envvar="LMCACHE_CONFIG_FILE",
            help="LMCache's YAML, vLLM's YAML or --kv-transfer-config, or the --l2-adapter JSON.",
        ),
    ] = None,
    model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest context: vLLM's --max-model-len.")
    ] = None,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="KV bytes of one token on one rank.")
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks whose KV is stored: tensor-parallel size; MLA: 1.")
    ] = 1,
    l1_size_gb: Annotated[
        float | None, typer.Option(min=0, help="As given to `lmcache server`.")
    ] = None,
    running: Annotated[
        bool, typer.Option("--running", help="The server, or vLLM, is meant to be running now.")
    ] = False,
    as_json: JsonFlag = False,
    wait_s: Wait = 0,
) -> None:
    """Say whether a configuration would really work: what, why it matters, what to type.

    Run it with the Python, the user and the environment of LMCache. While nobody uses the volume,
    it proves direct I/O by writing to a place on each member that holds nothing.

    Exit code 1 if something would not work; warnings and notes do not count.

    [bold]JSON fields[/] (only ever added to): ok; config; mode; findings: severity ("ok", "note",
    "warning", "problem"), subject, what, why, do, member (its path, or null).
    """
    wait_as_asked(config, wait_s)
    question = Question(
        frozenset({MP, IN_PROCESS} if mode is Mode.BOTH else {mode.value}),
        model_len,
        kv_bytes_per_token,
        ranks,
        None if l1_size_gb is None else int(l1_size_gb * GIB),
        running,
    )
    findings = [_with_path(each, config) for each in examine(config, question, lmcache_config)]
    works = worst(findings) is not Severity.PROBLEM
    if as_json:
        plain = [dataclasses.asdict(each) for each in findings]
        print_json({"ok": works, "config": str(config), "mode": mode.value, "findings": plain})
    else:
        _show(findings, works)
    if not works:
        raise typer.Exit(EXIT_FAILED)


def examine(path: Path, question: Question, lmcache_config: Path | None) -> Iterator[Finding]:
    """Look at everything, and yield what was found.

    Parameters
    ----------
    path : Path
        Our own YAML.
    lmcache_config : Path or None
        A file of LMCache or vLLM.
    """
    # here, so that no other command loads a part of the adapters
    from fx100_lmcache.doctor.inprocess import check_inprocess
    from fx100_lmcache.doctor.versions import check_versions, installed_lmcache

    yield from check_versions(question)
    document: Document | None = None
    if lmcache_config is not None:
        try:
            document = read_document(lmcache_config, os.environ)
        except DocumentError as error:
            do = "correct --lmcache-config (or LMCACHE_CONFIG_FILE)"
            yield problem("--lmcache-config", str(error), "LMCache cannot read it either", do)
    wanted = targets(question, document)
    yield from check_loading(wanted, try_imports(wanted))
    if IN_PROCESS in question.modes:
        yield from check_inprocess(document, path, lmcache=installed_lmcache())
    report = inspect(path)
    yield from check_volume(report)
    try:
        config = load(path)
    except FX100Error:
        return  # told already
    capacity_bytes = report.usage.capacity_bytes if report.usage else None
    if MP in question.modes:
        yield from check_adapter(document, config, path)
    yield from _look_at_volume(config, report, question)
    yield check_engine(config)
    yield check_identity(config)
    yield from check_space(config, capacity_bytes, question)
    slots = report.usage.inode_slots if report.usage else None
    engine = document.engine if document else None
    yield from check_sizes(config, question, engine, capacity_bytes, slots)
    yield from _look_at_nvme(config, report)


def _look_at_volume(config: Config, report: Report, question: Question) -> Iterator[Finding]:
    if report.shards:
        yield from check_shards(config, len(report.shards), question)
        needed = shards_needed(config, question, len(report.shards))
        yield from check_claims([report.shards[s] for s in needed], question, _program)
    if report.usage is not None:
        yield from prove_io(config, exclusive=MP in question.modes)


def _program(holder: str) -> str:
    """Return the command line of a shard's holder, if it runs on this host and may be seen."""
    pid = words_of(holder).get("pid", "")
    if not pid.isdecimal() or not same_kernel(holder, this_machine()):
        return ""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:120]


def _look_at_nvme(config: Config, report: Report) -> Iterator[Finding]:
    if config.nvme is not None:
        yield check_reconnect(config.nvme, reconnect_obstacles(config.nvme))
    wanted = config.nvme.subsystems if config.nvme else ()
    devices = {os.path.realpath(member.path) for member in report.members if member.path}
    try:
        everything = asyncio.run(Sysfs().snapshot())
        snapshot = part_of_volume(everything, devices, subsystems_named(config))
    except (FX100Error, OSError) as error:
        yield note("nvme", f"not checked: {error}", "a stalled load may not be bounded")
        return
    numbered = asyncio.run(with_numbers(wanted, snapshot))
    yield from check(snapshot, numbered, os.cpu_count() or 1)


def _with_path(finding: Finding, config: Path) -> Finding:
    """Put the configuration's path where advice has a place for it."""
    quoted = shlex.quote(str(config))
    return dataclasses.replace(finding, do=re.sub(r"\bCONFIG\b", lambda _: quoted, finding.do))


def _show(findings: Sequence[Finding], works: bool) -> None:
    console = human()
    for each in findings:
        show_finding(each)
    if not works:
        console.print("[bold red]this would not work[/]")
    elif any(each.severity is Severity.NOTE for each in findings):
        console.print("[green]this would work[/], as far as it was checked")
    else:
        console.print("[green]this would work[/]")
