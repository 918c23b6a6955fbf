"""What the operator asks."""

from __future__ import annotations

from dataclasses import dataclass, field

MP, IN_PROCESS = "mp", "in-process"


@dataclass(frozen=True)
class Question:
    """What the operator wants to know.

    Attributes
    ----------
    modes : frozenset of str
        ``mp`` (`lmcache server`), ``in-process`` (LMCache inside vLLM), or both.
    model_tokens : int or None
        Longest context, vLLM's ``--max-model-len``.
    kv_bytes_per_token : int or None
        KV bytes of one token on one rank.
    ranks : int
        Ranks whose KV is stored: tensor-parallel size, but 1 for MLA.
    l1_bytes : int or None
        Host memory of `lmcache server`, its ``--l1-size-gb``.
    running : bool
        The server, or vLLM, is meant to be running now.
    """

    modes: frozenset[str] = field(default=frozenset({MP, IN_PROCESS}))
    model_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    ranks: int = 1
    l1_bytes: int | None = None
    running: bool = False
