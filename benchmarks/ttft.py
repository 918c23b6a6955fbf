"""Measure time to first token after a restart, with vLLM: computed, and from each contender.

One `lmcache server` stores the sessions to all contenders at once. It and vLLM are killed with
SIGKILL. Then each contender alone stands behind a new server and a new vLLM, and the same prompts
come again, each longer by one turn. That is done in rounds, every second one in the opposite order:
who comes first after the sessions were stored is slower. Greedy answers are compared with the
computed ones.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks import options
from benchmarks.backends import BACKENDS, Sizing
from benchmarks.common import drop_caches, publish, scratch
from benchmarks.replay import available
from benchmarks.sessions import percentile
from demo.__main__ import shown_step, stop_like_ctrl_c
from demo.commands import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    Device,
    Ports,
    detect_device,
)
from demo.measure import Completion, complete
from demo.model import KV_BYTES_PER_TOKEN, make_tiny_model
from demo.scenario import (
    MODEL,
    Options,
    check_shared_memory,
    kill_servers,
    start_servers,
    wait_until_counted,
    wait_until_stored,
)
from demo.services import Services, free_ports
from demo.session import (
    ANSWER_TOKENS,
    MAX_SESSION_TOKENS,
    NEXT_TURN_TOKENS,
    user_text,
    warm_up_prompt,
)

COMPUTED = "computed"
CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
MAX_SESSIONS = 64
MAX_CONCURRENCY = 8

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Group:
    """Sessions that come back at once."""

    concurrency: int
    sessions: range


@dataclass
class Bench:
    """What is measured, and what with.

    Attributes
    ----------
    prompts : list of list of int
        Token ids of each session before the kill. The first session warms the loading path up.
    specs : dict
        ``--l2-adapter`` of each contender.
    facts : dict
        What goes into the result beside the rows.
    """

    options: Options
    services: Services
    prompts: list[list[int]]
    groups: list[Group]
    specs: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)


@app.command(help=__doc__)
def main(
    contenders: Annotated[
        str, typer.Option(help="Names as in `replay`; `computed` is always measured.")
    ] = "ours,fs_native-4,fs",
    tokens: Annotated[
        int, typer.Option(min=512, max=MAX_SESSION_TOKENS, help="Context of a session.")
    ] = 4_096,
    concurrency: Annotated[str, typer.Option(help="Sessions at once, 1 to 8.")] = "1,2,4,8",
    runs: Annotated[int, typer.Option(min=1, help="Groups of sessions of each size.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Restarts with each contender.")] = 2,
    directory: options.Directory = options.DISK,
    json_path: options.JsonPath = None,
) -> None:
    """Run the command."""
    names = [name for name in contenders.split(",") if name != COMPUTED]
    names = list(available(names)) if names else []
    groups = chosen_groups(concurrency, runs)
    device = detect_device()
    try:
        check_shared_memory(device)
        with (
            scratch(directory) as home,
            tempfile.TemporaryDirectory(prefix="fx100-") as sockets,
            Services() as services,
        ):
            stop_like_ctrl_c()
            setup = servers(home, Path(sockets), tokens, device, groups)
            prompts = [user_text(tokens, seed=10_000 + n) for n in range(groups[-1].sessions.stop)]
            specs = prepare(home, names, len(prompts) * (tokens // CHUNK_TOKENS + 2))
            bench = Bench(setup, services, prompts, groups, specs)
            rows = measure(bench, rounds)
    except (RuntimeError, httpx.HTTPError) as problem:
        typer.echo(f"failed: {problem}", err=True)
        raise typer.Exit(1) from problem
    method: dict[str, Any] = {"tokens": tokens, "runs": runs, "rounds": rounds, "device": device}
    method |= {"directory": str(directory), "new_tokens": NEXT_TURN_TOKENS, "backends": specs}
    method |= bench.facts
    title = (
        f"TTFT after a restart, sessions of {tokens} + {NEXT_TURN_TOKENS} tokens, vLLM, {device}"
    )
    publish(title, rows, method, json_path)


def chosen_groups(concurrency: str, runs: int) -> list[Group]:
    """Return the groups that the user asked for.

    Raises
    ------
    typer.BadParameter
        If they are too large, or too many sessions.
    """
    counts = options.numbers(concurrency)
    if max(counts) > MAX_CONCURRENCY:
        raise typer.BadParameter(f"at most {MAX_CONCURRENCY} sessions at once, not {max(counts)}")
    groups = list(plan_groups(counts, runs))
    if (sessions := groups[-1].sessions.stop) > MAX_SESSIONS:
        raise typer.BadParameter(f"{sessions} sessions are needed, {MAX_SESSIONS} at most")
    return groups


def servers(
    home: Path, sockets: Path, tokens: int, device: Device, groups: Sequence[Group]
) -> Options:
    """Size the servers: memory for all sessions, and room for those that come at once."""
    total_bytes = groups[-1].sessions.stop * tokens * KV_BYTES_PER_TOKEN
    return Options(
        home,
        sockets,
        tokens,
        Ports(*free_ports(3)),
        device,
        adapter_json=None,
        # a quarter more, so that nothing is evicted while it is stored
        l1_gib=1 + total_bytes * 5 // 4 // (1 << 30),
        max_sequences=max(group.concurrency for group in groups),
    )


def plan_groups(counts: Sequence[int], runs: int) -> Iterator[Group]:
    """Give each run of each concurrency sessions of its own: what was loaded once is in memory.

    Session 0 is left for warming up.
    """
    first = 1
    for count in counts:
        for _ in range(runs):
            yield Group(count, range(first, first + count))
            first += count


def prepare(home: Path, names: Sequence[str], chunks: int) -> dict[str, str]:
    """Make the place of each contender; return its ``--l2-adapter``."""
    sizing = Sizing(CHUNK_BYTES, max(64, chunks * 3 // 2) * CHUNK_BYTES)
    specs = {}
    for name in names:
        place = home / name
        place.mkdir()
        BACKENDS[name].prepare(place, sizing)
        specs[name] = json.dumps(BACKENDS[name].spec(place, sizing))
    return specs


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """Store, kill, and restore from each contender; return a row for each cell."""
    make_tiny_model(bench.options.directory / MODEL, CONTEXT_TOKENS)
    if bench.specs:
        _store(bench)
    warm_ups = itertools.count(2)
    answers = {COMPUTED: [_restore(bench, COMPUTED, next(warm_ups))]}
    answers |= {name: [] for name in bench.specs}
    for number in range(rounds):
        for name in list(bench.specs)[:: -1 if number % 2 else 1]:
            answers[name].append(_restore(bench, name, next(warm_ups)))
    return [
        row
        for name, found in answers.items()
        for row in rows_of(name, bench.groups, found, answers[COMPUTED][0])
    ]


def _store(bench: Bench) -> None:
    options, services = bench.options, bench.services
    start_servers(options, services, shown_step, list(bench.specs.values()), "to store", warm_up=1)
    with shown_step(f"storing {len(bench.prompts)} sessions to {', '.join(bench.specs)}"):
        for prompt in bench.prompts:
            complete(options.ports.vllm_url, MODEL, prompt, 1)
    chunks = len(bench.prompts) * (options.session_tokens // CHUNK_TOKENS)
    chunks += len(warm_up_prompt(1)) // CHUNK_TOKENS
    wait_until_stored(options, services, shown_step, chunks * len(bench.specs))
    time.sleep(max(BACKENDS[name].settle_s for name in bench.specs))
    kill_servers(services, shown_step)
    bench.facts["caches_dropped"] = drop_caches()


def _restore(bench: Bench, name: str, warm_up: int) -> dict[int, Completion]:
    """Start anew with one contender, or none; return the answer to each session's next turn."""
    options, services = bench.options, bench.services
    specs = [bench.specs[name]] if name != COMPUTED else []
    start_servers(options, services, shown_step, specs, f"with {name}", warm_up)
    url = options.ports.vllm_url

    def ask(session: int) -> Completion:
        return complete(url, MODEL, next_prompt(bench.prompts, session), ANSWER_TOKENS)

    found: dict[int, Completion] = {}
    with shown_step(f"{name}: the next turn of {len(bench.prompts)} sessions"):
        warmed = ask(0)
        for group in bench.groups:
            found.update(zip(group.sessions, _at_once(ask, group.sessions), strict=True))
    cached = warmed.cached_tokens + sum(one.cached_tokens for one in found.values())
    counted = wait_until_counted(options, cached).hit_tokens if specs else 0
    told = {"lmcache": counted, "vllm": cached}
    bench.facts.setdefault(f"tokens from {name}", []).append(told)
    services.check_alive()
    kill_servers(services, shown_step)
    drop_caches()
    return found


