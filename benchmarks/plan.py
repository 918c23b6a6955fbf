"""Work out what a volume brings for a model, as `fx100 plan` does, for all models in one table.

Arithmetic only; `--published` holds the published FX100 evaluation against arithmetic.
"""

from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks import options
from benchmarks.common import publish
from benchmarks.published import compare
from fx100_lmcache.cli import plan as shared
from fx100_lmcache.sizing import MODELS, make_plan

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    model: shared.Models = None,
    tokens: shared.Tokens = 29_800,
    new_tokens: shared.NewTokens = 200,
    concurrency: shared.Concurrency = 8,
    array_gb_per_s: shared.ArrayGB = 5.23,
    ports: shared.WirePorts = 1,
    prefill: shared.Prefill = 8_000.0,
    published: Annotated[bool, typer.Option(help="Check the published figures as well.")] = False,
    json_path: options.JsonPath = None,
) -> None:
    """Run the command."""
    works = shared.workloads(
        model or list(MODELS), tokens, new_tokens, concurrency, array_gb_per_s, ports, prefill
    )
    plans = [make_plan(work) for work in works]
    both = list(zip(works, plans, strict=True))
    publish(
        shared.headline(works[0]),
        [{"model": work.model.name, **shared.figures(plan)} for work, plan in both],
        {"plans": [shared.plan_record(work, plan) for work, plan in both]},
        json_path,
    )
    if published:
        path = json_path and json_path.with_stem(f"{json_path.stem}-published")
        rows = [asdict(one) for one in compare()]
        publish("the published FX100 evaluation against arithmetic", rows, {}, path)


if __name__ == "__main__":
    app()
