"""G3, the main gate: returning sessions through the inference server, with and without the store.

The load comes from a known generator. Here its input is prepared, processes are started and killed,
and its results are read.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fx100_lmcache.accept.bench import Bench
from fx100_lmcache.accept.gate import Gate
from fx100_lmcache.accept.plots import plots_step
from fx100_lmcache.accept.services import Services
from fx100_lmcache.accept.steps import (
    CannotRunError,
    Chart,
    Outcome,
    Step,
    Table,
    Verdict,
    thinned,
)
from fx100_lmcache.errors import FX100Error

STORE, GAIN = "store sessions", "gain"
WITH, WITHOUT = "with the store", "without the store"
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by"),
    *("on", "not", "he", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an"),
    *("had", "they", "you", "were", "their", "one", "all", "we", "can", "her", "has", "there"),
)
_NEXT_TURN_WORDS = 50
_START_GUESS_S = 120.0


@dataclass(frozen=True)
class Run:
    """One generator run: how many come at once, and which arm."""

    round: int
    at_once: int
    arm: str

    @property
    def name(self) -> str:
        """Name of its step."""
        again = f", round {self.round + 1}" if self.round else ""
        return f"{self.at_once} at once, {self.arm}{again}"


@dataclass(frozen=True)
class Answers:
    """What the generator measured.

    Attributes
    ----------
    ttft_s : list of float
        Of each session, in the order of the prompts.
    texts : list of str
        The generated texts, in the same order.
    """

    ttft_s: list[float]
    texts: list[str]
    tokens_per_s: float
    prompt_tokens: int


def gate(bench: Bench) -> Gate:
    """Return the gate's steps for this configuration."""
    wanted = bench.criteria.g3
    store = Step(
        STORE,
        f"{_sessions(bench)} sessions go through the server once; then both are killed",
        _store,
        _START_GUESS_S * 2,
        writes="the sessions' KV through LMCache into the volume, as users' is; the oldest entries "
        "may be evicted for it",
        tools=_tools(wanted.generator),
    )
    runs = [
        Step(
            run.name,
            "cold after a restart of everything, each session once",
            lambda bench, run=run: _measure(bench, run),  # type: ignore[misc]
            _START_GUESS_S * 1.5,
            tools=_tools(wanted.generator),
            needs=STORE,
        )
        for run in _runs(bench)
    ]
    gain = Step(GAIN, "the store is worth it, and answers are the same", _gain)
    return Gate("g3", "G3 main gate", (store, *runs, gain, plots_step()))


def _tools(argv: Sequence[str]) -> tuple[str, ...]:
    return () if argv[0].startswith("{") else (argv[0],)


def _sessions(bench: Bench) -> int:
    most = max(_counts(bench))
    return max(most, math.ceil(bench.criteria.g3.sessions * min(1.0, bench.scale)))


def _counts(bench: Bench) -> list[int]:
    return [int(each) for each in thinned(bench.criteria.g3.concurrency, bench.scale)]


def _runs(bench: Bench) -> list[Run]:
    """Alternate: who comes first differs from one concurrency, and one round, to the next."""
    runs, turn = [], 0
    for number in range(bench.criteria.g3.rounds):
        for count in _counts(bench):
            arms = (WITHOUT, WITH) if turn % 2 else (WITH, WITHOUT)
            runs += [Run(number, count, arm) for arm in arms]
            turn += 1
    return runs


def write_prompts(path: Path, first: int, count: int, words: int, extra_words: int) -> None:
    """Write prompts as JSON lines, the same each time; the longer ones begin like the shorter.

    Parameters
    ----------
    first : int
        Number of the first session; different sessions share nothing.
    extra_words : int
        What the next turn adds.
    """
    with path.open("w") as file:
        for session in range(first, first + count):
            rng = random.Random(session)
            text = [f"{session:06d}", *rng.choices(_WORDS, k=words)]
            text += random.Random(-1 - session).choices(_WORDS, k=extra_words)
            file.write(json.dumps({"prompt": " ".join(text)}) + "\n")


