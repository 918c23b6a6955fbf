"""LMCache inside vLLM on a CPU, for tests only: stock LMCache has no connector for CPUs here.

vLLM loads it by ``"kv_connector": "CpuLMCacheConnector", "kv_connector_module_path":
"support.cpu_connector"``. It moves whole blocks of vLLM's CPU cache, whose layout is blocks, heads,
tokens, K and V: the order inside a block is that of vLLM's CPU kernels and is kept as it is.

``FX100_E2E_TRACE`` names a file that gets a line for every chunk saved and loaded:
``saved|loaded RANK START END HASH``.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
import xxhash
from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic

from support.releases import inprocess

factory: Any = inprocess("gpu_connector")
_connectors: Any = inprocess("gpu_connector.gpu_connectors")

TRACE = os.environ.get("FX100_E2E_TRACE")


class _Blocks:
    """vLLM's cache of one rank: layers of blocks, heads, tokens of K then of V, head size."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        count, heads, self.tokens, both = layers[0].shape
        self.heads, self.size = heads, both // 2
        self.layers = [x.view(count, heads, 2 * self.tokens, self.size) for x in layers]

    def numbers(self, slots: torch.Tensor, start: int, end: int) -> list[int]:
        """Return the blocks that hold tokens ``start`` to ``end``, which are whole blocks."""
        part = slots[start:end]
        assert len(part) % self.tokens == 0
        firsts = part[:: self.tokens].tolist()
        assert all(first % self.tokens == 0 for first in firsts)
        return [first // self.tokens for first in firsts]

    def read(self, layer: int, block: int, half: int) -> torch.Tensor:
        return self.layers[layer][block, :, half * self.tokens : (half + 1) * self.tokens]

    def rows(self, place: int) -> slice:
        """Return the tokens of a chunk that its block number ``place`` holds."""
        return slice(place * self.tokens, (place + 1) * self.tokens)


class _Connector:
    """What both modes share."""

    def __init__(self, metadata: Any) -> None:
        layers, _, _, heads, size = metadata.kv_shape
        self.num_layers, self.hidden, self.rank = layers, heads * size, metadata.worker_id
        self.kvcaches: Any = None

    def blocks(self, kwargs: dict[str, Any]) -> _Blocks:
        if kwargs.get("kvcaches") is not None:
            self.kvcaches = kwargs["kvcaches"]
        return _Blocks(self.kvcaches)

    def trace(self, what: str, start: int, end: int, obj: Any) -> None:
        if TRACE:
            mark = xxhash.xxh3_64_hexdigest(memoryview(obj.byte_array))
            with open(TRACE, "a") as file:
                file.write(f"{what} {self.rank} {start} {end} {mark}\n")


def _to_skip(kwargs: dict[str, Any], start: int, end: int) -> int:
    """Tokens of a chunk that vLLM has already."""
    return int(min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start)))


class CpuConnector(_Connector, _connectors.GPUConnectorInterface):
    """Objects of all layers: K and V, layers, tokens, hidden."""

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self.num_layers, num_tokens, self.hidden])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        cache = self.blocks(kwargs)
        for layer, half, rows, block in self._parts(cache, kwargs, start, end, 0):
            there = memory_obj.tensor[half, layer, rows].view(cache.heads, -1, cache.size)
            there.copy_(cache.read(layer, block, half))
        self.trace("saved", start, end, memory_obj)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.trace("loaded", start, end, memory_obj)
        cache = self.blocks(kwargs)
        skip = _to_skip(kwargs, start, end) // cache.tokens
        for layer, half, rows, block in self._parts(cache, kwargs, start, end, skip):
            here = memory_obj.tensor[half, layer, rows].view(cache.heads, -1, cache.size)
            cache.read(layer, block, half).copy_(here)

    def _parts(
        self, cache: _Blocks, kwargs: dict[str, Any], start: int, end: int, skip: int
    ) -> Iterator[tuple[int, int, slice, int]]:
        numbers = cache.numbers(kwargs["slot_mapping"], start, end)
        for layer in range(self.num_layers):
            for half in (0, 1):
                for place, block in list(enumerate(numbers))[skip:]:
                    yield layer, half, cache.rows(place), block

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(obj, start, end, **kwargs)


class CpuLayerConnector(_Connector, _connectors.VLLMPagedMemLayerwiseGPUConnector):
    """Objects of one layer: tokens, K and V, hidden."""

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([num_tokens, 2, self.hidden])

    def batched_to_gpu(self, starts: Any, ends: Any, **kwargs: Any) -> Generator[None, Any, None]:
        cache = self.blocks(kwargs)
        for layer in range(self.num_layers):
            objs = yield
            for start, end, obj in zip(starts, ends, objs, strict=False):
                self.trace("loaded", start, end, obj)
                skip = _to_skip(kwargs, start, end) // cache.tokens
                numbers = cache.numbers(kwargs["slot_mapping"], start, end)
                for place, block in list(enumerate(numbers))[skip:]:
                    rows = obj.tensor[cache.rows(place)]
                    for half in (0, 1):
                        here = rows[:, half].reshape(cache.heads, -1, cache.size)
                        cache.read(layer, block, half).copy_(here)
        yield
        yield

    def batched_from_gpu(
        self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any
    ) -> Iterator[None]:
        cache = self.blocks(kwargs)
        for layer in range(self.num_layers):
            for start, end, obj in zip(starts, ends, memory_objs[layer], strict=True):
                numbers = cache.numbers(kwargs["slot_mapping"], start, end)
                for place, block in enumerate(numbers):
                    rows = obj.tensor[cache.rows(place)]
                    for half in (0, 1):
                        there = cache.read(layer, block, half)
                        rows[:, half].copy_(there.reshape(-1, self.hidden))
                self.trace("saved", start, end, obj)
            yield
        yield


def _create(config: Any, metadata: Any, *_: Any, **__: Any) -> Any:
    return (CpuLayerConnector if config.use_layerwise else CpuConnector)(metadata)


factory.CreateGPUConnector = _create


class CpuLMCacheConnector(LMCacheConnectorV1Dynamic):
    """LMCache's connector, which now finds the ones above."""
