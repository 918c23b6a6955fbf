"""Scopes of keys, in either mode: made once, remembered, or refused."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fx100_lmcache.config import IdentityConfig
from fx100_lmcache.errors import TooLargeError
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.error_boundary import ErrorBoundary
from fx100_lmcache.ondisk.chunk_meta import DIGEST_BYTES, Scope

log = logging.getLogger(__name__)

NO_DIGEST = bytes(DIGEST_BYTES)
"""Stands for a key that is never stored; nothing is ever found under it."""

MAX_SCOPES = 65_536
"""Scopes remembered: one for each rank, salt, layer, and combination of request tags."""

K = TypeVar("K")


class Scopes:
    """Makes the scope of a key's fields, and remembers it. Thread-safe.

    Parameters
    ----------
    identity : IdentityConfig
        Gives each model its tag, or says that it is not to be cached.
    counts : Counts
        Counts what is refused.
    make : callable
        Makes the scope of a model's tag and the fields that `of` was given.
    risk : str
        What happens to a model without a tag; ends the warning.
    """

    def __init__(
        self, identity: IdentityConfig, counts: Counts, make: Callable[..., Scope], risk: str
    ) -> None:
        self._identity = identity
        self._counts = counts
        self._make = make
        self._risk = risk
        self._known: dict[tuple[Any, ...], Scope | None] = {}
        self._warned: set[str] = set()

    def of(self, fields: tuple[Any, ...]) -> Scope | None:
        """Return the scope of a key's fields, the first of which is the model.

        Returns
        -------
        Scope or None
            None if nothing of it is stored, which is counted, and logged once.
        """
        try:
            return self._known[fields]
        except KeyError:
            pass
        if len(self._known) >= MAX_SCOPES:
            self._known.clear()
        scope = self._known[fields] = self._new(fields)
        return scope

    def _new(self, fields: tuple[Any, ...]) -> Scope | None:
        model = fields[0]
        tag = self._identity.tag_of(model)
        self._warn_without_tag(model, tag)
        if tag is None:
            self._counts.add("keys_refused_no_model_tag")
            return None
        scope = self._make(tag, *fields)
        try:
            scope.pack()
        except (struct.error, TooLargeError) as problem:
            self._counts.add("keys_refused_scope")
            log.warning("a key of model %.100a cannot be stored: %s", model, problem)
            return None
        return scope

    def _warn_without_tag(self, model: str, tag: str | None) -> None:
        if tag or model in self._identity.model_tags or model in self._warned:
            return
        if len(self._warned) < MAX_SCOPES:
            self._warned.add(model)
        if tag is None:
            log.warning(
                "model %.100a is not listed in identity.model_tags: nothing of it is cached", model
            )
        else:
            log.warning("model %.100a has no tag in identity.model_tags: %s", model, self._risk)


def name_each(
    keys: Sequence[K], name: Callable[[Sequence[K]], list[bytes]], boundary: ErrorBoundary
) -> list[bytes]:
    """Name every key with `name`; one that is none of LMCache's costs the others nothing.

    Returns
    -------
    list of bytes
        In order; :data:`NO_DIGEST` for those that are never stored.
    """
    with contextlib.suppress(Exception):
        return name(keys)
    return [_digest_or_none(key, name, boundary) for key in keys]


def _digest_or_none(
    key: K, name: Callable[[Sequence[K]], list[bytes]], boundary: ErrorBoundary
) -> bytes:
    with boundary.caught("keys_refused_malformed", f"a {type(key).__name__} is no key"):
        return name([key])[0]
    return NO_DIGEST
