"""Telling vLLM which blocks not to use, against a stand-in and against LMCache's own connector."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fx100_lmcache.lmcache.inprocess.forward_pass import ForwardPass, LayerLoadError, find_connector
from support.inprocess_engine import Vllm
from support.releases import CONNECTOR_IMPL

STATE = "vllm.distributed.kv_transfer.kv_transfer_state"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm = Vllm()
    vllm.install(monkeypatch)
    return vllm


def test_a_pass_is_spoilt_until_it_ends(vllm: Any) -> None:
    step = ForwardPass(16)
    with vllm.step(16):
        assert not step.tainted
        step.taint()
        assert step.tainted
    assert not step.tainted
    with vllm.step(16):
        assert not step.tainted


def test_outside_of_a_pass_nothing_is_spoilt(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = ForwardPass(16)
    step.taint()
    assert not step.tainted
    monkeypatch.delitem(sys.modules, STATE)
    step.taint()
    assert not step.tainted
    assert find_connector() is None


def test_blocks_are_invalid_from_the_chunk_on_that_is_loaded_over(vllm: Any) -> None:
    with vllm.step(64, has_already=24):  # LMCache loads from token 16 on
        assert ForwardPass(16).invalidate() == 48 // vllm.BLOCK_TOKENS
    assert vllm.take_invalid_tokens() == list(range(16, 64))


def test_of_several_requests_those_that_load_are_invalid(vllm: Any) -> None:
    def request(start: Any, can_load: Any) -> Any:
        load = SimpleNamespace(vllm_cached_tokens=0, lmcache_cached_tokens=16, can_load=can_load)
        return SimpleNamespace(load_spec=load, slot_mapping=torch.arange(start, start + 32))

    with vllm.step():
        idle = SimpleNamespace(load_spec=None, slot_mapping=torch.arange(8))
        vllm._connector_metadata.requests = [
            request(160, True),
            idle,
            request(320, False),
            request(480, True),
        ]
        ForwardPass(16).invalidate()
    assert vllm.take_invalid_tokens() == [*range(160, 176), *range(480, 496)]


def test_slots_that_vllm_left_out_are_no_blocks(vllm: Any) -> None:
    with vllm.step(16):
        vllm._connector_metadata.requests[0].slot_mapping = torch.tensor([-1] * 8 + [*range(8, 16)])
        ForwardPass(16).invalidate()
    assert vllm.take_invalid_tokens() == list(range(8, 16))


def test_a_connector_among_others_is_found(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    several = SimpleNamespace(_connectors=[SimpleNamespace(), vllm])
    state = SimpleNamespace(
        has_kv_transfer_group=lambda: True, get_kv_transfer_group=lambda: several
    )
    monkeypatch.setitem(sys.modules, STATE, state)
    assert find_connector() is vllm
    several._connectors.pop()
    assert find_connector() is None
    state.has_kv_transfer_group = lambda: False
    assert find_connector() is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda vllm: setattr(vllm, "_connector_metadata", None),
        lambda vllm: setattr(vllm._connector_metadata, "requests", []),
        lambda vllm: delattr(vllm._lmcache_engine, "_block_size"),
        lambda vllm: delattr(vllm._lmcache_engine, "_invalid_block_ids"),
    ],
    ids=["no_pass", "no_request", "no_block_size", "no_invalid_blocks"],
)
def test_a_vllm_that_cannot_be_told_is_an_error(vllm: Any, spoil: Any) -> None:
    with vllm.step(16):
        spoil(vllm)
        with pytest.raises(LayerLoadError):
            ForwardPass(16).invalidate()


@pytest.mark.timeout(180)  # vLLM takes its time to import
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_lmcaches_own_connector_has_what_is_used_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are private ones of LMCache: of another version they may be gone."""
    pytest.importorskip("vllm", reason="needs the vllm package")
    from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic
    from vllm.distributed.kv_transfer import kv_transfer_state

    private = importlib.import_module(CONNECTOR_IMPL)
    lmcache = private.LMCacheConnectorV1Impl.__new__(private.LMCacheConnectorV1Impl)
    lmcache._block_size, lmcache._invalid_block_ids = 8, set()
    connector = LMCacheConnectorV1Dynamic.__new__(LMCacheConnectorV1Dynamic)
    connector._lmcache_engine = lmcache
    slots = torch.randperm(640)[:64]
    load = private.LoadSpec(vllm_cached_tokens=24, lmcache_cached_tokens=48, can_load=True)
    told = private.LMCacheConnectorMetadata()
    told.requests.append(private.ReqMeta("a", list(range(64)), slots, load_spec=load))
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    connector.bind_connector_metadata(told)
    step = ForwardPass(16)
    step.taint()
    assert step.tainted
    step.invalidate()
    wanted = torch.arange(48) >= 16
    theirs = lmcache.record_failed_blocks("a", wanted, torch.zeros(48, dtype=bool), slots[:48])
    assert connector.get_block_ids_with_load_errors() == theirs
    connector.clear_connector_metadata()
    assert not step.tainted
