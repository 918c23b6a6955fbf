"""What is asked, and how a finding is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from fx100_lmcache.nvmf.check import Finding, Severity

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


def ok(subject: str, what: str) -> Finding:
    """Say what is well."""
    return Finding(Severity.OK, subject, what)


def note(subject: str, what: str, why: str, do: str = "") -> Finding:
    """Say what was not checked, or is merely good to know."""
    return Finding(Severity.NOTE, subject, what, why, do)


def warning(subject: str, what: str, why: str, do: str) -> Finding:
    """Say what works, but not as well or as surely as it could."""
    return Finding(Severity.WARNING, subject, what, why, do)


def problem(subject: str, what: str, why: str, do: str) -> Finding:
    """Say what would not work."""
    return Finding(Severity.PROBLEM, subject, what, why, do)
