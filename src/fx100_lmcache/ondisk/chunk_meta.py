"""What a chunk *is*: the fields that name it, and the 48-byte digest that stands for them.

A digest is a 16-byte hash of the :class:`Scope` (everything but the chunk hash) followed by the
32-byte chunk hash. The scope hash is computed once and cached, so naming a chunk costs one
concatenation. Fields are encoded as length-prefixed records, never joined with a separator:
model names may hold ``/``, ``@``, ``%`` or NUL.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fx100_lmcache.errors import RecordError, TooLargeError

SCOPE_BYTES = 16
HASH_BYTES = 32
DIGEST_BYTES = SCOPE_BYTES + HASH_BYTES

_FIELD = struct.Struct("<BH")
_INT = struct.Struct("<q")

# Field tags of scope and layout records. Numbers are part of the on-disk format: never reuse one.
_KIND, _MODEL, _SALT, _MODEL_TAG, _DTYPE = 1, 2, 3, 4, 5
_WORLD_SIZE, _RANK, _GROUP, _LAYER, _TAG = 6, 7, 8, 9, 10
_FORMAT, _TENSOR = 32, 33


def pack_fields(fields: Iterable[tuple[int, bytes]]) -> bytes:
    """Encode ``(tag, value)`` pairs as length-prefixed fields, in the order given.

    Raises
    ------
    TooLargeError
        If one value is longer than 65,535 bytes.
    """
    parts: list[bytes] = []
    for tag, value in fields:
        if len(value) > 0xFFFF:
            raise TooLargeError(f"field {tag} is {len(value)} bytes long; at most 65535 fit")
        parts += (_FIELD.pack(tag, len(value)), value)
    return b"".join(parts)


def unpack_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Decode what :func:`pack_fields` wrote.

    Raises
    ------
    RecordError
        If the bytes end within a field.
    """
    at = 0
    while at < len(data):
        if at + _FIELD.size > len(data):
            raise RecordError(f"field header cut off at byte {at} of {len(data)}")
        tag, length = _FIELD.unpack_from(data, at)
        at += _FIELD.size
        if at + length > len(data):
            raise RecordError(f"field {tag} cut off: {length} bytes announced at {at}")
        yield tag, data[at : at + length]
        at += length


@dataclass(frozen=True)
class Scope:
    """Every field of a key except its chunk hash.

    Attributes
    ----------
    kind : str
        ``"mp"`` (LMCache multiprocess, ``ObjectKey``) or ``"in-process"`` (``CacheEngineKey``).
    model : str
        Model name as LMCache gives it.
    rank : int
        ``kv_rank`` (mp: world size, rank and their local parts packed) or ``worker_id``.
    group : int
        Object group (mp), 0 otherwise.
    salt : str
        ``cache_salt``; tenants with different salts never share. Never logged.
    model_tag : str
        The operator's tag for what the key does not say (revision, KV layout).
    world_size, dtype, tags, layer
        In-process key fields; ``layer`` is -1 for keys that cover all layers.
    """

    kind: str
    model: str
    rank: int
    group: int = 0
    salt: str = ""
    model_tag: str = ""
    world_size: int = 0
    dtype: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    layer: int = -1

    def pack(self) -> bytes:
        """Encode every field, in one canonical order."""
        fields = [
            (_KIND, _text(self.kind)),
            (_MODEL, _text(self.model)),
            (_RANK, _INT.pack(self.rank)),
            (_GROUP, _INT.pack(self.group)),
            (_SALT, _text(self.salt)),
            (_MODEL_TAG, _text(self.model_tag)),
            (_WORLD_SIZE, _INT.pack(self.world_size)),
            (_DTYPE, _text(self.dtype)),
            (_LAYER, _INT.pack(self.layer)),
        ]
        fields += [
            (_TAG, pack_fields([(0, _text(name)), (1, _text(value))])) for name, value in self.tags
        ]
        return pack_fields(fields)

    @cached_property
    def prefix(self) -> bytes:
        """The 16 bytes that start the digest of every chunk in this scope."""
        return hashlib.blake2b(self.pack(), digest_size=SCOPE_BYTES, person=b"fx100-scope").digest()

    def digest(self, chunk_hash: bytes) -> bytes:
        """Name one chunk: this scope's prefix and its hash, padded with zeros to 32 bytes.

        Raises
        ------
        TooLargeError
            If the chunk hash is longer than 32 bytes.
        """
        if len(chunk_hash) > HASH_BYTES:
            raise TooLargeError(f"chunk hash of {len(chunk_hash)} bytes; at most {HASH_BYTES} fit")
        return self.prefix + chunk_hash.ljust(HASH_BYTES, b"\0")


@dataclass(frozen=True)
class Layout:
    """How the bytes of an object are to be read: format name, dtypes and shapes by tensor group.

    Names are opaque text: an unknown dtype is stored and compared like any other.
    """

    format: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def pack(self) -> bytes:
        """Encode the format name, then one record for each tensor group."""
        fields = [(_FORMAT, _text(self.format))]
        for dtype, shape in self.tensors:
            dims = struct.pack(f"<{len(shape)}q", *shape)
            fields.append((_TENSOR, pack_fields([(0, _text(dtype)), (1, dims)])))
        return pack_fields(fields)


@dataclass(frozen=True)
class ChunkMeta:
    """Scope and layout together: what an inode records besides digest, length and pieces."""

    scope: Scope
    layout: Layout

    def pack(self) -> bytes:
        """Encode both; identical for all chunks of one model, rank and shape."""
        return self.scope.pack() + self.layout.pack()

    @classmethod
    def unpack(cls, data: bytes) -> ChunkMeta:
        """Decode what :meth:`pack` wrote.

        Raises
        ------
        RecordError
            If the bytes are not such a record.
        """
        one: dict[int, bytes] = {}
        tags: list[tuple[str, str]] = []
        tensors: list[tuple[str, tuple[int, ...]]] = []
        try:
            for tag, value in unpack_fields(data):
                if tag == _TAG:
                    pair = dict(unpack_fields(value))
                    tags.append((_untext(pair[0]), _untext(pair[1])))
                elif tag == _TENSOR:
                    pair = dict(unpack_fields(value))
                    dims = struct.unpack(f"<{len(pair[1]) // 8}q", pair[1])
                    tensors.append((_untext(pair[0]), dims))
                else:
                    one[tag] = value
            scope = Scope(
                kind=_untext(one[_KIND]),
                model=_untext(one[_MODEL]),
                rank=_INT.unpack(one[_RANK])[0],
                group=_INT.unpack(one[_GROUP])[0],
                salt=_untext(one[_SALT]),
                model_tag=_untext(one[_MODEL_TAG]),
                world_size=_INT.unpack(one[_WORLD_SIZE])[0],
                dtype=_untext(one[_DTYPE]),
                tags=tuple(tags),
                layer=_INT.unpack(one[_LAYER])[0],
            )
            return cls(scope, Layout(_untext(one[_FORMAT]), tuple(tensors)))
        except (KeyError, struct.error) as problem:
            raise RecordError(f"incomplete chunk metadata: {problem!r}") from problem


def _text(value: str) -> bytes:
    # surrogatepass: a key with a lone surrogate must round-trip, not raise into LMCache
    return value.encode("utf-8", "surrogatepass")


def _untext(value: bytes) -> str:
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as problem:
        raise RecordError(f"not UTF-8 in chunk metadata: {problem}") from problem
