"""Work out what a volume brings for a model: bytes, load time, TTFT, sessions per TB, memory.

Arithmetic only; `--published` puts the published FX100 figures through the same model.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import publish
from fx100_lmcache.planning import MODELS, Plan, Workload, check_published, make_plan

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Model; all of the table if left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Context of a returning session.")] = 29_800,
    new_tokens: Annotated[int, typer.Option(help="Prompt of its next turn.")] = 200,
    concurrency: Annotated[int, typer.Option(help="Sessions that return at once.")] = 8,
    array_gb_per_s: Annotated[float, typer.Option(help="What the array delivers.")] = 5.23,
    ports: Annotated[int, typer.Option(help="100 GbE ports of the node.")] = 1,
    prefill: Annotated[float, typer.Option(help="Prefill, tokens/s, measured by you.")] = 8_000.0,
    published: Annotated[bool, typer.Option(help="Check the published figures as well.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
) -> None:
    """Run the command."""
    names = model or list(MODELS)
    unknown = set(names) - set(MODELS)
    if unknown:
        raise typer.BadParameter(f"unknown model {', '.join(unknown)}; known: {', '.join(MODELS)}")
    works = [
        Workload(
            MODELS[name], tokens, new_tokens, concurrency, array_gb_per_s * 1e9, ports, prefill
        )
        for name in names
    ]
    plans = [make_plan(work) for work in works]
    publish(
        f"{tokens} tokens, {concurrency} at once, {array_gb_per_s:g} GB/s, "
        f"prefill {prefill:g} tokens/s (arithmetic, nothing measured)",
        [plan_row(work, plan) for work, plan in zip(works, plans, strict=True)],
        {"plans": [{**asdict(w), **asdict(p)} for w, p in zip(works, plans, strict=True)]},
        json_path,
    )
    if published:
        path = json_path and json_path.with_stem(f"{json_path.stem}-published")
        rows = [asdict(one) for one in check_published()]
        publish("published FX100 figures against this model", rows, {}, path)


def plan_row(work: Workload, plan: Plan) -> dict[str, Any]:
    """Make the row of one model."""
    return {
        "model": work.model.name,
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
        "limit": plan.limited_by,
    }


if __name__ == "__main__":
    app()