def _store(bench: Bench) -> Outcome:
    prompts = bench.raw / "sessions.jsonl"
    write_prompts(prompts, 0, _sessions(bench), _words(bench), 0)
    with _started(bench, WITH, "store") as services:
        answers = _generate(bench, prompts, _sessions(bench), min(_counts(bench)), 1, "store")
        bench.say("waiting until the store has written")
        time.sleep(bench.criteria.g3.settle_s)
        services.check_alive()
    outcome = Outcome()
    outcome.judge("sessions answered", str(len(answers.ttft_s)), str(_sessions(bench)), True)
    outcome.note("prompt tokens", str(answers.prompt_tokens))
    return outcome


def _words(bench: Bench) -> int:
    return bench.criteria.g3.session_words


def _measure(bench: Bench, run: Run) -> Outcome:
    wanted, name = bench.criteria.g3, run.name.replace(" ", "-").replace(",", "")
    warm_up, prompts = bench.raw / f"{name}-warm-up.jsonl", bench.raw / "returning.jsonl"
    count = _sessions(bench)
    write_prompts(warm_up, 900_000 + _runs(bench).index(run), 1, 100, 0)
    write_prompts(prompts, 0, count, _words(bench), _NEXT_TURN_WORDS)
    with _started(bench, run.arm, name) as services:
        _generate(bench, warm_up, 1, 1, 1, f"{name}-warm-up")
        answers = _generate(bench, prompts, count, run.at_once, wanted.answer_tokens, name)
        services.check_alive()
    outcome = Outcome(raw={"ttft_s": answers.ttft_s, "texts": answers.texts})
    outcome.raw["tokens_per_s"] = answers.tokens_per_s
    for percent in (50, 95, 99):
        outcome.note(f"TTFT p{percent}", f"{percentile(answers.ttft_s, percent):.3f} s")
    outcome.note("tokens per second", f"{answers.tokens_per_s:.1f}")
    share = goodput(answers.ttft_s, wanted.goodput_s)
    outcome.note(f"first token within {wanted.goodput_s:g} s", f"{share:.0%}")
    outcome.note("prompt tokens", str(answers.prompt_tokens))
    return outcome


def _started(bench: Bench, arm: str, name: str) -> Services:
    wanted = bench.criteria.g3
    store = str(bench.config_path) if arm == WITH else wanted.baseline
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        **wanted.environment,
    }
    services = Services(bench, environment)
    words = {"store": store, "python": sys.executable}
    try:
        for what, argv, url in (
            ("server", wanted.server, wanted.server_url),
            ("inference", wanted.inference, wanted.inference_url),
        ):
            bench.say(f"{name}: starting {what}")
            services.start(f"{name}-{what}", filled(argv, words), url, wanted.start_s)
    except BaseException:
        services.kill_all()
        raise
    return services


