"""LMCache's own engine over the plugin, with a "GPU" that is a tensor in host memory."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from inprocess_rig import (
    CHUNK_TOKENS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    WAIT_S,
    Responses,
    engine_config,
    metadata,
)
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.gpu_connector.gpu_connectors import (
    GPUConnectorInterface,
    VLLMPagedMemLayerwiseGPUConnector,
)

HIDDEN = HEADS * HEAD_SIZE
MAX_TOKENS = 160 * CHUNK_TOKENS


def kv_of(tokens: Sequence[int]) -> torch.Tensor:
    """KV of a prompt as a model would compute it: layers, tokens, K and V, hidden.

    As in a model, the values of a token depend on everything before it.
    """
    chain = torch.tensor(tokens, dtype=torch.float64).cumsum(0).remainder(199)
    layers = torch.arange(LAYERS, dtype=torch.float64).view(-1, 1, 1, 1)
    halves = torch.arange(2, dtype=torch.float64).view(1, 1, -1, 1)
    values = chain.view(1, -1, 1, 1) + 50 * layers + 25 * halves
    return values.expand(LAYERS, len(tokens), 2, HIDDEN).to(torch.bfloat16)


class TokenHashes:
    """Chunk hashes as LMCache chains them, without importing vLLM for it."""

    def __init__(self, told: Any) -> None:
        self._told = told

    def process_tokens(
        self,
        tokens: Any = None,
        hashes: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        make_key: bool = True,
        request_configs: dict[str, Any] | None = None,
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        skip = 0 if mask is None else int((~mask).sum())
        chain = b""
        for start in range(0, len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS):
            end = start + CHUNK_TOKENS
            part = repr([int(token) for token in tokens[start:end]]).encode()
            chain = xxhash.xxh3_64_digest(chain + part)
            if start >= skip:
                told = self._told
                yield (
                    start,
                    end,
                    CacheEngineKey(
                        told.model_name,
                        told.world_size,
                        told.worker_id,
                        int.from_bytes(chain, "big"),
                        told.kv_dtype,
                        request_configs,
                    ),
                )


class ToyGpu(GPUConnectorInterface):
    """Copies between LMCache's objects and `kv`: layers, tokens, K and V, hidden."""

    def __init__(self) -> None:
        self.kv = torch.zeros(LAYERS, MAX_TOKENS, 2, HIDDEN, dtype=torch.bfloat16)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, HIDDEN])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        memory_obj.tensor.copy_(self.kv[:, start:end].permute(2, 0, 1, 3))

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.kv[:, start:end] = memory_obj.tensor.permute(1, 2, 0, 3)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(obj, start, end)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(obj, start, end)


class ToyLayerGpu(VLLMPagedMemLayerwiseGPUConnector):
    """The same, layer by layer; LMCache insists on a subclass of this."""

    def __init__(self) -> None:
        self.kv = torch.zeros(LAYERS, MAX_TOKENS, 2, HIDDEN, dtype=torch.bfloat16)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([num_tokens, 2, HIDDEN])

    def batched_to_gpu(self, starts: Any, ends: Any, **kwargs: Any) -> Iterator[None]:
        for layer in range(LAYERS):
            objs = yield
            # not strict: LMCache's own connectors are not either
            for obj, start, end in zip(objs, starts, ends, strict=False):
                self.kv[layer, start:end] = obj.tensor
        yield
        yield

    def batched_from_gpu(
        self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any
    ) -> Iterator[None]:
        for layer in range(LAYERS):
            for obj, start, end in zip(memory_objs[layer], starts, ends, strict=True):
                obj.tensor.copy_(self.kv[layer, start:end])
            yield
        yield


class Served:
    """A vLLM worker with LMCache's engine, as its connector drives it."""

    def __init__(self, path: Path, **fields: Any) -> None:
        told = metadata()
        self.config = engine_config(path, **fields)
        self.layerwise = self.config.use_layerwise
        self.gpu = ToyLayerGpu() if self.layerwise else ToyGpu()
        self.tokens = TokenHashes(told)
        self.responses = Responses()
        self.engine = LMCacheEngine(
            self.config,
            told,
            self.tokens,
            self.gpu,
            lambda tensor, source: None,
            lambda obj, source: obj,
        )
        self.engine.post_init(async_lookup_server=self.responses)
        self.manager = self.engine.storage_manager
        self._requests = 0

    @property
    def plugin(self) -> Any:
        return self.manager.storage_backends["fx100"]

    def compute(self, tokens: Sequence[int]) -> None:
        self.gpu.kv[:, : len(tokens)] = kv_of(tokens)

    def store(self, tokens: list[int]) -> None:
        """Compute a prompt and save it."""
        self.compute(tokens)
        if not self.layerwise:
            self.engine.store(tokens)
            return
        saver = self.engine.store_layer(tokens)
        for _ in range(LAYERS + 1):
            next(saver)

    def lookup(self, tokens: list[int]) -> tuple[str, int]:
        """Ask, as the scheduler does; return request id and tokens promised."""
        self._requests += 1
        request = f"request-{self._requests}"
        if not self.config.enable_async_loading:
            return request, self.engine.lookup(tokens, lookup_id=request, pin=True)
        chunks = list(self.tokens.process_tokens(tokens))
        asyncio.run_coroutine_threadsafe(
            self.manager.async_lookup_and_prefetch(
                request,
                [chunk[2] for chunk in chunks],
                [0, *(chunk[1] for chunk in chunks)],
                pin=True,
            ),
            self.manager.loop,
        ).result(WAIT_S)
        until = time.monotonic() + WAIT_S
        while request not in self.responses.tokens:
            assert time.monotonic() < until, "the scheduler was never answered"
            time.sleep(0.0005)
        return request, self.responses.tokens.pop(request)

    def retrieve(self, request: str, tokens: list[int], promised: int) -> int:
        """Load what was promised; return the tokens that LMCache says are there."""
        self.gpu.kv.fill_(-1)
        wanted = tokens[:promised]
        if not self.layerwise:
            if promised or not self.config.enable_async_loading:
                mask = self.engine.retrieve(wanted, req_id=request)
                got = int(mask.sum())
            else:
                got = 0
        else:
            got = self._retrieve_layers(wanted) if promised else 0
        self.engine.lookup_unpin(request)
        return got

    def _retrieve_layers(self, wanted: list[int]) -> int:
        loader = self.engine.retrieve_layer(wanted, sync=True)
        last = None
        try:
            for _ in range(LAYERS + 2):
                last = next(loader)
        except UnboundLocalError:  # LMCache's own, when all that was promised is gone (B57)
            return 0
        assert last is not None
        return int(last.sum())

    def right(self, tokens: Sequence[int]) -> bool:
        """Whether the KV of these tokens is in the "GPU"."""
        return torch.equal(self.gpu.kv[:, : len(tokens)], kv_of(tokens))


@contextmanager
def served(path: Path, **fields: Any) -> Iterator[Served]:
    """Start a worker, and end it in an orderly way."""
    worker = Served(path, **fields)
    manager = worker.manager
    pool = manager.local_cpu_backend.memory_allocator
    try:
        yield worker
    finally:
        worker.engine.close()
        manager.thread.join(WAIT_S)
        manager.loop.close()
        pool.close()
