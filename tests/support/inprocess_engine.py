"""LMCache's own engine over the plugin, with a "GPU" that is a tensor in host memory."""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from lmcache.utils import CacheEngineKey
from lmcache.v1.metadata import LMCacheMetadata

from support.inprocess import (
    CHUNK_TOKENS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    WAIT_S,
    Responses,
    engine_config,
    metadata,
)
from support.releases import inprocess as lmcache_inprocess

LMCacheEngine = lmcache_inprocess("cache_engine").LMCacheEngine
_connectors: Any = lmcache_inprocess("gpu_connector.gpu_connectors")

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
                        1 if told.use_mla else told.world_size,
                        told.worker_id,
                        int.from_bytes(chain, "big"),
                        told.kv_dtype,
                        request_configs,
                    ),
                )


class ToyGpu(_connectors.GPUConnectorInterface):
    """Copies between LMCache's objects and `kv`: layers, tokens, K and V, hidden."""

    def __init__(self, layers: int = LAYERS, halves: int = 2) -> None:
        self.kv = torch.zeros(layers, MAX_TOKENS, halves, HIDDEN, dtype=torch.bfloat16)

    def get_shape(self, num_tokens: int) -> torch.Size:
        layers, _, halves, hidden = self.kv.shape
        return torch.Size([halves, layers, num_tokens, hidden])

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


class ToyLayerGpu(_connectors.VLLMPagedMemLayerwiseGPUConnector):
    """The same, layer by layer; LMCache insists on a subclass of this."""

    def __init__(self) -> None:
        self.kv = torch.zeros(LAYERS, MAX_TOKENS, 2, HIDDEN, dtype=torch.bfloat16)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([num_tokens, 2, HIDDEN])

    def batched_to_gpu(self, starts: Any, ends: Any, **kwargs: Any) -> Generator[None, Any, None]:
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


class Vllm:
    """What the plugin sees of vLLM in a worker: the pass it is in, and the blocks not to use.

    A token is in the slot of its number.
    """

    BLOCK_TOKENS = CHUNK_TOKENS // 2

    def __init__(self) -> None:
        self._lmcache_engine = SimpleNamespace(
            _invalid_block_ids=set(), _block_size=self.BLOCK_TOKENS
        )
        self._connector_metadata: Any = None

    def install(self, monkeypatch: Any) -> None:
        """Be the connector of this process."""
        state = SimpleNamespace(
            has_kv_transfer_group=lambda: True, get_kv_transfer_group=lambda: self
        )
        monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_transfer_state", state)

    @contextmanager
    def step(
        self, promised: int = 0, *, has_already: int = 0, request_id: str = "request"
    ) -> Iterator[None]:
        """Begin a pass with one request that loads, and end it."""
        load = SimpleNamespace(
            vllm_cached_tokens=has_already, lmcache_cached_tokens=promised, can_load=promised > 0
        )
        request = SimpleNamespace(
            req_id=request_id, load_spec=load, slot_mapping=torch.arange(promised)
        )
        self._connector_metadata = SimpleNamespace(requests=[request])
        try:
            yield
        finally:
            self._connector_metadata = None

    def take_invalid_tokens(self) -> list[int]:
        """Return the tokens whose KV vLLM will not use, as it asks after each pass."""
        blocks = sorted(self._lmcache_engine._invalid_block_ids)
        self._lmcache_engine._invalid_block_ids.clear()
        size = self.BLOCK_TOKENS
        return [n for block in blocks for n in range(block * size, (block + 1) * size)]


class Broadcast:
    """What the first rank sends to the others; here they ask for it afterwards."""

    def __init__(self) -> None:
        self._sent: deque[Any] = deque()

    def send(self, what: Any, source: int) -> Any:
        self._sent.append(what.clone() if isinstance(what, torch.Tensor) else what)
        return what

    def receive(self, into: torch.Tensor | None, source: int) -> Any:
        what = self._sent.popleft()
        return what if into is None else into.copy_(what)


class Served:
    """A vLLM worker with LMCache's engine, as its connector drives it.

    Parameters
    ----------
    first_layer : int
        Of the model, on this rank.
    exchange : callable
        How a tensor or an object gets from the first rank to the others.
    """

    def __init__(
        self,
        path: Path,
        *,
        meta: LMCacheMetadata | None = None,
        first_layer: int = 0,
        exchange: Callable[[Any, int], Any] = lambda what, source: what,
        **fields: Any,
    ) -> None:
        told = meta or metadata()
        layers, halves = told.kv_shape[:2]
        self._layers, self._halves = slice(first_layer, first_layer + layers), slice(halves)
        self.config = engine_config(path, **fields)
        self.layerwise = self.config.use_layerwise
        self.gpu = ToyLayerGpu() if self.layerwise else ToyGpu(layers, halves)
        self.tokens = TokenHashes(told)
        self.responses = Responses()
        self.engine = LMCacheEngine(
            self.config,
            told,
            self.tokens,
            self.gpu,
            exchange,
            exchange,
        )
        self.engine.post_init(async_lookup_server=self.responses)
        self.manager = self.engine.storage_manager
        self._requests = 0

    @property
    def plugin(self) -> Any:
        return self.manager.storage_backends["fx100"]

    def chunk_keys(self, tokens: list[int]) -> list[CacheEngineKey]:
        return [key for _, _, key in self.tokens.process_tokens(tokens)]

    def compute(self, tokens: Sequence[int]) -> None:
        self.gpu.kv[:, : len(tokens)] = self._kv_of(tokens)

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
        for _ in range(LAYERS + 2):
            last = next(loader)
        assert last is not None
        return int(last.sum())

    def right(self, tokens: Sequence[int]) -> bool:
        """Whether the KV of these tokens is in the "GPU"."""
        return torch.equal(self.gpu.kv[:, : len(tokens)], self._kv_of(tokens))

    def _kv_of(self, tokens: Sequence[int]) -> torch.Tensor:
        return kv_of(tokens)[self._layers, :, self._halves]


@contextmanager
def served(path: Path, **fields: Any) -> Iterator[Served]:
    """Start a worker, and end it in an orderly way."""
    worker = Served(path, **fields)
    manager = worker.manager
    try:
        yield worker
    finally:
        if manager is None:  # a rank that neither stores nor looks up
            worker.engine.close()
        else:
            pool = manager.local_cpu_backend.memory_allocator
            worker.engine.close()
            manager.thread.join(WAIT_S)
            manager.loop.close()
            pool.close()
