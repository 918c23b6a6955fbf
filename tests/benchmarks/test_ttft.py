"""The order of events and the rows of `ttft`, with servers that only pretend."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("httpx", reason="needs the httpx package (extra cpu or gpu)")

from benchmarks import ttft
from benchmarks.ttft import (
    Bench,
    Group,
    measure,
    next_prompt,
    plan_groups,
    prepare,
    rows_of,
    servers,
)
from demo.commands import Ports
from demo.measure import Completion, ServerCounts
from demo.scenario import Options
from demo.session import NEXT_TURN_TOKENS

TOKENS = 600
CACHED = 512


class FakeWorld:
    """Servers that hold what was stored while all contenders were there."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.adapters: list[str] = []
        self.stored: list[tuple[int, ...]] = []
        self.cached = 0

    def start(self, *arguments: object, **_warm_up: int) -> None:
        adapters = arguments[3]
        assert isinstance(adapters, list)
        self.adapters, self.cached = list(adapters), 0
        self.events.append(f"start {'+'.join(adapters) or 'nothing'}")

    def kill(self, *_arguments: object) -> None:
        self.events.append("kill")

    def check_alive(self) -> None:
        pass

    def complete(self, _url: str, _model: str, prompt: list[int], tokens: int) -> Completion:
        head = tuple(prompt[:TOKENS])
        if len(prompt) == TOKENS:
            self.stored.append(head)
            return Completion(1.0, (1,), TOKENS, 0)
        found = bool(self.adapters) and head in self.stored
        self.cached += found * CACHED
        answer = (sum(prompt) % 251,) * tokens
        return Completion(0.25 if found else 2.0, answer, len(prompt), found * CACHED)

    def wait_until_stored(self, *arguments: object) -> int:
        self.events.append(f"stored {arguments[-1]}")
        return 0

    def wait_until_counted(self, _options: object, hit_tokens: int) -> ServerCounts:
        assert hit_tokens == self.cached
        return ServerCounts(0, 0, self.cached, None)


@contextlib.contextmanager
def silent(_text: str) -> Iterator[None]:
    yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    made = FakeWorld()
    monkeypatch.setattr(ttft, "start_servers", made.start)
    monkeypatch.setattr(ttft, "kill_servers", made.kill)
    monkeypatch.setattr(ttft, "complete", made.complete)
    monkeypatch.setattr(ttft, "wait_until_stored", made.wait_until_stored)
    monkeypatch.setattr(ttft, "wait_until_counted", made.wait_until_counted)
    monkeypatch.setattr(ttft, "shown_step", silent)
    monkeypatch.setattr(ttft, "make_tiny_model", lambda *_arguments: None)
    monkeypatch.setattr(ttft, "drop_caches", lambda: True)
    return made


@pytest.fixture
def bench(world: FakeWorld, tmp_path: Path) -> Bench:
    options = Options(tmp_path, tmp_path, TOKENS, Ports(1, 2, 3), "cpu", adapter_json=None)
    groups = list(plan_groups([1, 2], 1))
    prompts = [[number] * TOKENS for number in range(4)]
    specs = {"ours": "A", "fs": "B"}
    return Bench(options, world, prompts, groups, specs)  # type: ignore[arg-type]


def test_no_session_is_loaded_twice() -> None:
    groups = list(plan_groups([1, 4, 2], 2))
    used = [session for group in groups for session in group.sessions]
    assert used == list(range(1, 15)), "session 0 is for warming up"
    assert [group.concurrency for group in groups] == [1, 1, 4, 4, 2, 2]


def test_all_is_stored_once_killed_and_restored_alone(world: FakeWorld, bench: Bench) -> None:
    rows = measure(bench, rounds=1)
    stored = (4 * 2 + 2) * 2
    assert world.events == [
        *("start A+B", f"stored {stored}", "kill"),
        *("start nothing", "kill", "start A", "kill", "start B", "kill"),
    ]
    assert [(row["contender"], row["concurrency"]) for row in rows] == [
        (name, count) for name in ("computed", "ours", "fs") for count in (1, 2)
    ]
    assert [row["from store"] for row in rows] == [0, 0, CACHED, 2 * CACHED, CACHED, 2 * CACHED]
    assert [row["TTFT p50 s"] for row in rows] == [2.0, 2.0, 0.25, 0.25, 0.25, 0.25]
    assert rows[2]["p50 to computed"] == 0.125
    assert {row["identical"] for row in rows} == {"1 of 1", "2 of 2"}
    assert bench.facts["tokens from ours"] == [{"lmcache": 4 * CACHED, "vllm": 4 * CACHED}]


def test_every_second_round_is_backwards(world: FakeWorld, bench: Bench) -> None:
    rows = measure(bench, rounds=3)
    started = [event.removeprefix("start ") for event in world.events if "start" in event]
    assert started == ["A+B", "nothing", "A", "B", "B", "A", "A", "B"]
    assert [row["from store"] for row in rows[2:4]] == [3 * CACHED, 3 * 2 * CACHED]
    assert {row["identical"] for row in rows[2:]} == {"3 of 3", "6 of 6"}
    assert len(bench.facts["tokens from fs"]) == 3


def test_only_computing_stores_nothing(world: FakeWorld, bench: Bench) -> None:
    measure(dataclasses.replace(bench, specs={}), rounds=2)
    assert world.events == ["start nothing", "kill"]


def test_a_different_answer_is_counted() -> None:
    right = Completion(1.0, (1, 2), 800, 0)
    wrong = dataclasses.replace(right, output_tokens=(1, 3))
    groups = [Group(2, range(1, 3))]
    (row,) = rows_of("ours", groups, [{1: right, 2: wrong}], {1: right, 2: right})
    assert row["identical"] == "1 of 2"


def test_the_next_turn_is_longer_and_the_same_for_all() -> None:
    prompts = [[5] * TOKENS, [6] * TOKENS]
    assert next_prompt(prompts, 1)[:TOKENS] == prompts[1]
    assert len(next_prompt(prompts, 1)) == TOKENS + NEXT_TURN_TOKENS
    assert next_prompt(prompts, 1) == next_prompt(prompts, 1)
    assert next_prompt(prompts, 0)[TOKENS:] != next_prompt(prompts, 1)[TOKENS:]


def test_the_servers_have_room_for_all_sessions(tmp_path: Path) -> None:
    few = servers(tmp_path, tmp_path, 4_096, "cpu", [Group(2, range(1, 3))])
    assert (few.l1_gib, few.max_sequences) == (1, 2)
    many = servers(tmp_path, tmp_path, 16_384, "cpu", [Group(8, range(1, 17))])
    assert (many.l1_gib, many.max_sequences) == (2, 8)


def test_each_contender_gets_a_place_of_its_own(tmp_path: Path) -> None:
    specs = prepare(tmp_path, ["fs", "fs_native-4"], 8)
    assert str(tmp_path / "fs" / "files") in specs["fs"]
    assert (tmp_path / "fs_native-4" / "files").is_dir()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--concurrency", "9"), "at most 8"),
        (("--concurrency", "x"), "'x'"),
        (("--concurrency", "8", "--runs", "9"), "73 sessions"),
        (("--contenders", "nobody"), "nobody"),
        (("--tokens", "9"), "--tokens"),
    ],
)
def test_bad_values_are_refused_before_anything_starts(
    world: FakeWorld, arguments: tuple[str, ...], named: str
) -> None:
    said = CliRunner().invoke(ttft.app, arguments, env={"COLUMNS": "200"})
    assert said.exit_code == 2
    assert named in said.output
    assert world.events == []