def filled(argv: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """Put values into the places that a command line has for them."""
    return [_filled(word, words) for word in argv]


def _filled(word: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _generate(
    bench: Bench, prompts: Path, count: int, at_once: int, answer_tokens: int, name: str
) -> Answers:
    """Run the generator, and read what it measured.

    Raises
    ------
    FX100Error
        If it fails, or a session got no answer.
    """
    bench.say(f"{name}: {count} sessions, {at_once} at once")
    result = bench.raw / f"{name}.json"
    result.unlink(missing_ok=True)
    words = {
        "python": sys.executable,
        "prompts": str(prompts),
        "count": str(count),
        "concurrency": str(at_once),
        "answer": str(answer_tokens),
        "result": str(result),
    }
    wanted = bench.criteria.g3
    argv = filled(wanted.generator, words)
    environment = {**os.environ, **wanted.environment}
    ended = bench.run(argv, f"{name}-generator", wanted.generator_s, environment=environment)
    if ended.code or not result.exists():
        said = (ended.stdout + ended.stderr).decode(errors="replace").strip()[-600:]
        raise FX100Error(f"the generator ended with code {ended.code}: {said}")
    return read_result(json.loads(result.read_text()), count)


def read_result(plain: Mapping[str, Any], count: int) -> Answers:
    """Read the JSON that ``vllm bench serve --save-detailed`` writes.

    Raises
    ------
    FX100Error
        If a session got no answer, or the JSON is another.
    """
    try:
        errors = [each for each in plain.get("errors", []) if each]
        if errors or plain["completed"] != count:
            what = f": {str(errors[0])[:300]}" if errors else ""
            raise FX100Error(f"{plain['completed']} of {count} sessions were answered{what}")
        return Answers(
            [float(each) for each in plain["ttfts"]],
            [str(each) for each in plain["generated_texts"]],
            float(plain["output_throughput"]),
            int(plain["total_input_tokens"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise FX100Error(f"the generator's result cannot be read: {problem!r}") from problem


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def goodput(ttft_s: Sequence[float], limit_s: float) -> float:
    """Return the share of requests whose first token came in time."""
    return sum(each <= limit_s for each in ttft_s) / len(ttft_s)


def _gain(bench: Bench) -> Outcome:
    """Compare both arms at each concurrency, all rounds together."""
    outcome, rows = Outcome(), []
    lines: dict[str, list[tuple[float, float]]] = {WITH: [], WITHOUT: []}
    for count in _counts(bench):
        arms = {arm: _together(bench, count, arm) for arm in (WITH, WITHOUT)}
        for arm, found in arms.items():
            times = found["ttft_s"]
            late = [round(percentile(times, percent), 3) for percent in (50, 95, 99)]
            good = goodput(times, bench.criteria.g3.goodput_s)
            rows.append((count, arm, *late, round(found["tokens_per_s"], 2), f"{good:.0%}"))
            lines[arm].append((float(count), late[0]))
        _judge_gain(bench, outcome, count, arms)
    columns = ("at once", "arm", "TTFT p50 s", "p95 s", "p99 s", "tokens/s", "goodput")
    outcome.tables.append(Table("returning sessions, cold", columns, tuple(rows)))
    title = "time to first token of a returning session"
    outcome.charts.append(Chart(title, "sessions at once", "p50, seconds", lines, log_x=True))
    return outcome


def _together(bench: Bench, count: int, arm: str) -> dict[str, Any]:
    mine = [run for run in _runs(bench) if (run.at_once, run.arm) == (count, arm)]
    outcomes = [bench.earlier[run.name] for run in mine]
    if any(each.verdict is not Verdict.PASSED for each in outcomes):
        raise CannotRunError(f"not every run of {count} at once {arm} was measured")
    return {
        "ttft_s": [value for each in outcomes for value in each.raw["ttft_s"]],
        "texts": [value for each in outcomes for value in each.raw["texts"]],
        "tokens_per_s": statistics.median(each.raw["tokens_per_s"] for each in outcomes),
    }


def _judge_gain(
    bench: Bench, outcome: Outcome, count: int, arms: Mapping[str, dict[str, Any]]
) -> None:
    wanted, ours, theirs = bench.criteria.g3, arms[WITH], arms[WITHOUT]
    less = 1 - percentile(ours["ttft_s"], 50) / percentile(theirs["ttft_s"], 50)
    more = ours["tokens_per_s"] / theirs["tokens_per_s"] - 1
    outcome.judge(
        f"{count} at once: TTFT p50",
        f"{less:.0%} less",
        f"at least {wanted.ttft_gain:.0%} less",
        less >= wanted.ttft_gain,
    )
    outcome.judge(
        f"{count} at once: tokens per second",
        f"{more:+.0%}",
        f"at least {wanted.throughput_gain:+.0%}",
        more >= wanted.throughput_gain,
    )
    same = sum(a == b for a, b in zip(ours["texts"], theirs["texts"], strict=True))
    total = len(ours["texts"])
    share = same / total
    outcome.judge(
        f"{count} at once: identical answers",
        f"{same} of {total}",
        f"at least {wanted.identical_share:.0%}",
        share >= wanted.identical_share,
    )