def next_prompt(prompts: Sequence[list[int]], session: int) -> list[int]:
    """Return the prompt of a session after the restart."""
    return prompts[session] + user_text(NEXT_TURN_TOKENS, seed=20_000 + session)


def _at_once(ask: Callable[[int], Completion], sessions: range) -> list[Completion]:
    with ThreadPoolExecutor(len(sessions)) as pool:
        return list(pool.map(ask, sessions))


def rows_of(
    name: str,
    groups: Sequence[Group],
    answers: list[dict[int, Completion]],
    computed: dict[int, Completion],
) -> list[dict[str, Any]]:
    """Make a contender's rows, one for each concurrency, all its runs and rounds together.

    Tokens are those that vLLM did not compute; after a kill they can come from the store alone.
    """
    rows = []
    for count in dict.fromkeys(group.concurrency for group in groups):
        sessions = [n for group in groups if group.concurrency == count for n in group.sessions]
        found = [(one[n], computed[n]) for one in answers for n in sessions]
        times = [answer.ttft_s for answer, _ in found]
        p50 = percentile(times, 50)
        same = [answer.output_tokens == base.output_tokens for answer, base in found]
        rows.append(
            {
                "contender": name,
                "concurrency": count,
                "TTFT p50 s": p50,
                "TTFT p95 s": percentile(times, 95),
                "p50 to computed": p50 / percentile([base.ttft_s for _, base in found], 50),
                "prompt tokens": sum(answer.prompt_tokens for answer, _ in found),
                "from store": sum(answer.cached_tokens for answer, _ in found),
                "identical": f"{sum(same)} of {len(same)}",
            }
        )
    return rows


if __name__ == "__main__":
    app()
