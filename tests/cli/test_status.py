"""`fx100 status`: what it shows, and when it says that the tier does not work."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fx100_lmcache.errors import RecordError
from fx100_lmcache.mount import mount
from fx100_lmcache.ondisk.geometry import LABEL_BYTES
from fx100_lmcache.ondisk.label import unpack_label
from fx100_lmcache.testing.forge import InodeDraft
from fx100_lmcache.testing.harness import META, digest_of
from support.cli import Owner, Rig, fill, formatted, fx100, put

MEMBER_FIELDS = {
    *("path", "identity", "index", "label", "io_mode", "logical_block_bytes", "size_bytes"),
    "formatted_bytes",
    "allocated_bytes",
    "paths",
}
USAGE_FIELDS = {
    *("entries", "live_bytes", "used_bytes", "free_bytes", "capacity_bytes", "inode_slots"),
    *("torn_inodes", "dropped_inodes", "used_share", "limit"),
}


def test_a_free_volume(rig: Rig) -> None:
    fill(rig, ["a", "b", "c"], length=200_000)
    report = rig.status()
    assert report["healthy"]
    assert report["problems"] == []
    assert [m["path"] for m in report["members"]] == [str(m) for m in rig.members]
    assert [m["index"] for m in report["members"]] == [0, 1]
    assert {m["label"] for m in report["members"]} == {"good"}
    assert {m["size_bytes"] for m in report["members"]} == {4 << 20}
    [shard] = report["shards"]
    assert (shard["shard"], shard["state"], shard["holder"]) == (0, "free", "")
    usage = report["usage"]
    assert usage["entries"] == 3
    assert usage["live_bytes"] == 600_000
    assert usage["used_bytes"] + usage["free_bytes"] == usage["capacity_bytes"]
    assert usage["torn_inodes"] == 0


def test_json_fields_are_stable_and_documented(rig: Rig) -> None:
    report = rig.status()
    assert set(report) == {
        *("healthy", "config", "volume", "formatted_unix_s", "members", "shards", "usage"),
        *("problems", "warnings"),
    }
    assert set(report["members"][0]) == MEMBER_FIELDS
    assert set(report["shards"][0]) == {
        *("shard", "state", "holder", "generation", "epoch", "same_boot", "renews", "still_s"),
    }
    assert set(report["usage"]) == USAGE_FIELDS
    rig.members[0].unlink()
    assert set(rig.status()["problems"][0]) == {
        *("severity", "subject", "what", "why", "do", "member"),
    }
    text = " ".join(fx100("status", "--help").stdout.replace("│", "").split())
    for name in {*report, *MEMBER_FIELDS, *USAGE_FIELDS, "holder", "epoch", "still_s", "why"}:
        assert name in text, name


def test_beside_a_living_server(rig: Rig, owner: Callable[..., Owner]) -> None:
    server = owner(rig.config)
    assert server.tell("store", "a", 200_000) == "stored"
    before = rig.unclaimed()
    report = rig.status()
    assert report["healthy"]
    assert report["shards"][0]["state"] == "in use"
    assert f"pid={server.pid} " in report["shards"][0]["holder"]
    assert report["usage"]["entries"] == 1
    assert rig.unclaimed() == before
    assert server.tell("store", "b", 200_000) == "stored"
    assert f"pid={server.pid}" in "".join(fx100("status", rig.config).stdout.split())


def test_a_cleared_volume_is_empty(rig: Rig) -> None:
    fill(rig, ["a"])
    mounted = mount(rig.load())
    mounted.store.clear()
    mounted.close()
    assert rig.status()["usage"]["entries"] == 0


@pytest.mark.parametrize("at", [20, (4 << 20) - LABEL_BYTES + 20], ids=["front", "back"])
def test_a_damaged_label_copy_and_its_remedy(rig: Rig, at: int) -> None:
    good = rig.members[0].read_bytes()
    with rig.members[0].open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\xff")
    report = rig.status()
    assert not report["healthy"]
    assert [m["label"] for m in report["members"]] == ["damaged copy", "good"]
    [problem] = report["problems"]
    assert problem["member"] == str(rig.members[0])
    mount(rig.load()).close()  # it works all the same
    assert fx100("verify", rig.config).exit_code == 1
    subprocess.run(problem["do"], shell=True, check=True, capture_output=True)
    assert rig.members[0].read_bytes()[:LABEL_BYTES] == good[:LABEL_BYTES]
    assert rig.members[0].read_bytes()[-LABEL_BYTES:] == good[-LABEL_BYTES:]
    assert rig.status()["healthy"]
    assert fx100("verify", rig.config).exit_code == 0


def test_several_problems_are_all_reported(tmp_path: Path) -> None:
    rig = formatted(tmp_path / "volume", count=4)
    rig.members[0].unlink()
    os.truncate(rig.members[1], 3 << 20)
    report = rig.status()
    assert [p["member"] for p in report["problems"]] == [str(m) for m in rig.members[:2]]
    assert report["volume"] is not None  # from the members that are left
    assert report["usage"] is None
    assert report["shards"][0]["state"] == "free"


def _no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def test_no_direct_io_where_it_is_required(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.rewrite(rig.members, io={"direct": "require"})
    _no_direct_io(monkeypatch)
    report = rig.status()
    assert not report["healthy"]
    assert "direct I/O does not work here" in report["problems"][0]["what"]
    assert fx100("l2-adapter", rig.config).exit_code == 1


def test_no_direct_io_where_it_is_preferred(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.rewrite(rig.members, io={"direct": "prefer"})
    _no_direct_io(monkeypatch)
    report = rig.status()
    assert report["healthy"]
    assert {m["io_mode"] for m in report["members"]} == {"buffered"}
    assert "direct I/O does not work" in report["warnings"][0]["what"]


def test_torn_inodes_are_counted(rig: Rig) -> None:
    table = mount(rig.load())
    offset = table.volume.geometry.slot_offset(0, 0, 0)
    table.close()
    with rig.members[0].open("r+b") as stream:
        stream.seek(offset)
        stream.write(b"torn" * 100)
    assert rig.status()["usage"]["torn_inodes"] == 1
    assert "torn inodes 1" in fx100("status", rig.config).stdout


def test_inodes_that_cannot_be_true_are_shown_by_reason(rig: Rig) -> None:
    """Also by verify, which calls that damage; a server erases them when it starts."""
    mounted = mount(rig.load())
    volume, geometry = mounted.volume.uuid, mounted.volume.geometry
    assert put(mounted, "good", b"x" * 5000) == "stored"
    mounted.close()
    pieces = [(0, 1, geometry.frame_blocks, 0)]
    last = geometry.members[0].slots_per_shard - 1
    draft = InodeDraft(volume, 0, 0, last, 1, 1, 1, digest_of("bad"), 5000, pieces, META)
    with rig.members[0].open("r+b") as stream:
        stream.seek(geometry.slot_offset(0, 0, last))
        stream.write(draft.pack(geometry.inode_bytes, volume))
    assert rig.status()["usage"]["dropped_inodes"]["pieces"] == 1
    line = "dropped inodes 1 (pieces)"
    assert line in fx100("status", rig.config).stdout
    result = fx100("verify", rig.config)
    assert result.exit_code == 1
    assert line in result.stdout
    mount(rig.load()).close()
    assert rig.status()["usage"]["dropped_inodes"]["pieces"] == 0
    assert fx100("verify", rig.config).exit_code == 0


def test_an_unreadable_device_is_a_problem(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    report = rig.status()
    assert not report["healthy"]
    assert "Input/output error" in report["problems"][0]["what"]


def test_a_label_is_what_the_test_above_damages(rig: Rig) -> None:
    block = bytearray(rig.members[0].read_bytes()[:LABEL_BYTES])
    unpack_label(bytes(block))
    block[20] ^= 0xFF
    with pytest.raises(RecordError):
        unpack_label(bytes(block))
