"""Host memory and volume against sessions."""

from __future__ import annotations

from collections.abc import Iterator

from fx100_lmcache.config import Config
from fx100_lmcache.doctor.documents import EngineSettings
from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.findings import Finding, note, ok, problem, warning
from fx100_lmcache.ondisk.geometry import BLOCK_BYTES, round_up

GIB = 1 << 30
ALLOCATION_BYTES = 4096
"""LMCache's allocators round objects up to this."""
L1_SHARE = 0.8
"""Of L1, where LMCache's server begins to evict from it (``--eviction-trigger-watermark``)."""
CHUNK_TOKENS = 256
"""LMCache's default."""


def check_sizes(
    config: Config,
    question: Question,
    engine: EngineSettings | None,
    capacity_bytes: int | None,
    inode_slots: int | None = None,
) -> Iterator[Finding]:
    """Judge the memory that loads go through, and the volume, against one whole session.

    Parameters
    ----------
    engine : EngineSettings or None
        LMCache's settings inside vLLM, where known.
    capacity_bytes : int or None
        Of the volume's data blocks, where known.
    inode_slots : int or None
        Of the volume, where known.
    """
    tokens, token_bytes = question.model_tokens, question.kv_bytes_per_token
    if tokens is None or token_bytes is None:
        yield note(
            "sizes",
            "host memory and volume not compared with a session",
            "a session that does not fit is loaded in part, and the rest computed",
            "give --model-len and --kv-bytes-per-token",
        )
        return
    chunk_tokens = engine.chunk_size if engine else CHUNK_TOKENS
    chunk_bytes = round_up(chunk_tokens * token_bytes, ALLOCATION_BYTES)
    rank_bytes = -(-tokens // chunk_tokens) * chunk_bytes
    session_bytes = rank_bytes * question.ranks
    if IN_PROCESS in question.modes and engine is not None:
        yield _pool(engine, rank_bytes)
    if MP in question.modes:
        yield _l1(question.l1_bytes, session_bytes)
    yield from _chunk(config, chunk_bytes)
    if capacity_bytes is not None:
        yield _capacity(config, capacity_bytes, session_bytes)
        if inode_slots is not None:
            yield _inodes(chunk_bytes, capacity_bytes, inode_slots)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


def _needed(size_bytes: float) -> str:
    """GiB rounded up, as a setting."""
    return f"{-(-size_bytes * 100 // GIB) / 100:.2f}"


def _pool(engine: EngineSettings, rank_bytes: int) -> Finding:
    pool_bytes = int(engine.max_local_cpu_size * GIB)
    subject = "in-process: host memory"
    if pool_bytes >= rank_bytes:
        return ok(subject, f"{_gib(pool_bytes)} hold a session of {_gib(rank_bytes)} per rank")
    why = "longer sessions are loaded in part, and the rest is computed again"
    if engine.use_layerwise:
        why = "with use_layerwise nothing of it could be used, so the plugin refuses to start"
    return problem(
        subject,
        f"max_local_cpu_size {engine.max_local_cpu_size:g} is {_gib(pool_bytes)} per rank, a "
        f"session takes {_gib(rank_bytes)}",
        why,
        f"set max_local_cpu_size: {_needed(rank_bytes)}",
    )


def _l1(l1_bytes: int | None, session_bytes: int) -> Finding:
    subject, wanted = "mp: host memory", _needed(session_bytes / L1_SHARE)
    if l1_bytes is None:
        return note(
            subject,
            f"L1 not compared with a session of {_gib(session_bytes)}",
            "a session that L1 has no room for is loaded in part",
            f"give --l1-size-gb, and the same to lmcache server: {wanted} for each session that "
            "is loaded at the same time",
        )
    usable = int(l1_bytes * L1_SHARE)
    if usable >= session_bytes:
        count = usable // session_bytes
        return ok(subject, f"L1 has room for {count} session(s) of {_gib(session_bytes)} at once")
    return problem(
        subject,
        f"L1 of {_gib(l1_bytes)} holds {_gib(usable)} before it evicts, a session takes "
        f"{_gib(session_bytes)}",
        "what it has no room for is not loaded, and computed again",
        f"lmcache server --l1-size-gb {wanted}",
    )


def _chunk(config: Config, chunk_bytes: int) -> Iterator[Finding]:
    if chunk_bytes > config.io.max_write_bytes:
        yield problem(
            "chunk",
            f"a chunk has {chunk_bytes} bytes, io.max_write_in_flight is "
            f"{config.io.max_write_bytes}",
            "every put is dropped, and nothing is ever cached",
            f"set io.max_write_in_flight: {round_up(chunk_bytes, 1 << 20) * 64 >> 20}MiB",
        )
    if config.volume.object_bytes != chunk_bytes:
        yield note(
            "chunk",
            f"a chunk has {chunk_bytes} bytes, volume.object is {config.volume.object_bytes}",
            "pieces fit their frames less well: some space is lost, and reads are smaller",
            f"set volume.object: {chunk_bytes} before the next fx100 format",
        )


def _capacity(config: Config, capacity_bytes: int, session_bytes: int) -> Finding:
    usable = int(capacity_bytes * (1 - config.space.reserve_fraction))
    if usable >= session_bytes:
        count = usable // session_bytes
        return ok("capacity", f"the volume holds {count} session(s) of {_gib(session_bytes)}")
    return warning(
        "capacity",
        f"the volume holds {_gib(usable)}, a session takes {_gib(session_bytes)}",
        "the start of a session is evicted before its end is written",
        "give the volume more or larger members, then: fx100 format CONFIG",
    )


def _inodes(chunk_bytes: int, capacity_bytes: int, inode_slots: int) -> Finding:
    share = round_up(chunk_bytes, BLOCK_BYTES) * inode_slots / capacity_bytes
    if share >= 1:
        return ok("inodes", f"{inode_slots:,} are enough for chunks of {chunk_bytes} bytes")
    return warning(
        "inodes",
        f"{inode_slots:,} chunks of {chunk_bytes} bytes use all inodes, but {share:.0%} of the "
        "space",
        "each object takes an inode, so the oldest are evicted while space is free",
        f"set volume.object: {chunk_bytes}, leave volume.bytes_per_inode out, then: "
        "fx100 format CONFIG",
    )
