"""What a volume brings for a model: bytes, seconds and memory. Pure arithmetic, no I/O.

Sessions come back together. The array loads one after the other at its full bandwidth, and the
accelerators compute what no chunk covers, one session after the other, while later sessions load.
Prefill is taken as linear in tokens at the speed given, which favours computing: attention makes
long contexts slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fx100_lmcache.ondisk.geometry import BLOCK_BYTES, choose_frame_blocks, default_bytes_per_inode

PORT_BYTES_PER_S = 12.5e9
"""One 100 GbE port."""

WIRE_SHARE = 0.92
"""Best share of a 100 GbE port published for NVMe-oF block reads (Kazan Networks 2018, RDMA)."""

RESERVE = 0.03
"""Share of a volume kept free, see ``space.reserve_fraction``."""

INODE_BYTES = 1024


@dataclass(frozen=True)
class ModelShape:
    """KV cache of a model at one tensor-parallel size.

    Attributes
    ----------
    kv_heads, head_size : int
        Of the whole model. MLA has one head, of the latent and the rope part together.
    item_bytes : int
        2 for bf16, 1 for fp8, 4 for fp32.
    tensor_parallel : int
        Ranks that compute together.
    mla : bool
        One latent instead of keys and values, the same on every rank and stored once.
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int
    item_bytes: int
    tensor_parallel: int
    mla: bool = False

    @property
    def stored_ranks(self) -> int:
        """Ranks whose chunks are stored."""
        return 1 if self.mla else self.tensor_parallel

    @property
    def rank_bytes_per_token(self) -> int:
        """KV bytes of one token on one rank; heads are replicated past one a rank."""
        if self.mla:
            return self.layers * self.head_size * self.item_bytes
        heads = max(1, self.kv_heads // self.tensor_parallel)
        return 2 * self.layers * heads * self.head_size * self.item_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all stored ranks."""
        return self.rank_bytes_per_token * self.stored_ranks

    def chunk_bytes(self, chunk_tokens: int = 256) -> int:
        """Bytes of one rank's full chunk: ``volume.object`` of the configuration."""
        return self.rank_bytes_per_token * chunk_tokens


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # config.json of each model: num_hidden_layers, num_key_value_heads, head_dim
        ModelShape("qwen3-coder-480b-tp8", 62, 8, 128, 2, 8),
        ModelShape("qwen3-coder-480b-tp8-fp8", 62, 8, 128, 1, 8),
        ModelShape("qwen3-coder-480b-tp4", 62, 8, 128, 2, 4),
        ModelShape("qwen3-coder-480b-tp4-fp8", 62, 8, 128, 1, 4),
        ModelShape("qwen2.5-32b-tp1", 64, 8, 128, 2, 1),
        ModelShape("deepseek-v3-mla-tp8", 61, 1, 512 + 64, 2, 8, mla=True),
        ModelShape("llama-3.1-70b-tp4", 80, 8, 128, 2, 4),
        ModelShape("tiny-demo", 4, 2, 64, 4, 1),
    )
}
"""Real KV shapes by name."""


@dataclass(frozen=True)
class Workload:
    """What is planned for.

    Attributes
    ----------
    tokens : int
        Context of a returning session.
    new_tokens : int
        Prompt of its next turn, computed either way.
    concurrency : int
        Sessions that come back at the same moment.
    array_bytes_per_s : float
        What the array delivers to this node.
    ports : int
        100 GbE ports of this node.
    prefill_tokens_per_s : float
        Measured on your accelerators; nothing here can know it.
    overhead_s : float
        Lookup, scheduling and copying of one session beside the load itself.
    """

    model: ModelShape
    tokens: int = 29_800
    new_tokens: int = 200
    concurrency: int = 8
    array_bytes_per_s: float = 5.23e9
    ports: int = 1
    prefill_tokens_per_s: float = 8_000.0
    overhead_s: float = 0.05
    chunk_tokens: int = 256


