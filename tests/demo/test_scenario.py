import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo import store

pytest.importorskip("httpx", reason="needs the httpx package (extra cpu or gpu)")

from demo import scenario
from demo.commands import Ports
from demo.measure import Completion, ServerCounts
from demo.scenario import Options, check_shared_memory, run

SESSION_TOKENS = 4_000
STORED_CHUNKS = SESSION_TOKENS // 256


class FakeService:
    def wait_ready(self, url: str) -> None:
        assert url.startswith("http://127.0.0.1:")


class FakeWorld:
    """Servers that remember nothing but what was started with the store."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.prompts: list[list[int]] = []
        self.with_store = False
        self.counts = ServerCounts(0, 0, 0, 0)
        self.answer = 5

    def start(self, name: str, command: list[str], *_rest: object) -> FakeService:
        if name == "lmcache server":
            self.with_store = "--l2-adapter" in command or command[3].endswith("fx100.yaml")
            self.counts = ServerCounts(0, 0, 0, 0)
            self.events.append("start with store" if self.with_store else "start without store")
        return FakeService()

    def check_alive(self) -> None:
        pass

    def kill_all(self) -> None:
        self.events.append("kill")

    def complete(self, _url: str, _model: str, prompt: list[int], answer_tokens: int) -> Completion:
        cached = 0
        if len(prompt) > SESSION_TOKENS and self.with_store:
            cached = STORED_CHUNKS * 256
            self.counts = dataclasses.replace(
                self.counts, hit_tokens=cached, read_bytes=cached * 4096
            )
        elif self.with_store:
            self.counts = dataclasses.replace(self.counts, stored_chunks=len(prompt) // 256)
        self.events.append(f"{len(prompt)} tokens, {cached} cached")
        self.prompts.append(prompt)
        ttft_s = 0.5 if cached else 5.0
        return Completion(ttft_s, (self.answer,) * answer_tokens, len(prompt), cached)


@contextmanager
def silent_step(_text: str) -> Iterator[None]:
    yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    made = FakeWorld()
    monkeypatch.setattr(scenario, "complete", made.complete)
    monkeypatch.setattr(scenario, "server_counts", lambda _url: made.counts)
    monkeypatch.setattr(scenario, "make_tiny_model", lambda *_arguments: None)
    monkeypatch.setattr(scenario, "POLL_INTERVAL_S", 0.001)
    return made


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(tmp_path, tmp_path, SESSION_TOKENS, Ports(1, 2, 3), "cpu", '{"type": "fs"}')


def test_the_order_of_events(world: FakeWorld, options: Options) -> None:
    result = run(options, world, silent_step)  # type: ignore[arg-type]
    warm_up = "600 tokens, 0 cached"
    turns = [f"{len(prompt)} tokens, 0 cached" for prompt in world.prompts[1:5]]
    after = SESSION_TOKENS + 16 + 200
    assert world.events == [
        *("start with store", warm_up, *turns, "kill"),
        *("start without store", warm_up, f"{after} tokens, 0 cached", "kill"),
        *("start with store", warm_up, f"{after} tokens, {STORED_CHUNKS * 256} cached", "kill"),
    ]
    assert turns[-1].startswith(f"{SESSION_TOKENS} tokens")
    assert world.prompts[-1] == world.prompts[-3]
    assert result.failures() == []
    assert (result.computed_ttft_s, result.store_ttft_s) == (5.0, 0.5)
    assert result.served_tokens == STORED_CHUNKS * 256
    assert result.stored_chunks == STORED_CHUNKS


def test_a_different_answer_is_noticed(world: FakeWorld, options: Options) -> None:
    complete = world.complete

    def wrong_from_the_store(*arguments: object) -> Completion:
        done = complete(*arguments)  # type: ignore[arg-type]
        tokens = (6, *done.output_tokens[1:]) if done.cached_tokens else done.output_tokens
        return dataclasses.replace(done, output_tokens=tokens)

    scenario.complete = wrong_from_the_store  # type: ignore[attr-defined, assignment]
    result = run(options, world, silent_step)  # type: ignore[arg-type]
    assert not result.identical


def test_a_store_that_loses_chunks_stops_the_demo(
    world: FakeWorld, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "STORE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(scenario, "server_counts", lambda _url: ServerCounts(3, 0, 0, 0))
    with pytest.raises(RuntimeError, match=f"holds 3 of {STORED_CHUNKS} chunks"):
        run(options, world, silent_step)  # type: ignore[arg-type]


def test_our_store_is_formatted_before_anything_starts(
    world: FakeWorld, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        store, "format_volume", lambda path: world.events.append(f"format {path.name}")
    )
    result = run(dataclasses.replace(options, adapter_json=None), world, silent_step)  # type: ignore[arg-type]
    assert world.events[:2] == ["format fx100.yaml", "start with store"]
    assert result.store_name == "fx100"


def test_a_small_shared_memory_is_refused_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = dataclasses.make_dataclass("usage", ["free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(64 << 20))
    check_shared_memory("gpu")
    with pytest.raises(RuntimeError, match=r"64 MiB free.*--shm-size"):
        check_shared_memory("cpu")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(4 << 30))
    check_shared_memory("cpu")
