"""Entries on the media that no key of LMCache can name: the adapter does without them."""

import pytest
import xxhash

from fx100_lmcache.ondisk.chunk_meta import ChunkMeta, Layout, Scope
from fx100_lmcache.testing.forge import InodeDraft
from fx100_lmcache.testing.harness import Rig
from support.l2 import CHUNK_BYTES, MODEL, Recorder, adapter_on, key, memory_obj

NAMES = {
    "a model with @": Scope("mp", "a@b", 1),
    "a negative group": Scope("mp", MODEL, 1, group=-1, model_tag="r1"),
    "a salt that is a path": Scope("mp", MODEL, 1, salt="a/b", model_tag="r1"),
    "a salt that is too long": Scope("mp", MODEL, 1, salt="x" * 129, model_tag="r1"),
    **{
        f"a hash of {text[:9]} bytes": Scope(
            "mp", MODEL, 1, model_tag="r1", tags=(("hash_bytes", text),)
        )
        for text in ("abc", "-3", "40", "9" * 100, "")
    },
    "an unknown kind": Scope("\ud800", MODEL, 1, model_tag="r1"),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_that_no_key_can_name_does_not_keep_the_adapter_from_opening(name: str) -> None:
    scope = NAMES[name]
    rig = Rig.fresh(2, 1 << 20, object_bytes=CHUNK_BYTES)
    volume, geometry = rig.store.volume.uuid, rig.store.volume.geometry
    at = geometry.block_offset(0, 0)
    checksum = xxhash.xxh3_64_intdigest(bytes(rig.members[0].media[at : at + 4096]))
    meta = ChunkMeta(scope, Layout("KV_2LTD", (("no_such_dtype", (-1, 2**63 - 1)),))).pack()
    draft = InodeDraft(
        *(volume, 0, 0, 0, 1, 1, 1, scope.digest(b"1"), 4096), [(0, 0, 1, checksum)], meta
    )
    slot = geometry.slot_offset(0, 0, 0)
    rig.members[0].media[slot : slot + 512] = draft.pack(512, volume)
    rig.reopen()
    assert len(rig.store) == 1
    client = adapter_on(rig)
    adapter = client.adapter
    adapter.register_listener(recorder := Recorder())
    assert client.usage() == 0
    assert adapter.list_l2_keys(None, 10, None).entries == ()
    obj = memory_obj(4096)
    assert client.store([key(1)], [obj]).is_successful()
    assert client.has(key(1))
    client.settle()
    assert recorder.told("stored") == [key(1)]
    assert adapter.report_status()["counts"].get("event_errors", 0) == 0
