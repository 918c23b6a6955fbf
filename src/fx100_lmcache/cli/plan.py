"""``fx100 plan``: what a volume would bring for a model, worked out before anything is bought."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from fx100_lmcache.cli.console import JsonFlag, explained, human, print_json
from fx100_lmcache.sizing import MODELS, Plan, Workload, make_plan

DEFAULT_MODEL = "qwen3-coder-480b-tp8"
NEEDS_HARDWARE = "needs hardware"

Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help=f"Again for several. Known: {', '.join(MODELS)}."),
]
Tokens = Annotated[
    int, typer.Option(min=1, max=10_000_000, help="Context of a returning session, in tokens.")
]
NewTokens = Annotated[
    int, typer.Option(min=0, max=10_000_000, help="Prompt of its next turn, computed either way.")
]
Concurrency = Annotated[
    int, typer.Option(min=1, max=100_000, help="Sessions that return at the same moment.")
]
ArrayGB = Annotated[
    float,
    typer.Option(min=0.001, max=100_000, help="What the array delivers to this node, GB/s."),
]
WirePorts = Annotated[
    int, typer.Option("--ports", min=1, max=1_000, help="The wire: 100 GbE ports of this node.")
]
Prefill = Annotated[
    float,
    typer.Option(min=0.001, max=1e9, help="Prefill of your accelerators, tokens/s: measure it."),
]

BASIS: dict[str, str] = {
    "KV GB": "arithmetic",
    "chunk bytes": "arithmetic: volume.object of the configuration",
    "chunks": "arithmetic: whole chunks of 256 tokens, of all ranks",
    "load s": f"{NEEDS_HARDWARE}: the bandwidth is your number",
    "TTFT computed s": f"{NEEDS_HARDWARE}: prefill is your number",
    "TTFT restored s": f"{NEEDS_HARDWARE}: bandwidth and prefill are your numbers",
    "break-even tokens": f"{NEEDS_HARDWARE}: shortest context that loads faster than it computes",
    "at least GB/s": f"{NEEDS_HARDWARE}: below this, computing is faster",
    "sessions/TB": "arithmetic: with rounding, inodes and the reserve of 3 %",
    "L1 GB": "arithmetic: all of these sessions in LMCache's memory at once",
    "wire GB/s": "arithmetic: 92 % of each port, the best published share",
    "limit": "arithmetic: the slower of array and wire",
}
"""What each figure rests on; the order of the table."""


def workloads(
    models: Sequence[str],
    tokens: int,
    new_tokens: int,
    concurrency: int,
    array_gb_per_s: float,
    ports: int,
    prefill_tokens_per_s: float,
) -> list[Workload]:
    """Return what is planned for, one for each model.

    Raises
    ------
    typer.BadParameter
        If a model is not in the table, or a number is no number.
    """
    if unknown := [name for name in models if name not in MODELS]:
        raise typer.BadParameter(
            f"unknown model {', '.join(unknown)}; known: {', '.join(MODELS)}",
            param_hint="'--model'",
        )
    for option, value in (("array-gb-per-s", array_gb_per_s), ("prefill", prefill_tokens_per_s)):
        if not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a number", param_hint=f"'--{option}'")
    numbers = tokens, new_tokens, concurrency, array_gb_per_s * 1e9, ports, prefill_tokens_per_s
    return [Workload(MODELS[name], *numbers) for name in models]


def headline(work: Workload) -> str:
    """Say what a table of plans assumes."""
    return (
        f"{work.tokens:,} tokens, {work.concurrency} at once, "
        f"{work.array_bytes_per_s / 1e9:g} GB/s, prefill {work.prefill_tokens_per_s:g} tokens/s "
        "(arithmetic, nothing measured)"
    )


def figures(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan by the names that `BASIS` explains."""
    return {
        "KV GB": plan.kv_bytes / 1e9,
        "chunk bytes": plan.chunk_bytes,
        "chunks": plan.chunks,
        "load s": plan.load_s,
        "TTFT computed s": plan.ttft_computed_s,
        "TTFT restored s": plan.ttft_restored_s,
        "break-even tokens": plan.break_even_tokens or "never",
        "at least GB/s": plan.break_even_bytes_per_s / 1e9,
        "sessions/TB": plan.sessions_per_tb,
        "L1 GB": plan.l1_bytes / 1e9,
        "wire GB/s": plan.wire_bytes_per_s / 1e9,
        "limit": plan.limited_by,
    }


def plan_record(work: Workload, plan: Plan) -> dict[str, Any]:
    """Return workload and plan as JSON knows them: null where there is no finite number."""
    merged = {**asdict(work), **asdict(plan)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in merged.items()
    }


@explained
def plan_command(
    model: Models = None,
    tokens: Tokens = 29_800,
    new_tokens: NewTokens = 200,
    concurrency: Concurrency = 8,
    array_gb_per_s: ArrayGB = 5.23,
    ports: WirePorts = 1,
    prefill: Prefill = 8_000.0,
    as_json: JsonFlag = False,
) -> None:
    """Work out what a volume brings for a model: bytes, times, sessions per TB, memory.

    Arithmetic only: nothing is opened or measured. Sessions come back together, are loaded one
    after the other and computed one after the other; times are those of the median session.

    JSON: plans (one for each model: model, the numbers given, and kv_bytes, restored_tokens,
    chunk_bytes, chunks, wire_bytes_per_s, bandwidth_bytes_per_s, limited_by, load_s,
    ttft_computed_s, ttft_restored_s, break_even_tokens, break_even_bytes_per_s, stored_bytes,
    sessions_per_tb, l1_bytes), basis.
    """
    works = workloads(
        model or [DEFAULT_MODEL], tokens, new_tokens, concurrency, array_gb_per_s, ports, prefill
    )
    plans = [make_plan(work) for work in works]
    if as_json:
        records = [plan_record(work, plan) for work, plan in zip(works, plans, strict=True)]
        print_json({"plans": records, "basis": BASIS})
        return
    console = human()
    console.print(headline(works[0]))
    console.print(_table(works, plans))


def _table(works: Sequence[Workload], plans: Sequence[Plan]) -> Table:
    table = Table("")
    for work in works:
        table.add_column(work.model.name, justify="right", overflow="fold")
    table.add_column("what it rests on", overflow="fold")
    shown = [figures(plan) for plan in plans]
    for name, basis in BASIS.items():
        table.add_row(name, *(_text(one[name]) for one in shown), basis)
    return table


def _text(value: Any) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            return "never"
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
