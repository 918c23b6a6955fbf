"""What differs between releases of LMCache is found at start, and what a newer one has is used."""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import pytest

from fx100_lmcache.config import MemberConfig, VolumeConfig, nvme
from fx100_lmcache.lmcache.compat import mp
from fx100_lmcache.lmcache.compat.contract import Contract
from fx100_lmcache.lmcache.compat.release import UnsupportedReleaseError, imports_of
from fx100_lmcache.lmcache.l2_adapter import FX100L2Adapter
from fx100_lmcache.lmcache.versions import LMCACHE
from fx100_lmcache.testing.harness import Rig
from fx100_lmcache.testing.memory import MemoryMember
from support.l2 import (
    CHUNK_BYTES,
    Client,
    Recorder,
    adapter_on,
    keys,
    memory_config,
    memory_obj,
    payload,
)

SIZE = 4096


@pytest.fixture
def client() -> Iterator[Client]:
    made = adapter_on(Rig.fresh(2, 512 * 1024))
    yield made
    made.adapter.close()


# ----- a release that is another one


def refused(contract: Contract, ours: type = FX100L2Adapter) -> str:
    with pytest.raises(UnsupportedReleaseError) as caught:
        contract.check(ours)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith("Supported is 0.5.4 to 0.5.7. Run: pip install 'lmcache==0.5.6'")
    return text


def on(base: type, **changes: Any) -> Contract:
    """The adapter's contract on another base class."""
    return dataclasses.replace(mp.ADAPTER_CONTRACT, base=base, **changes)


def test_this_release_is_as_ours_needs_it(client: Client) -> None:
    mp.ADAPTER_CONTRACT.check(FX100L2Adapter)
    mp.ADAPTER_CONTRACT.check_instance(client.adapter)


def test_a_method_that_is_called_with_something_else_is_named() -> None:
    class Before(mp.L2AdapterInterface):
        """As it was in 0.5.0; every lookup of ours would be a miss."""

        def submit_lookup_and_lock_task(self, keys: Any, layout_desc: Any) -> int:
            return 0

    text = refused(on(Before))
    assert "submit_lookup_and_lock_task is called with ('keys', 'layout_desc')" in text
    assert "ours with ('keys', 'group_layout_descs')" in text


def test_an_argument_more_is_named() -> None:
    class Next(mp.L2AdapterInterface):
        def submit_unlock(self, keys: Any, owner: str) -> None:
            """With an argument that ours does not take."""

    assert "submit_unlock is called with ('keys', 'owner')" in refused(on(Next))


def test_a_method_that_is_wanted_and_not_there_is_named() -> None:
    class Ours(FX100L2Adapter):
        @abstractmethod
        def get_flavour(self) -> str:
            """What the next release may want."""

    assert "wants get_flavour, which we do not have" in refused(mp.ADAPTER_CONTRACT, Ours)


def test_what_we_call_and_takes_something_else_is_named() -> None:
    def notify(self: Any, keys: Any, sizes: Any, tier: Any) -> None:
        """With an argument that we do not give."""

    changed = on(mp.L2AdapterInterface, calls=((notify, ("keys", "sizes")),))
    assert "notify takes ('keys', 'sizes', 'tier'), we give ('keys', 'sizes')" in refused(changed)


def test_what_we_use_and_is_gone_is_named(client: Client) -> None:
    assert "Bitmap has no union" in refused(
        on(mp.L2AdapterInterface, members=((mp.Bitmap, ("set", "union")),))
    )
    less = on(mp.L2AdapterInterface, attributes=("_bytes_by_flavour",))
    with pytest.raises(UnsupportedReleaseError, match="has no _bytes_by_flavour"):
        less.check_instance(client.adapter)


def test_a_name_that_cannot_be_imported_is_one_line_with_what_to_install() -> None:
    with (
        pytest.raises(UnsupportedReleaseError, match=r"no_such_thing.*Run: pip install 'lmcache=="),
        imports_of(LMCACHE),
    ):
        from lmcache.v1 import no_such_thing  # noqa: F401


def test_no_lmcache_at_all_is_no_wrong_lmcache() -> None:
    with pytest.raises(ModuleNotFoundError), imports_of(LMCACHE):
        raise ModuleNotFoundError("No module named 'lmcache'", name="lmcache")


# ----- what 0.5.7 asks


def test_what_is_touched_is_evicted_last_and_listeners_hear_of_it() -> None:
    rig = Rig.fresh(2, 512 * 1024)
    client = adapter_on(rig)
    listener = Recorder()
    client.adapter.register_listener(listener)
    some = keys(4)
    client.store(some, [memory_obj(payload(n, SIZE)) for n in range(4)])
    before = client.adapter.report_status()["counts"]
    client.adapter.submit_touch([some[1], *keys(1, start=99), some[0]])
    client.settle()
    assert listener.told("accessed") == [some[1], some[0]], "nothing of what is not there"
    order = [
        client.adapter._keys.key_of(digest, meta)
        for batch in rig.store.oldest_first()
        for digest, _, meta in batch
    ]
    assert order[-2:] == [some[0], some[1]], "the first of a call is worth most"
    after = client.adapter.report_status()["counts"]
    assert (after["lookup_hits"], after["lookup_misses"]) == (
        before["lookup_hits"],
        before["lookup_misses"],
    ), "nobody looked anything up"
    client.adapter.close()


def test_a_touch_moves_no_byte(client: Client) -> None:
    client.store(keys(2), [memory_obj(payload(n, SIZE)) for n in range(2)])
    members = cast(list[MemoryMember], client.adapter._mounted.volume.members)
    for member in members:
        member.calls.clear()
    client.adapter.submit_touch(keys(2))
    client.settle()
    assert not any(member.calls for member in members)


def test_bytes_of_an_array_are_remote_and_others_are_local(client: Client) -> None:
    told = client.adapter.get_memory_tags()
    namespace = MemberConfig(nvme=nvme.NvmeNamespace(nguid="0" * 31 + "1"))
    array = memory_config().model_copy(
        update={"volume": VolumeConfig(members=(namespace,), object_bytes=CHUNK_BYTES)}
    )
    far = adapter_on(Rig.fresh(2, 512 * 1024), array).adapter
    assert far._mounted.remote
    if told is None:  # before 0.5.7 nobody asks
        assert far.get_memory_tags() is None
    else:
        assert (told.segment.value, told.residency.value) == ("storage", "local")
        assert far.get_memory_tags().residency.value == "remote"
    far.close()


def test_bytes_that_are_shared_are_remote(client: Client) -> None:
    if client.adapter.get_memory_tags() is None:
        pytest.skip("before LMCache 0.5.7 nobody asks")
    client.adapter.set_backend_identity("fx100", shared=True)
    assert client.adapter.get_memory_tags().residency.value == "remote"
