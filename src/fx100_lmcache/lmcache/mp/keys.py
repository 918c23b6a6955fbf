"""LMCache's ``ObjectKey`` to our digest, and back.

A digest is the 16-byte prefix of a scope (model, rank, group, salt, namespace) followed by the
chunk hash, so naming a chunk costs one concatenation. Salts separate tenants and are never
logged.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from fx100_lmcache.config import IdentityConfig
from fx100_lmcache.errors import TooLargeError
from fx100_lmcache.lmcache.compat.mp import ObjectKey
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.defects import Defects
from fx100_lmcache.ondisk.chunk_meta import DIGEST_BYTES, HASH_BYTES, SCOPE_BYTES, ChunkMeta, Scope

log = logging.getLogger(__name__)

NO_DIGEST = bytes(DIGEST_BYTES)
"""Stands for a key that is never stored; nothing is ever found under it."""

MAX_SCOPES = 65_536

Ident = tuple[str, int, int, str]
"""Model, kv_rank, object group and salt: an ``ObjectKey`` without its chunk hash."""

_ident_of = attrgetter("model_name", "kv_rank", "object_group_id", "cache_salt")
_USUAL = {HASH_BYTES}
_HASH_BYTES_TAG = "hash_bytes"
_MISSING: Any = object()


class KeyTranslator:
    """Names chunks. Thread-safe.

    Parameters
    ----------
    identity : IdentityConfig
        Gives each model its namespace, or says that it is not to be cached.
    meta_of : callable
        Metadata by the store's number for it.
    """

    def __init__(
        self, identity: IdentityConfig, meta_of: Callable[[int], ChunkMeta], counts: Counts
    ) -> None:
        self._identity = identity
        self._meta_of = meta_of
        self._counts = counts
        self._defects = Defects(counts)
        self._scopes: dict[tuple[Ident, int], Scope | None] = {}
        self._known: dict[int, tuple[Ident, int] | None] = {}
        self._warned: set[str] = set()

    def digests(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        """Name every key, in order; :data:`NO_DIGEST` for those that are never stored."""
        with contextlib.suppress(Exception):
            return self._digests(keys)
        return [self._digest_or_none(key) for key in keys]  # one that is none costs others nothing

    def _digest_or_none(self, key: ObjectKey) -> bytes:
        with self._defects.caught("keys_refused_malformed", f"a {type(key).__name__} is no key"):
            return self._digests([key])[0]
        return NO_DIGEST

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

        Entries of another namespace or of in-process mode share the volume: LMCache can
        neither ask for them nor delete them, so it is not told of them.
        """
        known: tuple[Ident, int] | None = self._known.get(meta_number, _MISSING)
        if known is _MISSING:
            known = None
            with self._defects.caught("keys_refused_malformed", "entries that no key can name"):
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
        known: Scope | None = self._scopes.get((ident, hash_bytes), _MISSING)
        if known is not _MISSING:
            return known
        if len(self._scopes) >= MAX_SCOPES:
            self._scopes.clear()
        scope = self._scopes[ident, hash_bytes] = self._new_scope(ident, hash_bytes)
        return scope

    def _new_scope(self, ident: Ident, hash_bytes: int) -> Scope | None:
        model, rank, group, salt = ident
        namespace = self._identity.namespace_of(model)
        self._warn_of_namespace(model, namespace)
        if namespace is None:
            self._counts.add("keys_refused_no_namespace")
            return None
        # the length of the hash is part of the name, so that padding cannot make two keys one
        tags = () if hash_bytes == HASH_BYTES else ((_HASH_BYTES_TAG, str(hash_bytes)),)
        scope = Scope("mp", model, rank, group, salt, namespace, tags=tags)
        try:
            scope.pack()
        except (struct.error, TooLargeError) as problem:
            self._counts.add("keys_refused_scope")
            log.warning("a key of model %.100a cannot be stored: %s", model, problem)
            return None
        return scope

    def _warn_of_namespace(self, model: str, namespace: str | None) -> None:
        if namespace or model in self._identity.namespaces or model in self._warned:
            return
        if len(self._warned) < MAX_SCOPES:
            self._warned.add(model)
        if namespace is None:
            log.warning(
                "model %.100a is not listed in identity.namespaces: nothing of it is cached", model
            )
        else:
            log.warning(
                "model %.100a has no tag in identity.namespaces: after a change of its weights or "
                "of the KV layout, old entries of equal shape would be taken for its own",
                model,
            )
