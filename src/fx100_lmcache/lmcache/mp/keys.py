"""LMCache's ``ObjectKey`` to our digest, and back.

A digest is the 16-byte prefix of a scope (model, rank, group, salt, tag) followed by the
chunk hash, so naming a chunk costs one concatenation. Salts separate tenants and are never
logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from fx100_lmcache.config import IdentityConfig
from fx100_lmcache.lmcache.compat.mp import ObjectKey
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.lmcache.scopes import NO_DIGEST, Scopes, name_each
from fx100_lmcache.ondisk.chunk_meta import HASH_BYTES, SCOPE_BYTES, ChunkMeta, Scope

Ident = tuple[str, int, int, str]
"""Model, kv_rank, object group and salt: an ``ObjectKey`` without its chunk hash."""

_ident_of = attrgetter("model_name", "kv_rank", "object_group_id", "cache_salt")
_USUAL = {HASH_BYTES}
_HASH_BYTES_TAG = "hash_bytes"
_RISK = (
    "after a change of its weights or of the KV layout, old entries of equal shape would be taken "
    "for its own"
)
_MISSING: Any = object()


class KeyNamer:
    """Names chunks. Thread-safe.

    Parameters
    ----------
    identity : IdentityConfig
        Gives each model its tag, or says that it is not to be cached.
    meta_of : callable
        Metadata by the store's number for it.
    """

    def __init__(
        self, identity: IdentityConfig, meta_of: Callable[[int], ChunkMeta], counts: Counts
    ) -> None:
        self._meta_of = meta_of
        self._counts = counts
        self._boundary = ErrorBoundary(counts)
        self._scopes = Scopes(identity, counts, _new_scope, _RISK)
        self._known: dict[int, tuple[Ident, int] | None] = {}

    def digests(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        """Name every key, in order; :data:`NO_DIGEST` for those that are never stored."""
        return name_each(keys, self._digests, self._boundary)

    def _digests(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        digests: list[bytes] = []
        for ident, run in groupby(keys, _ident_of):
            hashes = [key.chunk_hash for key in run]
            if set(map(len, hashes)) != _USUAL:
                digests += [self._unusual(ident, chunk_hash) for chunk_hash in hashes]
                continue
            scope = self._scope(ident, HASH_BYTES)
            if scope is None:
                digests += [NO_DIGEST] * len(hashes)
            else:
                prefix = scope.prefix
                digests += [prefix + chunk_hash for chunk_hash in hashes]
        return digests

    def scope_of(self, key: ObjectKey) -> Scope | None:
        """Everything of a key but its chunk hash; None if it is never stored."""
        if len(key.chunk_hash) > HASH_BYTES:
            return None
        return self._scope(_ident_of(key), len(key.chunk_hash))

    def key_of(self, digest: bytes, meta_number: int) -> ObjectKey | None:
        """Return the key that has this digest now; None if no key of LMCache's does.

        Entries of another tag or of in-process mode share the volume: LMCache can
        neither ask for them nor delete them, so it is not told of them.
        """
        known: tuple[Ident, int] | None = self._known.get(meta_number, _MISSING)
        if known is _MISSING:
            known = None
            with self._boundary.caught("keys_refused_malformed", "entries that no key can name"):
                known = self._known[meta_number] = self._recognise(meta_number)
        if known is None:
            return None
        ident, hash_bytes = known
        return ObjectKey(digest[SCOPE_BYTES : SCOPE_BYTES + hash_bytes], *ident)

    def _recognise(self, meta_number: int) -> tuple[Ident, int] | None:
        scope = self._meta_of(meta_number).scope
        ident = (scope.model, scope.rank, scope.group, scope.salt)
        ObjectKey(b"", *ident)  # raises for what no key can say
        hash_bytes = int(dict(scope.tags).get(_HASH_BYTES_TAG, HASH_BYTES))
        if scope.kind != "mp" or not 0 <= hash_bytes <= HASH_BYTES:
            return None
        if self._scope(ident, hash_bytes) != scope:
            return None
        return ident, hash_bytes

    def _unusual(self, ident: Ident, chunk_hash: bytes) -> bytes:
        if len(chunk_hash) > HASH_BYTES:
            self._counts.add("keys_refused_long_hash")
            return NO_DIGEST
        scope = self._scope(ident, len(chunk_hash))
        return NO_DIGEST if scope is None else scope.digest(chunk_hash)

    def _scope(self, ident: Ident, hash_bytes: int) -> Scope | None:
        return self._scopes.of((*ident, hash_bytes))


def _new_scope(tag: str, model: str, rank: int, group: int, salt: str, hash_bytes: int) -> Scope:
    # the length of the hash is part of the name, so that padding cannot make two keys one
    tags = () if hash_bytes == HASH_BYTES else ((_HASH_BYTES_TAG, str(hash_bytes)),)
    return Scope("mp", model, rank, group, salt, tag, tags=tags)
