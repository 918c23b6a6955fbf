"""LMCache's ``CacheEngineKey`` to our digest, and what the key does not say.

An in-process key holds a hash of 64 bits, model, world size, rank, dtype and tags. Whether the
same hash means the same bytes also depends on how LMCache hashes and on how vLLM lays out its KV
cache. That :class:`KeyContext` is part of the name of every chunk, so that after a change
nothing of before is found, and start-up can say what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from fx100_lmcache.config import IdentityConfig
from fx100_lmcache.lmcache.compat.inprocess import CacheEngineKey, LayerCacheEngineKey
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.lmcache.scopes import NO_DIGEST, Scopes, name_each
from fx100_lmcache.ondisk.chunk_meta import DIGEST_BYTES, SCOPE_BYTES, Scope

CHUNK_HASH_BYTES = 16
"""Chunk hashes are signed: Python's own may be negative, folded digests fill 64 bits."""

CONTEXT_TAG = ""
"""Name of the tag that holds the context; request tags start with ``tag.``."""

_IDENT = ("model_name", "world_size", "worker_id", "_dtype_str", "tags")
_ident_of = attrgetter(*_IDENT)
_layer_ident_of = attrgetter(*_IDENT, "layer_id")
_RISK = "after a change of its weights, old entries would be taken for its own"
_PADDING = bytes(DIGEST_BYTES - SCOPE_BYTES - CHUNK_HASH_BYTES)


@dataclass(frozen=True)
class KeyContext:
    """What decides, besides the key, which bytes belong to a chunk.

    Attributes
    ----------
    hash_algorithm : str
        ``pre_caching_hash_algorithm`` of LMCache.
    hash_seed : str
        The root of all hash chains, which depends on PYTHONHASHSEED.
    chunk_tokens : int
        Tokens of a full chunk.
    kv_shape : tuple of int
        Layers, keys and values, tokens, heads, head size; of this rank.
    cache_dtype : str
        vLLM's name, which tells apart the 8-bit kinds that torch does not.
    """

    hash_algorithm: str
    hash_seed: str
    chunk_tokens: int
    kv_shape: tuple[int, ...]
    cache_dtype: str

    def fields(self) -> dict[str, str]:
        """Return every field as text without spaces."""
        texts = {
            "hash": self.hash_algorithm,
            "seed": self.hash_seed,
            "chunk": str(self.chunk_tokens),
            "kv_shape": "x".join(map(str, self.kv_shape)),
            "cache_dtype": self.cache_dtype,
        }
        return {name: text.replace(" ", "_") for name, text in texts.items()}

    def text(self) -> str:
        """Encode all fields, in one canonical order."""
        return " ".join(f"{name}={text}" for name, text in self.fields().items())


class KeyNamer:
    """Names chunks. Thread-safe.

    Parameters
    ----------
    identity : IdentityConfig
        Gives each model its tag, or says that it is not to be cached.
    """

    def __init__(self, identity: IdentityConfig, context: KeyContext, counts: Counts) -> None:
        self._context = context.text()
        self._counts = counts
        self._boundary = ErrorBoundary(counts)
        self._scopes = Scopes(identity, counts, self._new_scope, _RISK)

    def digest(self, key: CacheEngineKey) -> bytes:
        """Name one key."""
        return self.digests([key])[0]

    def digests(self, keys: Iterable[CacheEngineKey]) -> list[bytes]:
        """Name every key, in order; :data:`NO_DIGEST` for those that are never stored."""
        return name_each(list(keys), self._digests, self._boundary)

    def _digests(self, keys: Sequence[CacheEngineKey]) -> list[bytes]:
        digests: list[bytes] = []
        for kind, same_kind in groupby(keys, type):
            for ident, run in groupby(same_kind, _getter(kind)):
                scope = self._scope(ident)
                hashes = [key.chunk_hash for key in run]
                if scope is None:
                    digests += [NO_DIGEST] * len(hashes)
                else:
                    digests += _digests(scope.prefix, hashes)
        return digests

    def scope_of(self, key: CacheEngineKey) -> Scope | None:
        """Everything of a key but its chunk hash; None if it is never stored."""
        return self._scope(_getter(type(key))(key))

    def _scope(self, ident: tuple[Any, ...]) -> Scope | None:
        try:
            hash(ident)
        except TypeError:  # a tag with a value that cannot be hashed
            self._counts.add("keys_refused_tags")
            return None
        return self._scopes.of(ident)

    def _new_scope(
        self,
        model_tag: str,
        model: str,
        world_size: int,
        rank: int,
        dtype: str,
        tags: Sequence[tuple[str, Any]] | None,
        layer: int = -1,
    ) -> Scope:
        request_tags = [
            (f"tag.{name}", f"{type(value).__name__}:{value}") for name, value in tags or ()
        ]
        return Scope(
            "in-process",
            model,
            rank,
            model_tag=model_tag,
            world_size=world_size,
            dtype=dtype,
            tags=((CONTEXT_TAG, self._context), *request_tags),
            layer=layer,
        )


def _getter(kind: type) -> Callable[[CacheEngineKey], tuple[Any, ...]]:
    return _layer_ident_of if issubclass(kind, LayerCacheEngineKey) else _ident_of


def _digests(prefix: bytes, hashes: list[int]) -> list[bytes]:
    try:
        return [
            prefix + one.to_bytes(CHUNK_HASH_BYTES, "little", signed=True) + _PADDING
            for one in hashes
        ]
    except (AttributeError, OverflowError):  # no number, or too large: that one alone has no name
        if len(hashes) == 1:
            return [NO_DIGEST]
        return [digest for one in hashes for digest in _digests(prefix, [one])]


def fields_of(scope: Scope) -> dict[str, str]:
    """Return what a scope says of model and context, by name, for comparison."""
    text = dict(scope.tags).get(CONTEXT_TAG, "")
    return {
        "mode": scope.kind,
        "model": scope.model,
        "model_tag": scope.model_tag,
        "rank": str(scope.rank),
        "world_size": str(scope.world_size),
        "dtype": scope.dtype,
        **dict(part.partition("=")[::2] for part in text.split()),
    }


def difference(ours: Scope, stored: Iterable[Scope]) -> str | None:
    """Say in which fields the most similar of the stored scopes differs from ours.

    Returns
    -------
    str or None
        None if there is nothing stored, or something that is ours.
    """
    wanted = fields_of(ours)
    found: list[list[str]] = []
    for scope in stored:
        there = fields_of(scope)
        found.append(
            [
                f"{name} (there: {there.get(name, 'none')!r}, now: {value!r})"
                for name, value in wanted.items()
                if there.get(name) != value
            ]
        )
    nearest = min(found, key=len, default=[])
    return ", ".join(nearest) or None
