"""Finding members by path or identity, devices that do not answer, and members that come back."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from fx100_lmcache import mount
from fx100_lmcache.config import Config, load
from fx100_lmcache.errors import ClaimError, DuplicateMemberError, MemberOpenError
from fx100_lmcache.members import device
from fx100_lmcache.members.device import DeviceMember
from fx100_lmcache.nvmf.errors import NamespaceNotFoundError, NvmeError
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.reconnect import PathWatch
from fx100_lmcache.nvmf.snapshot import Namespace
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.volume import opening as access
from fx100_lmcache.volume.format import format_members, plan_format
from fx100_lmcache.volume.opening import locate, member_paths, open_volume, silent_devices

UUIDS = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(3)]


def configured(folder: Path, members: Sequence[object], **sections: object) -> Config:
    file = folder / "fx100.yaml"
    volume = {"members": members, "object": "256KiB"}
    file.write_text(yaml.safe_dump({"volume": volume, **sections}))
    return load(file)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """Namespaces by UUID; their nodes are files."""
    nodes = {uuid: tmp_path / f"node-{number}" for number, uuid in enumerate(UUIDS[:2])}
    for node in nodes.values():
        node.touch()

    async def resolve_all(wanted: Any, sysfs: Any) -> list[Namespace | NvmeError]:
        found = {NamespaceIdentity(uuid=uuid): str(node) for uuid, node in nodes.items()}
        return [
            Namespace("nvme0n1", found[each], "259:1", each, 1 << 20, 512)
            if each in found
            else NamespaceNotFoundError(str(each), [])
            for each in wanted
        ]

    monkeypatch.setattr(access, "resolve_all", resolve_all)
    return nodes


def test_paths_and_identities_are_found_in_the_order_given(
    devices: dict[str, Path], tmp_path: Path
) -> None:
    listed = [{"nvme": {"uuid": UUIDS[1]}}, {"path": "/dev/x"}, {"nvme": {"uuid": UUIDS[0]}}]
    config = configured(tmp_path, listed)

    found = locate(config.volume.members)

    assert found == [devices[UUIDS[1]], Path("/dev/x"), devices[UUIDS[0]]]


def test_a_missing_namespace_does_not_hide_the_others(
    devices: dict[str, Path], tmp_path: Path
) -> None:
    config = configured(tmp_path, [{"nvme": {"uuid": UUIDS[2]}}, {"nvme": {"uuid": UUIDS[0]}}])

    missing, found = locate(config.volume.members)

    assert isinstance(missing, NamespaceNotFoundError)
    assert found == devices[UUIDS[0]]
    with pytest.raises(NamespaceNotFoundError, match=UUIDS[2]):
        member_paths(config)


def test_members_are_found_from_inside_an_event_loop(
    devices: dict[str, Path], tmp_path: Path
) -> None:
    """As in `lmcache server`, whose adapters are made while its loop runs."""
    config = configured(tmp_path, [{"nvme": {"uuid": UUIDS[0]}}])

    async def inside() -> list[Path]:
        return member_paths(config)

    assert asyncio.run(inside()) == [devices[UUIDS[0]]]


def test_two_identities_of_one_device_are_refused(devices: dict[str, Path], tmp_path: Path) -> None:
    devices[UUIDS[1]].unlink()
    devices[UUIDS[1]].symlink_to(devices[UUIDS[0]])
    config = configured(tmp_path, [{"nvme": {"uuid": uuid}} for uuid in UUIDS[:2]])

    with pytest.raises(DuplicateMemberError, match="the same file"):
        member_paths(config)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Make every path with `hang` in its name a device whose reads do not come back."""
    started = []

    def start_read(path: Path) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60" if "hang" in path.name else "0"]))
        return started[-1]

    monkeypatch.setattr(access, "_start_read", start_read)
    monkeypatch.setattr(Path, "is_block_device", lambda path: "file" not in path.name)
    monkeypatch.setattr(access, "ANSWER_S", 0.2)
    return started


def test_devices_that_do_not_answer_are_found_together(
    hanging: list[subprocess.Popen[bytes]],
) -> None:
    paths = [Path(f"/dev/{name}") for name in ("hang-1", "fine", "hang-2", "file")]

    assert silent_devices(paths, 0.5) == [Path("/dev/hang-1"), Path("/dev/hang-2")]

    assert len(hanging) == 3  # a file is not tried
    for read in hanging:
        assert read.wait(10) is not None  # none is left running


def test_an_interrupted_wait_leaves_no_read_behind(
    hanging: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(subprocess.Popen):
        def wait(self, timeout: Any = None) -> Any:
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    def start_read(path: Path) -> subprocess.Popen[bytes]:
        hanging.append(Interrupted(["sleep", "60"]))
        return hanging[-1]

    monkeypatch.setattr(access, "_start_read", start_read)

    with pytest.raises(KeyboardInterrupt):
        silent_devices([Path("/dev/hang-1"), Path("/dev/hang-2")], 60)

    assert [read.wait() for read in hanging] == [-9, -9]


def test_a_machine_without_dd_is_told_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "is_block_device", lambda _path: True)

    with pytest.raises(MemberOpenError, match="install dd"):
        silent_devices([Path("/dev/fine")])


