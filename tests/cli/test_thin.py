"""Sparse files and thin devices, and volumes whose objects are smaller than planned."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fx100_lmcache.admin.inspect import inspect
from fx100_lmcache.doctor.volume import check_volume
from fx100_lmcache.findings import Severity
from fx100_lmcache.members import allocation
from fx100_lmcache.members.allocation import UNKNOWN, Allocation
from fx100_lmcache.members.device import open_member
from fx100_lmcache.mount import mount
from fx100_lmcache.testing.harness import value_of
from support.cli import MIB, Rig, fill, formatted, fx100, get, planned, put, write_config


def sparse(directory: Path, size_bytes: int = 4 * MIB) -> Rig:
    """Write the configuration of two files that are there, and hold nothing."""
    rig = planned(directory)
    for member in rig.members:
        member.touch()
        os.truncate(member, size_bytes)
    return rig


def words(text: str) -> str:
    return " ".join(text.replace("│", "").split())


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_format_says_that_a_member_is_sparse(tmp_path: Path) -> None:
    rig = sparse(tmp_path / "volume")
    shown = words(fx100("format", rig.config, answer="n").output)
    for member in rig.members:
        assert f"{member} is sparse (0 B allocated)" in shown
    assert "--allocate" in shown
    result = json.loads(fx100("format", rig.config, "--yes", "--json").stdout)
    assert [m["thin"] for m in result["members"]] == [True, True]
    assert all(m["allocated_bytes"] < 256 * 1024 for m in result["members"])


def test_status_and_doctor_say_that_a_member_is_sparse(tmp_path: Path) -> None:
    rig = sparse(tmp_path / "volume")
    assert fx100("format", rig.config, "--yes").exit_code == 0
    report = rig.status()
    assert report["healthy"]
    assert [w["member"] for w in report["warnings"]] == [str(m) for m in rig.members]
    for warning, member in zip(report["warnings"], report["members"], strict=True):
        assert f"sparse, {member['allocated_bytes']} of its 4194304 bytes" in warning["what"]
        assert f"fx100 format --allocate {rig.config}" in warning["do"]
    assert sum("sparse" in finding.what for finding in check_volume(inspect(rig.config))) == 2


def test_allocate_writes_every_block_of_what_is_there(tmp_path: Path) -> None:
    rig = sparse(tmp_path / "volume")
    result = fx100("format", rig.config, "--yes", "--allocate")
    assert result.exit_code == 0, result.output
    assert "zeros are written over all of it" in words(result.stdout)
    assert "warning" not in result.stdout
    assert [allocated(member) >= 4 * MIB for member in rig.members] == [True, True]
    assert rig.status()["warnings"] == []
    fill(rig, ["a", "b"])
    mounted = mount(rig.load())
    assert get(mounted, "a", 200_000) == value_of("a", 1, 200_000)
    mounted.close()


def test_allocate_leaves_nothing_of_what_was_there(tmp_path: Path) -> None:
    rig = formatted(tmp_path / "volume")
    fill(rig, ["a"])
    assert fx100("format", rig.config, "--yes", "--allocate").exit_code == 0
    geometry = mount(rig.load())
    start = geometry.volume.geometry.block_offset(0, 0)
    geometry.close()
    for member in rig.members:
        assert not any(member.read_bytes()[start : 4 * MIB - 4096])


def test_new_files_are_written_through_without_being_asked(tmp_path: Path) -> None:
    rig = formatted(tmp_path / "volume")
    assert [allocated(member) >= 4 * MIB for member in rig.members] == [True, True]
    assert rig.status()["warnings"] == []


def test_allocate_without_room_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What both lack together counts, and not what they have already."""
    rig = sparse(tmp_path / "volume")
    before = rig.contents()
    room = [8 * MIB - 4096]

    class Stat:
        f_frsize = 1
        f_bavail = property(lambda _: room[0])

    monkeypatch.setattr(os, "statvfs", lambda _: Stat())
    refused = fx100("format", rig.config, "--yes", "--allocate")
    assert refused.exit_code == 1
    assert f"has {8 * MIB - 4096} bytes free, the members need {8 * MIB}" in words(refused.stderr)
    assert rig.contents() == before
    assert [allocated(member) for member in rig.members] == [0, 0]
    assert fx100("format", rig.config, "--yes").exit_code == 0  # as far as it is not asked for
    room[0] = 8 * MIB
    assert fx100("format", rig.config, "--yes", "--allocate").exit_code == 0
    room[0] = 0
    assert fx100("format", rig.config, "--yes", "--allocate").exit_code == 0


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_found_out_while_writing_leaves_no_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    rig = sparse(tmp_path / "volume", 12 * MIB)
    real, left = os.pwrite, [3]

    def short(fd: int, data: memoryview, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(refusal, os.strerror(refusal))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", short)
    refused = fx100("format", rig.config, "--yes", "--allocate")
    assert refused.exit_code == 1
    assert os.strerror(refusal) in words(refused.stderr)
    assert f"after 0 of {12 * MIB} bytes" in words(refused.stderr)
    assert not any(any(content or b"") for content in rig.contents().values())


def test_allocate_on_a_block_device(tmp_path: Path, loop_device: Callable[..., Path]) -> None:
    device = loop_device("backing", 8 * MIB)
    os.truncate(tmp_path / "backing", 0)  # as sparse as can be
    os.truncate(tmp_path / "backing", 8 * MIB)
    config = tmp_path / "fx100.yaml"
    write_config(config, [device])
    rig = Rig(config, [device])
    assert fx100("format", config, "--yes").exit_code == 0
    [warning] = rig.status()["warnings"]
    assert "sparse" in warning["what"]
    result = fx100("format", config, "--yes", "--allocate")
    assert result.exit_code == 0, result.output
    assert allocated(tmp_path / "backing") >= 8 * MIB
    assert rig.status()["warnings"] == []


def a_disk(sysfs: Path, **files: str) -> Path:
    for name, text in files.items():
        path = sysfs / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return sysfs


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, UNKNOWN),
        ({"nuse": "512", "queue__logical_block_size": "4096"}, Allocation(2 * MIB, thin=False)),
        ({"nuse": "99999999", "queue__logical_block_size": "512"}, Allocation(8 * MIB, thin=False)),
        ({"nuse": "rubbish", "queue__logical_block_size": "512"}, Allocation(None, thin=False)),
        ({"device__scsi_disk__0:0:0:0__thin_provisioning": "1"}, Allocation(None, thin=True)),
        ({"device__scsi_disk__0:0:0:0__thin_provisioning": "0"}, Allocation(None, thin=False)),
        ({"loop__backing_file": "/not/there"}, UNKNOWN),
    ],
)
def test_what_sysfs_says_of_devices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    expected: Allocation,
) -> None:
    device = a_disk(tmp_path / "dev" / "block" / "259:3", **files)
    device.mkdir(parents=True, exist_ok=True)
    path = tmp_path / "member"
    path.write_bytes(bytes(8 * MIB))
    member = open_member(path)
    found = os.stat_result((0o060600, 0, 0, 1, 0, 0, 0, 0, 0, 0), {"st_rdev": os.makedev(259, 3)})
    monkeypatch.setattr(os, "fstat", lambda _: found)
    assert allocation.allocation_of(member, tmp_path) == expected
    member.close()
    assert allocation.allocation_of(member) == UNKNOWN