@dataclass(frozen=True)
class Plan:
    """The answer. Times in seconds, sizes in bytes, for p50 of the sessions.

    Attributes
    ----------
    restored_tokens : int
        Whole chunks only: LMCache's server stores no others.
    stored_bytes : int
        Of one session, rounding to blocks and inodes included.
    break_even_tokens : int or None
        Shortest context that loads faster than it computes, for one session alone; None: never.
    break_even_bytes_per_s : float
        Bandwidth below which this session would be computed faster.
    """

    kv_bytes: int
    restored_tokens: int
    chunk_bytes: int
    chunks: int
    wire_bytes_per_s: float
    bandwidth_bytes_per_s: float
    limited_by: str
    load_s: float
    ttft_computed_s: float
    ttft_restored_s: float
    break_even_tokens: int | None
    break_even_bytes_per_s: float
    stored_bytes: int
    sessions_per_tb: int
    l1_bytes: int


def make_plan(work: Workload) -> Plan:
    """Work out a plan.

    Raises
    ------
    ValueError
        If a number is not positive.
    """
    _check(work)
    model = work.model
    restored = work.tokens // work.chunk_tokens * work.chunk_tokens
    wire = work.ports * PORT_BYTES_PER_S * WIRE_SHARE
    bandwidth = min(wire, work.array_bytes_per_s)
    load_s = restored * model.bytes_per_token / bandwidth
    tail_s = (work.tokens - restored + work.new_tokens) / work.prefill_tokens_per_s
    whole_s = (work.tokens + work.new_tokens) / work.prefill_tokens_per_s
    chunk = model.chunk_bytes(work.chunk_tokens)
    chunks = restored // work.chunk_tokens * model.stored_ranks
    stored = chunks * stored_chunk_bytes(chunk)
    return Plan(
        kv_bytes=work.tokens * model.bytes_per_token,
        restored_tokens=restored,
        chunk_bytes=chunk,
        chunks=chunks,
        wire_bytes_per_s=wire,
        bandwidth_bytes_per_s=bandwidth,
        limited_by="wire" if wire < work.array_bytes_per_s else "array",
        load_s=load_s,
        ttft_computed_s=median_finish_s(0.0, whole_s, work.concurrency),
        ttft_restored_s=work.overhead_s + median_finish_s(load_s, tail_s, work.concurrency),
        break_even_tokens=break_even_tokens(work),
        break_even_bytes_per_s=restored * model.bytes_per_token / (whole_s - tail_s)
        if restored
        else math.inf,
        stored_bytes=stored,
        sessions_per_tb=int(1e12 * (1 - RESERVE) // stored) if stored else 0,
        l1_bytes=work.concurrency * restored * model.bytes_per_token,
    )


def _check(work: Workload) -> None:
    for name in (
        "tokens",
        "concurrency",
        "array_bytes_per_s",
        "ports",
        "prefill_tokens_per_s",
        "chunk_tokens",
    ):
        if not getattr(work, name) > 0:
            raise ValueError(f"{name} must be positive, not {getattr(work, name)}")


def median_finish_s(load_s: float, compute_s: float, sessions: int) -> float:
    """When the median of equal sessions, all there at once, is through both stages.

    Each stage serves one session after the other, so that the i-th finishes after
    ``load + compute + (i - 1) x the longer of the two``. The mean of the middle two when even.
    """
    place = (sessions + 1) / 2
    return load_s + compute_s + (place - 1) * max(load_s, compute_s)


def break_even_tokens(work: Workload) -> int | None:
    """Shortest context, in whole chunks, for which loading beats computing; None if none does."""
    bandwidth = min(work.ports * PORT_BYTES_PER_S * WIRE_SHARE, work.array_bytes_per_s)
    gain_s = 1 / work.prefill_tokens_per_s - work.model.bytes_per_token / bandwidth
    if gain_s <= 0:
        return None
    chunks = math.floor(work.overhead_s / gain_s / work.chunk_tokens) + 1
    return chunks * work.chunk_tokens


def stored_chunk_bytes(chunk_bytes: int, members: int = 4) -> int:
    """Bytes of a volume that one chunk takes: frames in blocks, and its share of inodes."""
    frame = choose_frame_blocks(chunk_bytes, members) * BLOCK_BYTES
    whole, tail = divmod(chunk_bytes, frame)
    data = whole * frame + -(-tail // BLOCK_BYTES) * BLOCK_BYTES
    return data + math.ceil(data / default_bytes_per_inode(chunk_bytes, INODE_BYTES)) * INODE_BYTES
