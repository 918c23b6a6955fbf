"""Which keys share an entry, and which never do."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat

from fx100_lmcache.config import IdentityConfig
from fx100_lmcache.counters import ADAPTER
from fx100_lmcache.lmcache.counts import Counts
from fx100_lmcache.lmcache.mp.keys import KeyNamer
from fx100_lmcache.lmcache.scopes import NO_DIGEST
from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout
from fx100_lmcache.testing.harness import Rig
from support.l2 import (
    MODEL,
    Client,
    adapter_on,
    desc,
    key,
    keys,
    memory_config,
    memory_obj,
    opened,
    payload,
    write_config,
)

SIZE = 4096


@pytest.fixture
def rig() -> Rig:
    return Rig.fresh(2, 1024 * 1024)


@pytest.fixture
def client(rig: Rig) -> Client:
    return adapter_on(rig)


def put(client: Client, one: ObjectKey, name: object) -> None:
    assert client.store([one], [memory_obj(payload(name, SIZE))]).is_successful()


def get(client: Client, one: ObjectKey) -> bytes | None:
    return client.get(one, memory_obj(SIZE))


def check_apart(client: Client, apart: list[ObjectKey]) -> None:
    """Store under each key in turn: only what was stored is there, and it is its own."""
    for number, one in enumerate(apart):
        assert not any(client.has(other) for other in apart[number:])
        put(client, one, number)
    for number, one in enumerate(apart):
        assert get(client, one) == payload(number, SIZE)


def test_ranks_and_world_sizes_do_not_share(client: Client) -> None:
    ranks = [ObjectKey.ComputeKVRank(8, r, 8, r) for r in range(8)]
    ranks += [ObjectKey.ComputeKVRank(4, r, 4, r) for r in range(4)]
    check_apart(client, [key(1, kv_rank=rank) for rank in ranks])


def test_another_dtype_of_equal_size_misses(client: Client) -> None:
    stored = memory_obj(payload("a", SIZE), shapes=[[2, 1024]], dtypes=[torch.bfloat16])
    client.store(keys(1), [stored])
    fp8 = memory_obj(SIZE, shapes=[[2, 2048]], dtypes=[torch.float8_e4m3fn])
    fp16 = memory_obj(SIZE, shapes=[[2, 1024]], dtypes=[torch.float16])
    for other in (fp8, fp16):
        assert client.lookup(keys(1), {0: desc(other)}) == [False]
        assert client.load(keys(1), [other]) == [False]
    assert client.lookup(keys(1), {0: desc(stored)}) == [True]
    assert client.get(key(0), stored) == payload("a", SIZE)


def test_a_new_layout_replaces_the_old_one(client: Client) -> None:
    old = memory_obj(payload("old", SIZE), shapes=[[2, 1024]])
    new = memory_obj(payload("new", SIZE), shapes=[[1024, 2]])
    client.store(keys(1), [old])
    assert client.store(keys(1), [new]).bytes_transferred() == SIZE
    assert client.usage() == SIZE
    assert client.get(key(0), old) is None
    assert client.get(key(0), new) == payload("new", SIZE)


def test_another_shape_or_format_of_equal_size_misses(client: Client) -> None:
    stored = memory_obj(payload("a", SIZE), shapes=[[2, 4, 16, 16]], fmt=MemoryFormat.KV_2LTD)
    client.store(keys(1), [stored])
    turned = memory_obj(SIZE, shapes=[[4, 2, 16, 16]], fmt=MemoryFormat.KV_2LTD)
    renamed = memory_obj(SIZE, shapes=[[2, 4, 16, 16]], fmt=MemoryFormat.KV_T2D)
    assert client.load(keys(2)[:1] * 2, [turned, renamed]) == [False, False]
    assert client.lookup(keys(1), {0: desc(turned)}) == [False]


def test_a_lookup_compares_each_group_with_its_own_description(client: Client) -> None:
    a = memory_obj(payload("a", SIZE), shapes=[[2, 1024]])
    b = memory_obj(payload("b", SIZE), shapes=[[1024, 2]])
    both = [key(1, object_group_id=0), key(1, object_group_id=1)]
    client.store(both, [a, b])
    assert client.lookup(both, {0: desc(a), 1: desc(b)}) == [True, True]
    assert client.lookup(both, {0: desc(b), 1: desc(b)}) == [False, True]
    assert client.lookup(both, {0: MemoryLayoutDesc([], []), 7: desc(a)}) == [True, True]


def test_salts_do_not_share_and_are_never_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    salts = ["", "tenant-one", "tenant-two"]
    with caplog.at_level(logging.DEBUG):
        check_apart(client, [key(1, cache_salt=salt) for salt in salts])
        client.store([key(b"x" * 40, cache_salt="tenant-one")], [memory_obj(SIZE)])
        client.store([key(2, cache_salt="tenant-one")], [None])
    assert dict(client.adapter.get_usage().bytes_by_cache_salt) == dict.fromkeys(salts, SIZE)
    assert "tenant" not in caplog.text
    assert "tenant" not in str(client.adapter.report_status())


def test_no_salt_and_an_empty_one_are_the_same(client: Client) -> None:
    put(client, key(1), "a")
    assert get(client, key(1, cache_salt="")) == payload("a", SIZE)


@pytest.mark.parametrize(
    "model",
    [
        "/data/models/x",
        "org/name%2F",
        "a:b\0c",
        "é/模型",
        "m" * 300,
        "..",
        " ",
        pytest.param("\ud800", id="lone surrogate"),
    ],
)
def test_any_model_name_round_trips(tmp_path: Path, model: str) -> None:
    one = key(1, model_name=model, cache_salt="s" * 128)
    with opened(write_config(tmp_path, members=1)) as client:
        put(client, one, "a")
        check_apart(client, [key(1, model_name=model + "x"), key(1, model_name="x" + model)])
        assert get(client, one) == payload("a", SIZE)
        listed = client.adapter.list_l2_keys(model).entries
        assert [entry.key.to_object_key() for entry in listed] == [one]


def test_groups_do_not_share(client: Client) -> None:
    check_apart(client, [key(1, object_group_id=group) for group in range(3)])
    long = memory_obj(payload("long", 2 * SIZE))
    client.store([key(2, object_group_id=0)], [long])
    assert not client.has(key(2, object_group_id=1))


@pytest.mark.parametrize("shape", [[2048], [2, 1024], [2, 4, 256], [2, 2, 8, 64], [2, 2, 2, 4, 64]])
@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_shapes_of_any_rank_and_dtypes_of_any_name(
    client: Client, shape: list[int], dtype: str
) -> None:
    kind = getattr(torch, dtype)
    size = 2048 * kind.itemsize
    stored = memory_obj(payload(dtype, size), shapes=[shape], dtypes=[kind])
    assert client.store(keys(1), [stored]).is_successful()
    assert client.lookup(keys(1), {0: desc(stored)}) == [True]
    assert client.get(key(0), stored) == payload(dtype, size)


def test_a_dtype_that_nobody_knows_is_kept_by_name(client: Client, rig: Rig) -> None:
    class Fp3:
        itemsize = 2

        def __str__(self) -> str:
            return "vendor.fp3"

    stored = memory_obj(payload("a", SIZE))
    stored.meta.dtypes = [Fp3()]
    assert client.store(keys(1), [stored]).is_successful()
    _, _, _, meta = rig.store.entries()[0]
    assert rig.store.meta(meta).layout.tensors == (("vendor.fp3", (2048,)),)
    assert client.load(keys(1), [memory_obj(SIZE)]) == [False]


def test_several_tensor_groups_in_one_object(client: Client) -> None:
    shapes, dtypes = [[2, 512], [4, 128]], [torch.bfloat16, torch.float32]
    stored = memory_obj(payload("a", 4096), shapes=shapes, dtypes=dtypes)
    client.store(keys(1), [stored])
    assert client.get(key(0), stored) == payload("a", 4096)
    assert client.lookup(keys(1), {0: desc(stored)}) == [True]
    swapped = memory_obj(4096, shapes=shapes[::-1], dtypes=dtypes[::-1])
    assert client.load(keys(1), [swapped]) == [False]


def test_a_part_of_a_chunk_is_not_the_chunk(client: Client) -> None:
    part = memory_obj(payload("part", 1024), shapes=[[2, 256]])
    client.store(keys(1), [part])
    assert client.load(keys(1), [memory_obj(SIZE, shapes=[[2, 1024]])]) == [False]


def test_long_hashes_are_refused_and_counted(client: Client) -> None:
    long = key(b"x" * 33)
    assert not client.store([key(1), long], [memory_obj(SIZE)] * 2).is_successful()
    assert client.lookup([long, key(1)]) == [False, True]
    assert client.load([long], [memory_obj(SIZE)]) == [False]
    counts = client.adapter.report_status()["adapter_counts"]
    assert counts["keys_refused_long_hash"] == 3


def test_short_hashes_are_not_padded_into_each_other(client: Client) -> None:
    hashes = [b"", b"\0", b"\1", b"\1\0", b"\1" + b"\0" * 31]
    check_apart(client, [key(one) for one in hashes])
    listed = client.adapter.list_l2_keys().entries
    assert {entry.key.to_object_key().chunk_hash for entry in listed} == set(hashes)


def test_a_model_without_a_tag_is_warned_of_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    client = adapter_on(rig)
    for number in range(3):
        put(client, key(number, model_name="new", kv_rank=number), number)
    put(client, key(9), 9)
    assert len([r for r in caplog.records if "no tag in identity.model_tags" in r.message]) == 1


def test_a_model_that_must_be_listed_is_not_cached(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    identity = IdentityConfig(model_tags={MODEL: "r1"}, require_model_tag=True)
    client = adapter_on(rig, memory_config(identity=identity))
    unlisted = key(1, model_name="new")
    for _ in range(2):
        assert not client.store([unlisted], [memory_obj(SIZE)]).is_successful()
    assert client.lookup([unlisted, key(1)]) == [False, False]
    assert caplog.text.count("nothing of it is cached") == 1
    put(client, key(1), "a")
    assert len(rig.store) == 1


def test_another_tag_sees_nothing_and_is_told_nothing(rig: Rig) -> None:
    put(adapter_on(rig), key(1), "r1")
    renamed = memory_config(identity=IdentityConfig(model_tags={MODEL: "r2"}))
    client = adapter_on(rig, renamed)
    assert not client.has(key(1))
    assert client.usage() == 0
    assert client.adapter.list_l2_keys().entries == ()
    put(client, key(1), "r2")
    assert get(client, key(1)) == payload("r2", SIZE)
    assert get(adapter_on(rig), key(1)) == payload("r1", SIZE)


@pytest.mark.parametrize("odd", [2**63, -(2**63) - 1])
def test_a_rank_that_cannot_be_recorded_is_refused(client: Client, odd: int) -> None:
    assert not client.store([key(1, kv_rank=odd)], [memory_obj(SIZE)]).is_successful()
    assert client.lookup([key(1, kv_rank=odd)]) == [False]


def test_objects_that_are_just_bytes(client: Client) -> None:
    data = payload("bytes", 5000)
    assert client.store(keys(1), [BytesBufferMemoryObj(data)]).is_successful()
    into = BytesBufferMemoryObj(bytearray(5000))
    assert client.load(keys(1), [into]) == [True]
    assert into.raw_data == data
    assert client.load(keys(1), [BytesBufferMemoryObj(bytes(5000))]) == [False], "read-only"


_texts = st.text(max_size=20).filter(lambda text: "@" not in text)
_salts = st.text(max_size=12).filter(lambda text: not set("@/\\\0") & set(text))


@settings(max_examples=200)
@given(
    st.lists(
        st.builds(
            ObjectKey,
            st.binary(max_size=32),
            _texts,
            st.integers(0, 2**32),
            st.integers(0, 5),
            _salts,
        ),
        max_size=12,
    )
)
def test_digests_name_keys_one_to_one_and_back(some: list[Any]) -> None:
    metas: list[ChunkMeta] = []
    translator = KeyNamer(
        IdentityConfig(default_model_tag="n"), lambda number: metas[number], Counts(ADAPTER)
    )
    digests = translator.digests(some)
    assert NO_DIGEST not in digests
    assert len(set(digests)) == len(set(some))
    for one, digest in zip(some, digests, strict=True):
        scope = translator.scope_of(one)
        assert scope is not None
        metas.append(ChunkMeta.unpack(ChunkMeta(scope, Layout("KV_2LTD")).pack()))
        assert translator.key_of(digest, len(metas) - 1) == one
