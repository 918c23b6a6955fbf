"""Formatting what must not be: a readable refusal, and not one byte written."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from fx100_lmcache import errors
from fx100_lmcache.config import ConfigError
from fx100_lmcache.members.base import Member
from fx100_lmcache.mount import mount
from fx100_lmcache.ondisk.geometry import plan_geometry
from fx100_lmcache.testing.harness import value_of
from fx100_lmcache.testing.memory import memory_members
from fx100_lmcache.volume.format import format_members, format_volume, plan_format
from fx100_lmcache.volume.volume import assemble
from support.cli import MIB, Rig, fill, formatted, fx100, get, planned
from support.situations import (
    SITUATIONS,
    a_directory,
    a_pipe,
    both_labels_damaged,
    doubled_by_hard_link,
    interrupted,
    not_formatted,
    of_a_newer_format,
    of_another_volume,
    overwrite,
    truncated,
)


def refused(rig: Rig, words: str, *options: str) -> None:
    """Expect a readable refusal that leaves every byte as it was."""
    before = rig.contents()
    result = fx100("format", rig.config, "--yes", *options)
    assert result.exit_code == 1, result.output
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert rig.contents() == before


FOREIGN = {
    "an ext2/3/4 file system": (0x438, b"\x53\xef"),
    "an XFS file system": (0, b"XFSB"),
    "a btrfs file system": (0x10040, b"_BHRfS_M"),
    "a GPT partition table": (512, b"EFI PART"),
    "an LVM physical volume": (512, b"LABELONE"),
    "a Linux md member": (0x1000, b"\xfc\x4e\x2b\xa9"),
    "a LUKS container": (0, b"LUKS\xba\xbe"),
    "swap space": (4086, b"SWAPSPACE2"),
    "an MBR partition table": (510, b"\x55\xaa"),
    "data of an unknown kind": (4 * MIB - 512, b"EFI PART"),  # the backup GPT, at the end
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_data_is_refused(tmp_path: Path, what: str) -> None:
    at, mark = FOREIGN[what]
    rig = planned(tmp_path / "volume", count=3)
    rig.members[1].write_bytes(bytes(4 * MIB))
    overwrite(rig.members[1], at, mark)
    refused(rig, f"{rig.members[1]} holds {what}")
    assert not rig.members[0].exists()
    forced = fx100("format", rig.config, "--yes", "--force")
    assert forced.exit_code == 0
    assert what in " ".join(forced.stdout.replace("│", "").split())
    assert rig.status()["healthy"]


@pytest.mark.parametrize("make", ["mkfs.ext4 -q -F", "mkfs.xfs -q -f", "mkswap"])
def test_what_real_tools_write_is_refused(tmp_path: Path, make: str) -> None:
    command = make.split()
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    rig = planned(tmp_path / "volume", count=1, size="320MiB")
    with rig.members[0].open("wb") as stream:
        stream.truncate(320 * MIB)
    subprocess.run([*command, str(rig.members[0])], check=True, capture_output=True)
    refused(rig, f"{rig.members[0]} holds ")


def test_a_newer_format_is_not_overwritten_unasked(rig: Rig) -> None:
    of_a_newer_format(rig)
    refused(rig, "holds a volume of a newer format")
    assert fx100("format", rig.config, "--yes", "--force").exit_code == 0


def test_not_enough_space_on_the_file_system(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume", size="1000TiB")
    refused(rig, "nothing was created")
    assert not any(member.exists() for member in rig.members)


def test_too_small_for_one_frame(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume", size="1MiB", volume={"object": "64MiB"})
    refused(rig, f"{rig.members[0]} has 1048576 bytes")
    assert not rig.members[0].exists()


def test_an_empty_file(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume")
    rig.members[1].touch()
    refused(rig, f"{rig.members[1]} has 0 bytes")


def test_a_missing_member_without_size(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume")
    rig.rewrite(rig.members)
    refused(rig, "does not exist do: correct `volume.members`, or give the member a `size`")


def test_no_file_is_created_among_devices(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume")
    rig.rewrite([{"path": "/dev/nvme98n7", "size": "4MiB"}])
    refused(rig, "no file is created in /dev")


@pytest.mark.parametrize("situation", [a_directory, a_pipe, doubled_by_hard_link])
def test_format_refuses(rig: Rig, situation: Callable[[Rig], None]) -> None:
    situation(rig)
    refused(rig, SITUATIONS[situation][1], "--force")


def test_a_symbolic_link_to_a_member_is_found_by_the_configuration(rig: Rig) -> None:
    link = rig.members[0].with_name("link")
    link.symlink_to(rig.members[0])
    rig.rewrite([rig.members[0], link])
    with pytest.raises(ConfigError, match="is the same as"):
        rig.load()
    refused(rig, "is the same as volume.members[0]")


@pytest.mark.parametrize(
    "situation",
    [interrupted, both_labels_damaged, truncated, not_formatted, of_another_volume],
    ids=lambda s: s.__name__,
)
def test_what_is_ours_can_be_formatted_again(rig: Rig, situation: Callable[[Rig], None]) -> None:
    fill(rig, ["a"])
    situation(rig)
    assert fx100("format", rig.config, "--yes").exit_code == 0
    report = rig.status()
    assert report["healthy"]
    assert report["usage"]["entries"] == 0


def test_a_format_can_be_repeated_wherever_it_was_cut() -> None:
    class CutError(Exception):
        pass

    class Cutting:
        """Passes on so many writes, then loses power."""

        def __init__(self, member: Member, left: list[int]) -> None:
            self._member, self._left = member, left

        def __getattr__(self, name: str) -> object:
            return getattr(self._member, name)

        def write_from(self, offset: int, buffer: memoryview) -> int:
            if not self._left[0]:
                raise CutError
            self._left[0] -= 1
            return self._member.write_from(offset, buffer)

    from fx100_lmcache.volume.format import contents_of

    cuts = 0
    while True:
        members = memory_members(2, 4 * MIB)
        geometry = plan_geometry([4 * MIB] * 2, object_bytes=256 * 1024, io_align_bytes=512)
        old = format_volume(members, geometry, unix_s=1)
        table = geometry.table_offset
        for member in members:  # inodes and data of the old volume, within the first MiB
            member.media[table : table + MIB] = b"x" * MIB
        try:
            left = [cuts]
            format_volume([cast(Member, Cutting(m, left)) for m in members], geometry, unix_s=2)
            break
        except CutError:
            cuts += 1
        assert all(contents_of(member).kind == "volume" for member in members)
        with contextlib.suppress(errors.InterruptedFormatError, errors.WrongVolumeError):
            assert assemble(members).label == old.label  # else whole
    assert cuts == 6


def test_a_format_that_fails_leaves_no_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = planned(tmp_path / "volume")
    config = rig.load()
    plan = plan_format(config)

    def interrupt(_: int) -> None:
        if rig.members[1].exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        format_members(config, plan, progress=interrupt)
    assert not any(member.exists() for member in rig.members)


def test_foreign_data_that_came_after_the_plan_is_refused(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume")
    rig.members[1].write_bytes(bytes(4 * MIB))
    config = rig.load()
    plan = plan_format(config)
    overwrite(rig.members[1], 0, b"XFSB")
    before = rig.contents()
    with pytest.raises(errors.ForeignDataError, match="XFS"):
        format_members(config, plan)
    assert rig.contents() == before
    assert not rig.members[0].exists()


# ----- logical blocks of 4,096 bytes


def test_large_logical_blocks(tmp_path: Path, loop_device: Callable[..., Path]) -> None:
    rig = planned(tmp_path / "volume")
    rig.rewrite([loop_device("a"), loop_device("b")], io={"direct": "require"})
    assert fx100("format", rig.config, "--yes").exit_code == 0
    fill(rig, [f"k{n}" for n in range(5)], length=100_001)
    report = rig.status()
    assert report["healthy"], report["problems"]
    assert {m["logical_block_bytes"] for m in report["members"]} == {4096}
    assert fx100("verify", rig.config).exit_code == 0
    mounted = mount(rig.load())
    assert get(mounted, "k3", 100_001) == value_of("k3", 1, 100_001)
    mounted.close()


def test_unequal_logical_blocks(tmp_path: Path, loop_device: Callable[..., Path]) -> None:
    rig = planned(tmp_path / "volume")
    rig.rewrite([loop_device("a", sector=512), loop_device("b", 6 * MIB, sector=4096)])
    assert fx100("format", rig.config, "--yes").exit_code == 0
    fill(rig, ["a", "b"], length=100_001)
    assert fx100("verify", rig.config).exit_code == 0


def test_formatted_for_smaller_logical_blocks(
    tmp_path: Path, loop_device: Callable[..., Path]
) -> None:
    rig = formatted(tmp_path / "volume")
    moved = []
    for member in rig.members:
        device = loop_device(f"{member.name}-moved")
        device.write_bytes(member.read_bytes())
        moved.append(device)
    rig.rewrite(moved)
    with pytest.raises(errors.SectorSizeError, match="logical blocks of 4096 bytes"):
        mount(rig.load())
    status = rig.status()
    assert not status["healthy"]
    assert "logical blocks of 4096" in status["problems"][0]["what"]


def test_a_device_with_two_names_is_found(tmp_path: Path, loop_device: Callable[..., Path]) -> None:
    device = loop_device("a")
    twin = tmp_path / "twin"
    os.mknod(twin, 0o600 | 0o060000, device.stat().st_rdev)
    rig = planned(tmp_path / "volume")
    rig.rewrite([device, twin])
    result = fx100("format", rig.config, "--yes")
    assert result.exit_code == 1
    assert "are the same device" in result.stderr
