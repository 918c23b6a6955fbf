"""LMCache's memory, seen as bytes with an address."""

from pathlib import Path

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat

from fx100_lmcache.lmcache.buffers import io_buffer, layout_of
from fx100_lmcache.testing.harness import Rig
from support.l2 import (
    adapter_on,
    bytes_of,
    desc,
    key,
    keys,
    memory_obj,
    opened,
    payload,
    write_config,
)

CHUNK = 8_126_464


@pytest.fixture
def allocator() -> MixedMemoryAllocator:
    return MixedMemoryAllocator(1 << 20)


def test_the_padding_of_an_allocator_belongs_to_the_view(allocator: MixedMemoryAllocator) -> None:
    shape, dtype = torch.Size([2, 1, 5, 10]), torch.bfloat16
    single = allocator.allocate([shape], [dtype])
    batch = allocator.batched_allocate([shape], [dtype], 2)
    for obj in (single, *batch):
        buffer = io_buffer(obj)
        assert buffer.length == 200
        assert len(buffer.view) == obj.get_physical_size() == 4096
        assert buffer.address == obj.data_ptr
        assert buffer.fits_directly(0, 200, 512)
        buffer.view[:200] = payload("x", 200)
        assert bytes_of(obj) == payload("x", 200)
        obj.ref_count_down()
    allocator.close()


def test_an_object_on_its_own_gets_no_padding() -> None:
    buffer = io_buffer(memory_obj(200))
    assert len(buffer.view) == buffer.length == 200
    assert not buffer.fits_directly(0, 200, 512)


def test_a_view_keeps_its_memory() -> None:
    buffer = io_buffer(memory_obj(payload("x", 1 << 20)))
    assert bytes(buffer.view) == payload("x", 1 << 20)


def test_the_view_never_reaches_past_the_arena(allocator: MixedMemoryAllocator) -> None:
    obj = allocator.allocate([torch.Size([2, 1, 5, 10])], [torch.bfloat16])
    obj.meta.phy_size = 1 << 40
    buffer = io_buffer(obj)
    arena = obj.raw_data.untyped_storage()
    assert buffer.address + len(buffer.view) == arena.data_ptr() + arena.nbytes()
    obj.meta.phy_size = 4096
    obj.ref_count_down()
    allocator.close()


def test_layouts_name_what_they_hold() -> None:
    obj = memory_obj(
        48, shapes=[[2, 4], [8]], dtypes=[torch.bfloat16, torch.float32], fmt=MemoryFormat.KV_T2D
    )
    layout = layout_of(obj)
    assert layout.format == "KV_T2D"
    assert layout.tensors == (("bfloat16", (2, 4)), ("float32", (8,)))


def test_metadata_without_groups_will_do() -> None:
    obj = memory_obj(16)
    obj.meta.shapes = obj.meta.dtypes = None
    assert layout_of(obj).tensors == (("bfloat16", (8,)),)


def test_memory_of_another_device_is_refused() -> None:
    obj = memory_obj(16)
    obj.raw_data = torch.empty(16, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="host memory: meta"):
        io_buffer(obj)


def test_less_memory_than_announced_is_refused() -> None:
    obj = memory_obj(16)
    obj.raw_data = obj.raw_data[:8]
    with pytest.raises(ValueError, match="owns only 8"):
        io_buffer(obj)


@pytest.mark.parametrize(("offset", "extra"), [(64, 0), (0, 1), (64, 1), (1, 511)])
def test_unaligned_buffers_go_through_ours(tmp_path: Path, offset: int, extra: int) -> None:
    data = payload("x", CHUNK + extra)
    kind = [torch.uint8]
    with opened(write_config(tmp_path, members=2, size="16MiB")) as client:
        stored = memory_obj(data, shapes=[[1, len(data)]], dtypes=kind, offset=offset)
        assert client.store(keys(1), [stored]).is_successful()
        for loaded_offset in (offset, 0):
            into = memory_obj(len(data), shapes=[[1, len(data)]], dtypes=kind, offset=loaded_offset)
            assert client.load(keys(1), [into]) == [True]
            assert bytes_of(into) == data
        assert client.adapter.report_status()["is_healthy"]


def flat(data: bytes | int) -> object:
    length = data if isinstance(data, int) else len(data)
    return memory_obj(data, shapes=[[length]], dtypes=[torch.uint8])


def test_serde_a_shorter_row_of_bytes_fits_and_says_its_size() -> None:
    client = adapter_on(Rig.fresh(2, 512 * 1024))
    data = payload("packed", 5000) + bytes(3192)
    made = memory_obj(data, shapes=[[8192]], dtypes=[torch.uint8])
    made.set_used_size(5000)
    assert client.store(keys(1), [made]).bytes_transferred() == 5000
    kv = MemoryLayoutDesc([torch.Size([2, 4096])], [torch.bfloat16])
    assert client.lookup(keys(1), {0: kv}) == [True], "a lookup gets the layout before serde"
    into = memory_obj(6000, shapes=[[6000]], dtypes=[torch.uint8])
    assert client.load(keys(1), [into]) == [True]
    assert into.get_size() == 5000
    assert bytes_of(into) == payload("packed", 5000)


def test_serde_a_longer_row_of_bytes_does_not_fit() -> None:
    client = adapter_on(Rig.fresh(2, 512 * 1024))
    client.store(keys(1), [flat(payload("packed", 5000))])
    into = memory_obj(4999, shapes=[[4999]], dtypes=[torch.uint8])
    assert client.load(keys(1), [into]) == [False]
    assert into.get_size() == 4999


def test_serde_only_rows_of_bytes_may_be_shorter() -> None:
    client = adapter_on(Rig.fresh(2, 512 * 1024))
    client.store(keys(1), [flat(payload("packed", 4096))])
    into = memory_obj(4096, shapes=[[2, 1024]])
    assert client.load(keys(1), [into]) == [False], "made by a serde that is not there now"
    plain = memory_obj(payload("kv", 4096), shapes=[[2, 1024]])
    client.store([key(1)], [plain])
    assert client.load([key(1)], [flat(4096)]) == [False], "made without the serde of now"
    assert client.lookup([key(1)], {0: desc(plain)}) == [True]
