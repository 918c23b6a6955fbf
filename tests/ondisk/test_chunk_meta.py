"""What a chunk is: digests that never collide, fields that round-trip."""

import contextlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fx100_lmcache.errors import RecordError, TooLargeError
from fx100_lmcache.ondisk.chunk_meta import (
    DIGEST_BYTES,
    ChunkMeta,
    Layout,
    Scope,
    pack_fields,
    unpack_fields,
)

TRICKY = [
    "",
    "/",
    "a/b",
    "a@b",
    "a%40b",
    "a\0b",
    "a:b",
    "é",
    "e\u0301",
    "\udc80",
    "x" * 300,
    "-SEP-",
]
SCOPE = Scope("mp", "m", 1)

texts = st.text(st.characters(codec=None), max_size=20)
int64 = st.integers(-(2**63), 2**63 - 1)
scopes = st.builds(
    Scope,
    kind=st.sampled_from(["mp", "in-process"]),
    model=texts,
    rank=int64,
    group=int64,
    salt=texts,
    model_tag=texts,
    world_size=int64,
    dtype=texts,
    tags=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    layer=int64,
)
layouts = st.builds(
    Layout,
    format=texts,
    tensors=st.lists(st.tuples(texts, st.lists(int64, max_size=5).map(tuple)), max_size=4).map(
        tuple
    ),
)


@given(scopes, layouts)
def test_metadata_round_trips(scope: Scope, layout: Layout) -> None:
    """Any text, any dtype name, any rank of shape."""
    assert ChunkMeta.unpack(ChunkMeta(scope, layout).pack()) == ChunkMeta(scope, layout)


@given(scopes, scopes)
def test_scopes_that_differ_have_other_digests(one: Scope, other: Scope) -> None:
    assert (one == other) == (one.digest(b"h") == other.digest(b"h"))


def test_no_collision_of_tricky_names() -> None:
    """Names hold separators; fields are length-prefixed, never joined."""
    digests = {
        Scope("mp", model, 1, salt=salt, model_tag=tag).digest(b"chunk")
        for model, salt, tag in itertools.product(TRICKY, repeat=3)
    }
    assert len(digests) == len(TRICKY) ** 3


def test_moving_text_between_fields_is_another_digest() -> None:
    assert Scope("mp", "ab", 1, salt="c").prefix != Scope("mp", "a", 1, salt="bc").prefix
    tagged = replace(SCOPE, tags=(("k", "v"),)), replace(SCOPE, tags=(("kv", ""),))
    assert tagged[0].prefix != tagged[1].prefix


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "in-process"},
        {"model": "m2"},
        {"rank": 2},  # every rank has its own objects
        {"rank": (8 << 24) | 1},  # and so has every world size
        {"group": 1},
        {"salt": "tenant"},
        {"model_tag": "revision-b"},  # revision or layout
        {"world_size": 8},
        {"dtype": "fp8_e4m3"},
        {"tags": (("lora", "a"),)},
        {"layer": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_separates(change: dict[str, object]) -> None:
    assert replace(SCOPE, **change).digest(b"h") != SCOPE.digest(b"h")  # type: ignore[arg-type]


def test_salts_are_three_namespaces() -> None:
    """Two tenants and nobody share nothing."""
    assert len({replace(SCOPE, salt=salt).digest(b"h") for salt in ("a", "b", "")}) == 3


def test_eight_ranks_are_eight_objects() -> None:
    assert len({replace(SCOPE, rank=rank).digest(b"h") for rank in range(8)}) == 8


def test_digest_is_prefix_and_padded_hash() -> None:
    digest = SCOPE.digest(b"\x01\x02")
    assert len(digest) == DIGEST_BYTES
    assert digest == SCOPE.prefix + b"\x01\x02" + bytes(30)
    assert SCOPE.digest(bytes(range(32)))[16:] == bytes(range(32))
    with pytest.raises(TooLargeError, match="33 bytes"):
        SCOPE.digest(bytes(33))


def test_digest_is_equal_in_fresh_interpreters() -> None:
    """Nothing depends on Python's own, randomised hash."""
    code = (
        "from fx100_lmcache.ondisk.chunk_meta import Scope;"
        "print(Scope('in-process','a/b@c',3,salt='s',tags=(('x','y'),)).digest(b'h').hex())"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ["random", *map(str, range(19))]
    ]
    expected = Scope("in-process", "a/b@c", 3, salt="s", tags=(("x", "y"),)).digest(b"h").hex()
    found = [process.communicate()[0].strip() for process in running]
    assert found == [expected] * 20


def test_long_fields() -> None:
    long = "x" * 65_535
    meta = ChunkMeta(replace(SCOPE, model=long), Layout("f"))
    assert ChunkMeta.unpack(meta.pack()) == meta
    with pytest.raises(TooLargeError, match="65536 bytes"):
        replace(SCOPE, model=long + "x").pack()


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=6))
def test_fields_round_trip(fields: list[tuple[int, bytes]]) -> None:
    assert list(unpack_fields(pack_fields(fields))) == fields


@given(st.binary(max_size=200))
def test_garbage_is_a_record_error(data: bytes) -> None:
    with pytest.raises(RecordError):
        ChunkMeta.unpack(data)


@given(scopes, layouts, st.data())
def test_damaged_metadata_never_raises_anything_else(
    scope: Scope, layout: Layout, data: st.DataObject
) -> None:
    packed = bytearray(ChunkMeta(scope, layout).pack())
    for _ in range(3):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for damaged in (bytes(packed), bytes(packed[:cut])):
        with contextlib.suppress(RecordError):
            ChunkMeta.unpack(damaged)