@pytest.mark.parametrize("name", ["x" * 300, "m0/below-a-file"])
def test_a_path_that_cannot_be_looked_at_is_no_silent_device(tmp_path: Path, name: str) -> None:
    """Whoever opens it says why."""
    (tmp_path / "m0").touch()

    assert silent_devices([tmp_path / name]) == []


def test_a_silent_device_is_named_before_anything_is_opened(
    hanging: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    config = configured(tmp_path, [{"path": "/dev/hang-1"}])

    with pytest.raises(MemberOpenError, match="/dev/hang-1: a read did not come back"):
        open_volume(config)
    with pytest.raises(MemberOpenError, match="/dev/hang-1: a read did not come back"):
        plan_format(config)


def test_the_read_itself_ends_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "device"
    file.write_bytes(bytes(8192))

    for path in (file, tmp_path / "missing"):
        assert access._start_read(path).wait(10) is not None


# Members that come back: two files stand for two namespaces


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Any]:
    paths = [tmp_path / "member-0", tmp_path / "member-1"]
    config = configured(tmp_path, [{"path": str(path), "size": "4MiB"} for path in paths])
    for member in format_members(config, plan_format(config)).members:
        member.close()
    opened = open_volume(config)
    yield config, opened, paths
    for member in opened.members:
        member.close()


class Gone(MemoryMember):
    """What an open descriptor becomes when its device is gone."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return 0


@pytest.fixture
def opened_paths(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    seen = []
    real = device.open_member

    def open_member(path: Path, **options: Any) -> DeviceMember:
        seen.append(path)
        return real(path, **options)

    monkeypatch.setattr(mount, "open_member", open_member)
    return seen


def reappear(path: Path) -> None:
    """Make the same contents another device under the same path."""
    contents = path.read_bytes()
    path.unlink()
    path.write_bytes(contents)


def test_a_probe_does_not_touch_members_in_use(volume: Any, opened_paths: list[Path]) -> None:
    """Another member may hang, and the probe with it."""
    config, opened, paths = volume
    probe = mount._Probe(config, opened, exclusive=False)
    gone = Gone(4 << 20)

    assert probe(0, gone) is None  # its device is what was there before: nothing to open
    assert opened_paths == []

    reappear(paths[0])
    found = probe(0, gone)
    assert opened_paths == [paths[0]]
    assert found.name == str(paths[0])
    assert probe(0, gone) is None  # the new one is in use now
    found.close()


def test_a_probe_has_lost_paths_looked_for_and_does_not_wait(volume: Any) -> None:
    config, opened, _ = volume
    asked = []
    watch = PathWatch(lambda: None, 600)  # never started: nobody would answer
    watch.look_now = lambda: asked.append("look")
    probe = mount._Probe(config, opened, exclusive=False)
    probe.paths = watch

    assert probe(0, opened.members[0]) is opened.members[0]
    assert asked == []
    assert probe(0, Gone(4 << 20)) is None
    assert asked == ["look"]


def test_a_store_that_closes_stops_looking_for_lost_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "reconnect_obstacles", lambda _nvme: [])
    subsystem = {"subsystem_nqn": "nqn.x", "addresses": [{"traddr": "192.0.2.1"}]}
    config = configured(
        tmp_path,
        [{"path": str(tmp_path / "member-0"), "size": "4MiB"}],
        nvme={"subsystems": [subsystem]},
    )
    for member in format_members(config, plan_format(config)).members:
        member.close()

    mounted = mount.mount(config)
    assert mounted.paths._thread.is_alive()
    assert mounted.close() == 0
    assert not mounted.paths._thread.is_alive()


def test_a_member_that_cannot_be_adopted_is_closed_and_told_once(
    volume: Any,
    opened_paths: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, opened, paths = volume
    made = []

    class Store:
        def adopt_member(self, member: DeviceMember) -> bool:
            made.append(member)
            raise OSError(5, "Input/output error")

    probe = mount._Probe(config, opened, exclusive=False)
    probe.store = cast(Any, Store())
    reappear(paths[0])

    for _ in range(3):
        assert probe(0, Gone(4 << 20)) is None

    assert [member.fileno() for member in made] == [None] * 3
    assert caplog.text.count("member 0 is not back yet") == 1


def test_a_member_that_came_back_is_safe_from_a_format(volume: Any) -> None:
    config, opened, paths = volume
    reappear(paths[0])
    found = mount._Probe(config, opened, exclusive=False)(0, Gone(4 << 20))

    with pytest.raises(ClaimError, match="in use"):
        plan_format(config)
    found.close()
