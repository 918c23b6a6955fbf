import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fx100_lmcache.config import load
from fx100_lmcache.doctor import proof
from fx100_lmcache.doctor.proof import prove_io, scratch_offset
from fx100_lmcache.errors import MemberSizeError
from fx100_lmcache.members.device import DeviceMember
from fx100_lmcache.mount import mount
from fx100_lmcache.ondisk.geometry import plan_geometry
from support.doctor import NOTE, OK, PROBLEM, WARNING, graded, only, write_volume


def contents(config: Path) -> list[bytes]:
    return [member.path.read_bytes() for member in load(config).volume.members]


def proven(config: Path) -> list:
    return prove_io(load(config), exclusive=True)


@given(
    units=st.lists(st.integers(256, 100_000), min_size=1, max_size=16),
    rest=st.sampled_from([0, 512, 1024, 3584]),
    object_bytes=st.integers(4096, 8 << 20),
    shards=st.integers(1, 64),
    align=st.sampled_from([512, 4096]),
)
def test_the_scratch_area_belongs_to_nobody(
    units: list[int], rest: int, object_bytes: int, shards: int, align: int
) -> None:
    rest = rest if align == 512 else 0
    try:
        geometry = plan_geometry(
            [unit * 4096 + rest for unit in units],
            object_bytes=object_bytes,
            shards=shards,
            io_align_bytes=align,
        )
    except MemberSizeError:
        return
    for member in range(len(units)):
        offset = scratch_offset(geometry, member)
        if offset is None:
            assert rest, "only devices whose size is no multiple of 4096 are without"
            continue
        last = max(geometry.shard_blocks(member, shard).stop for shard in range(shards))
        assert offset >= geometry.block_offset(member, last)
        assert offset % align == 0
        assert offset + align <= geometry.label_copy_offset(member)


def test_every_member_is_proven_and_no_byte_changes(tmp_path: Path) -> None:
    config = write_volume(tmp_path, members=3)
    before = contents(config)
    found = proven(config)
    assert [each.severity for each in found] == [OK] * 3
    assert all("proven by writing and reading" in each.what for each in found)
    assert contents(config) == before


def test_what_stood_in_the_scratch_area_is_put_back(tmp_path: Path) -> None:
    config = write_volume(tmp_path, members=1)
    with mounted_geometry(config) as geometry:
        offset = scratch_offset(geometry, 0)
    assert offset is not None
    with (tmp_path / "m0").open("r+b") as file:
        file.seek(offset)
        file.write(b"foreign!" * 64)
    before = contents(config)
    assert {each.severity for each in proven(config)} == {OK}
    assert contents(config) == before


class mounted_geometry:  # noqa: N801 - reads as a statement
    def __init__(self, config: Path) -> None:
        self.store = mount(load(config))

    def __enter__(self) -> Any:
        return self.store.volume.geometry

    def __exit__(self, *_: object) -> None:
        self.store.close()


def test_a_first_write_that_is_refused_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_volume(tmp_path, members=1)

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(DeviceMember, "write_from", refuse)
    found = only(proven(config), PROBLEM)
    assert found.subject == str(tmp_path / "m0")
    assert "Invalid argument" in found.what
    assert "every store would fail" in found.why


def test_a_short_write_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_volume(tmp_path, members=1)
    monkeypatch.setattr(DeviceMember, "write_from", lambda *_: 100)
    assert "100 of" in only(proven(config), PROBLEM).what


def test_a_device_that_forgets_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_volume(tmp_path, members=1)
    monkeypatch.setattr(DeviceMember, "write_from", lambda _self, _at, view: len(view))
    assert "others read back" in only(proven(config), PROBLEM).what


def test_direct_io_through_the_page_cache_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_volume(tmp_path, members=1, io={"direct": "require"})
    assert not graded(proven(config), WARNING)
    monkeypatch.setattr(proof, "_is_cached", lambda *_: True)
    assert "page cache" in only(proven(config), WARNING).what


def test_the_page_cache_is_really_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDWR)
    try:
        assert proof._is_cached(path, 4096, 4096)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for _ in range(100):  # a look that begins a read would be fooled by a fast device
            assert not proof._is_cached(path, 4096, 4096)
    finally:
        os.close(fd)


def test_buffered_io_is_proven_too(tmp_path: Path) -> None:
    found = proven(write_volume(tmp_path, members=1, io={"direct": "off"}))
    assert [each.severity for each in found] == [OK]
    assert found[0].what.startswith("buffered I/O proven")


@pytest.mark.parametrize("shard", [0, 1])
def test_nothing_is_written_while_somebody_owns_a_shard(tmp_path: Path, shard: int) -> None:
    config = write_volume(tmp_path, volume={"shards": 2})
    owner = mount(load(config), shards=[shard])
    try:
        # the living owner renews its claims meanwhile
        table = owner.volume.geometry.table_offset
        before = [member[table:] for member in contents(config)]
        found = only(prove_io(load(config), exclusive=False), NOTE)
        assert f"pid={os.getpid()}" in found.what
        assert [member[table:] for member in contents(config)] == before
    finally:
        owner.close()


def test_nothing_is_written_while_another_host_claims_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_volume(tmp_path)
    owner = mount(load(config))
    for member in owner.volume.members:  # it dies without giving its claims back
        member.close()
    monkeypatch.setattr(proof, "decided_by_locks", lambda *_: False)
    assert "not proven" in only(proven(config), NOTE).what
    owner.close()


def test_members_that_do_not_open_are_a_problem(tmp_path: Path) -> None:
    config = write_volume(tmp_path)
    (tmp_path / "m1").unlink()
    assert str(tmp_path / "m1") in only(proven(config), PROBLEM).what


def test_members_of_no_volume_are_left_alone(tmp_path: Path) -> None:
    config = write_volume(tmp_path)
    (tmp_path / "m1").write_bytes(bytes(4 << 20))
    before = contents(config)
    assert proven(config) == []
    assert contents(config) == before