def test_status_says_when_inodes_are_the_limit(tmp_path: Path) -> None:
    rig = formatted(tmp_path / "volume", volume={"object": "1MiB", "bytes_per_inode": "256KiB"})
    mounted = mount(rig.load())
    slots = mounted.volume.geometry.rows
    assert slots == 30
    for number in range(20):
        assert put(mounted, str(number), value_of("x", number, 5_000)) == "stored"
    status = mounted.store.status()
    assert status["limit"] == "inodes"
    assert status["inodes"] == {"total": 30, "free": 10, "used": 20, "withheld": 0}
    mounted.close()
    report = rig.status()
    usage = report["usage"]
    assert (usage["limit"], usage["used_share"]) == ("inodes", pytest.approx(20 / 30, abs=1e-3))
    [warning] = report["warnings"]
    free = usage["free_bytes"] / usage["capacity_bytes"]
    assert f"inodes are the limit: 20 of 30 used while {free:.0%} of the space" in warning["what"]
    assert "objects have 5,000 bytes on average" in warning["why"]
    assert "volume.bytes_per_inode: 32768" in warning["do"]
    shown = words(fx100("status", rig.config).stdout)
    assert "entries 20 of at most 30 inodes (66.7%)" in shown
    assert "inodes are the limit" in shown
    found = [f for f in check_volume(inspect(rig.config)) if "inodes are the limit" in f.what]
    assert [finding.severity for finding in found] == [Severity.WARNING]


def test_few_objects_are_no_warning(tmp_path: Path) -> None:
    rig = formatted(tmp_path / "volume", volume={"object": "1MiB", "bytes_per_inode": "256KiB"})
    fill(rig, [str(n) for n in range(14)], length=100)
    report = rig.status()
    assert report["usage"]["limit"] == "inodes"
    assert report["warnings"] == []


def test_the_plan_says_how_many_objects_there_can_be(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume", size="64MiB", volume={"object": 8126464})
    shown = words(fx100("format", rig.config, answer="n").output)
    assert "1,056 (the most objects there can be), one for " in shown
    assert ": 0.8% of the space" in shown
