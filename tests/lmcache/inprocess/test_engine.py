"""Whole requests through LMCache's own engine, in every mode."""

from pathlib import Path
from typing import Any

import pytest

from support.inprocess import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    counts,
    flip_bit,
    mount_on,
    pins,
    pool_bytes,
    settle,
    stand_in_for_mount,
    wild_members,
    write_config,
)
from support.inprocess_engine import served

MODES = {
    "sync": {},
    "sync_with_ram": {"local_cpu": True},
    "async": {"enable_async_loading": True},
    "layerwise": {"use_layerwise": True},
}
SESSION = [7 * n % 1000 for n in range(117 * CHUNK_TOKENS)]


@pytest.mark.parametrize("mode", MODES)
def test_a_session_comes_back_after_a_restart(tmp_path: Path, mode: Any) -> None:
    path = write_config(tmp_path, size="16MiB")
    with served(path, **MODES[mode]) as worker:
        for turn in range(30, 118, 29):
            worker.store(SESSION[: turn * CHUNK_TOKENS])
            settle(worker.plugin)
        assert counts(worker.plugin)["written_bytes"] == 117 * CHUNK_BYTES
    with served(path, **MODES[mode]) as worker:
        request, promised = worker.lookup(SESSION + [5] * CHUNK_TOKENS)
        assert promised == len(SESSION)
        assert worker.retrieve(request, SESSION, promised) == len(SESSION)
        assert worker.right(SESSION)
        assert pins(worker.plugin) == 0
        if mode != "sync_with_ram":
            assert pool_bytes(worker.manager.local_cpu_backend) == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_after_a_read_failure_in_chunk_57_only_the_rest_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    path = write_config(tmp_path)
    members = wild_members(2, 16 << 20)
    stand_in_for_mount(monkeypatch, mount_on(members))
    with served(path, **MODES[mode]) as worker:
        worker.store(SESSION[: 60 * CHUNK_TOKENS])
        settle(worker.plugin)
        worker.store(SESSION)
        settle(worker.plugin)
        flip_bit(worker.plugin, members, worker.chunk_keys(SESSION)[56])
        request, promised = worker.lookup(SESSION)
        # asynchronous loading knows before it promises, synchronous loading only after
        assert promised == {"sync": 117, "async": 56}[mode] * CHUNK_TOKENS
        got = worker.retrieve(request, SESSION, promised)
        assert got == 56 * CHUNK_TOKENS
        assert worker.right(SESSION[:got])
        worker.store(SESSION)  # what vLLM computed
        settle(worker.plugin)
        request, promised = worker.lookup(SESSION)
        assert promised == len(SESSION)
        assert worker.retrieve(request, SESSION, promised) == len(SESSION)
        assert worker.right(SESSION)
        assert counts(worker.plugin)["checksum_failures"] == 1
        assert pool_bytes(worker.manager.local_cpu_backend) == 0


def test_clear_reaches_the_store(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with served(path) as worker:
        prompt = SESSION[: 20 * CHUNK_TOKENS]
        worker.store(prompt)
        settle(worker.plugin)
        assert worker.engine.clear(prompt[: 5 * CHUNK_TOKENS]) == 5
        assert worker.engine.clear() == 15 * CHUNK_TOKENS
        assert worker.lookup(prompt)[1] == 0
    with served(path) as worker:
        assert worker.lookup(prompt)[1] == 0
