"""Several ranks through LMCache's own engine: one copy for MLA, a part of the model each for PP."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fx100_lmcache.lmcache.inprocess import registry as inprocess_registry
from support.inprocess import (
    CHUNK_TOKENS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    counts,
    flip_bit,
    metadata,
    mount_on,
    pins,
    pool_bytes,
    settle,
    stand_in_for_mount,
    wild_members,
    write_config,
)
from support.inprocess_engine import Broadcast, Vllm, served

SESSION = [7 * n % 1000 for n in range(40 * CHUNK_TOKENS)]
OTHER = [3 * n % 1000 for n in range(40 * CHUNK_TOKENS)]


# ----- MLA


def mla(rank: Any) -> Any:
    shape = (LAYERS, 1, CHUNK_TOKENS, 1, HEADS * HEAD_SIZE)
    return metadata(
        world_size=2, worker_id=rank, local_worker_id=rank, use_mla=True, kv_shape=shape
    )


def mla_ranks(stack: Any, path: Any) -> Any:
    """Start both ranks of a model with MLA."""
    network = Broadcast()
    ways = (network.send, network.receive)
    return [
        stack.enter_context(served(path, meta=mla(rank), exchange=way))
        for rank, way in enumerate(ways)
    ]


def retrieve_on_both(first: Any, other: Any, tokens: Any) -> Any:
    """Load on both ranks what the first rank promises, as vLLM does; return the tokens."""
    request, promised = first.lookup(tokens)
    got = first.retrieve(request, tokens, promised)
    other.gpu.kv.fill_(-1)
    assert int(other.engine.retrieve(tokens[:promised], req_id=request).sum()) == got
    return promised, got


def test_mla_stores_on_the_first_rank_and_loads_on_both_after_a_restart(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=2)
    with ExitStack() as stack:
        first, other = mla_ranks(stack, path)
        assert other.manager is None  # so nothing of ours runs there
        for rank in (first, other):
            rank.store(SESSION)
        settle(first.plugin)
        assert first.plugin._setup.shard == 0
        assert len(first.plugin._store) == 40
    with ExitStack() as stack:
        first, other = mla_ranks(stack, path)
        assert retrieve_on_both(first, other, SESSION) == (len(SESSION), len(SESSION))
        assert first.right(SESSION)
        assert other.right(SESSION)
        assert pins(first.plugin) == 0
        assert pool_bytes(first.manager.local_cpu_backend) == 0


def test_a_chunk_that_mla_cannot_read_is_missing_on_both_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = wild_members(2, 16 << 20)
    stand_in_for_mount(monkeypatch, mount_on(members))
    with ExitStack() as stack:
        first, other = mla_ranks(stack, write_config(tmp_path, shards=2))
        first.store(SESSION)
        settle(first.plugin)
        flip_bit(first.plugin, members, first.chunk_keys(SESSION)[16])
        promised, got = retrieve_on_both(first, other, SESSION)
        assert (promised, got) == (len(SESSION), 16 * CHUNK_TOKENS)
        for rank in (first, other):
            assert rank.right(SESSION[:got])
            assert torch.all(rank.gpu.kv[:, got : len(SESSION)] == -1)


# ----- pipeline parallelism


def pp_ranks(stack: Any, path: Any, split: Any) -> Any:
    """Start the stages of a model with so many layers each."""
    ranks = []
    for rank, layers in enumerate(split):
        shape = (layers, 2, CHUNK_TOKENS, HEADS, HEAD_SIZE)
        told = metadata(world_size=len(split), worker_id=rank, local_worker_id=rank, kv_shape=shape)
        first_layer = sum(split[:rank])
        ranks.append(stack.enter_context(served(path, meta=told, first_layer=first_layer)))
    return ranks


@pytest.mark.parametrize("split", [(2, 2), (3, 1)])
def test_each_stage_gets_its_own_layers_back_after_a_restart(tmp_path: Path, split: Any) -> None:
    path = write_config(tmp_path, shards=2)
    with ExitStack() as stack:
        ranks = pp_ranks(stack, path, split)
        for rank in ranks:
            rank.store(SESSION)
            settle(rank.plugin)
        assert [rank.plugin._setup.shard for rank in ranks] == [0, 1]
        digests = [r.plugin._keys.digests(r.chunk_keys(SESSION)) for r in ranks]
        assert not set(digests[0]) & set(digests[1])
    with ExitStack() as stack:
        for rank in pp_ranks(stack, path, split):
            request, promised = rank.lookup(SESSION)
            assert promised == len(SESSION)
            assert rank.retrieve(request, SESSION, promised) == promised
            assert rank.right(SESSION)
            assert rank.lookup(OTHER)[1] == 0


def test_another_split_of_the_layers_finds_nothing(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=2)
    for split in ((2, 2), (3, 1)):
        with ExitStack() as stack:
            for rank in pp_ranks(stack, path, split):
                assert rank.lookup(SESSION)[1] == 0
                rank.store(SESSION)
                settle(rank.plugin)


@pytest.mark.parametrize("fails", [0, 1])
def test_no_rank_keeps_what_was_computed_in_a_pass_that_another_spoilt(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = wild_members(2, 16 << 20)
    stand_in_for_mount(monkeypatch, mount_on(members, shards=2))
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(inprocess_registry, "FOLDER", folder)
    vllm = Vllm()
    vllm.install(monkeypatch)
    longer = SESSION + OTHER[: 8 * CHUNK_TOKENS]
    with ExitStack() as stack:
        ranks = pp_ranks(stack, write_config(tmp_path, shards=2), (2, 2))
        for rank in ranks:
            rank.store(SESSION)
            settle(rank.plugin)
        broken = ranks[fails]
        flip_bit(broken.plugin, members, broken.chunk_keys(SESSION)[16])
        with vllm.step(len(SESSION), request_id="returns"):
            for rank in ranks:
                request, promised = rank.lookup(SESSION)
                loads = promised if rank is not broken else 16 * CHUNK_TOKENS
                assert rank.retrieve(request, SESSION, promised) == loads
            for rank in ranks:
                rank.store(longer)
        for rank in ranks:
            settle(rank.plugin)
            assert counts(rank.plugin)["put_after_failed_load"] > 0
            assert not rank.plugin.contains(rank.chunk_keys(longer)[40])
        with vllm.step(request_id="returns"):  # what was missing is computed, nothing is loaded
            for rank in ranks:
                rank.store(longer)
        for rank in ranks:
            settle(rank.plugin)
            assert rank.plugin.contains(rank.chunk_keys(longer)[-1])
        with vllm.step(16, request_id="another"):
            assert not ranks[0].plugin._forward_pass.tainted
        assert len(list(folder.iterdir())) == 1
    assert not list(folder.iterdir())
