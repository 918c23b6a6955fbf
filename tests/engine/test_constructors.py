"""Constructors that fail at any request for a thread, descriptor, map, lock or pool."""

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fx100_lmcache import config as settings
from fx100_lmcache import mount as mount_module
from fx100_lmcache.engine.defects import Defects
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.engine.native_lane import NativeReaper, native_available
from fx100_lmcache.errors import FX100Error
from fx100_lmcache.mount import mount
from fx100_lmcache.nvmf.reconnect import PathWatch
from fx100_lmcache.store import store as store_module
from fx100_lmcache.testing.lacking import RESOURCES, Footprint, each_lack, lacking
from fx100_lmcache.testing.volumes import file_volume
from fx100_lmcache.volume.claim import newest_claim, read_claims
from fx100_lmcache.volume.volume import read_label
from support.claims import machine
from support.engine import file_member

REFUSALS = (FX100Error, OSError, RuntimeError, MemoryError)
SMALL = EngineOptions(reader_threads=2, writer_threads=1)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep no log records: their exceptions hold what their frames held."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-members-") as made:
        yield Path(made)


def attempt(construct: Callable[[], Callable[[], object]]) -> Callable[[], None]:
    """Construct something and close it; whether it may raise is up to the constructor."""

    def run() -> None:
        try:
            close = construct()
        except REFUSALS:
            return
        close()

    return run


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("what", RESOURCES)
def test_an_engine_that_cannot_be_made_leaves_nothing(
    folder: Path, native: bool, what: str
) -> None:
    members = [file_member(folder / f"m{n}", 1 << 20) for n in range(2)]
    options = EngineOptions(reader_threads=2, writer_threads=1, native=native)

    def construct() -> Callable[[], object]:
        engine = LaneEngine(members, options)
        return lambda: engine.close(1.0)

    failed = list(each_lack(what, attempt(construct)))
    native = native and native_available()
    python_lanes, ours = (3 if native else 6) * 2, 3  # for deadlines and probes
    expected = {"threads": python_lanes + ours + native, "pools": 4 * native, "descriptors": native}
    assert len(failed) == expected.get(what, 0)
    for member in members:
        member.close()


@pytest.mark.parametrize("what", RESOURCES)
def test_a_reaper_or_a_watch_that_cannot_be_made_leaves_nothing(what: str) -> None:
    def reaper() -> Callable[[], object]:
        made = NativeReaper(Defects())
        return made.close

    def watch() -> Callable[[], object]:
        made = PathWatch(lambda: None, 60.0)
        made.start()
        return made.stop

    for construct in (reaper, watch):
        list(each_lack(what, attempt(construct)))


def small_volume(folder: Path, engine: str = "auto") -> Path:
    return file_volume(
        folder,
        members=2,
        size="2MiB",
        volume={"object": 65536, "shards": 2},
        io={"engine": engine, "reader_threads": 2, "writer_threads": 1},
        deadlines={"probe_interval": "60s"},
    )


def nobody_claims(config: Path) -> bool:
    loaded = settings.load(config)
    volume = mount_module.open_volume(loaded, read_only=True)
    try:
        for member in volume.members:
            label, _ = read_label(member)
            for shard in range(label.geometry.shards):
                blocks = read_claims([member], label.geometry, shard)
                claim = newest_claim(blocks, label.volume.bytes, shard)
                if claim is not None and claim.holder:
                    return False
        return True
    finally:
        for member in volume.members:
            member.close()


@pytest.mark.parametrize("engine", ["auto", "python"])
@pytest.mark.parametrize("what", RESOURCES)
def test_a_mount_that_fails_leaves_nothing(
    folder: Path, engine: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_volume(folder, engine)
    config = settings.load(path)
    # what a mount that failed has not confirmed is watched: with few looks, and in no time
    timing = config.claim.model_copy(update={"heartbeat_s": 0.1, "watch_s": 0.4})
    config = config.model_copy(update={"claim": timing})
    monkeypatch.setattr(store_module, "this_machine", machine)
    files = [member.path for member in config.volume.members if member.path is not None]

    def watch_paths(*_: object) -> PathWatch:
        watch = PathWatch(lambda: None, 60.0)
        watch.start()
        return watch

    monkeypatch.setattr(mount_module, "watch_paths", watch_paths)

    def construct() -> Callable[[], object]:
        return mount(config).close

    failed = list(each_lack(what, attempt(construct), *files))
    assert failed or what == "pools"
    assert nobody_claims(path)
    mount(config).close()


@pytest.mark.parametrize("what", RESOURCES)
def test_a_member_that_returns_at_a_bad_moment_is_tried_again(folder: Path, what: str) -> None:
    """It is opened anew, locked, claimed and given lanes: any of that may fail, once or twice."""
    path = small_volume(folder)
    mounted = mount(settings.load(path))
    files = [Path(member.name) for member in mounted.volume.members]
    failures = 0
    for number in range(60):
        mounted.engine.member(0).close()  # as if its device had gone
        for slot in mounted.engine._slots:
            slot.health.note_probe(works=slot.index != 0)
        before = Footprint.now(*files)
        reached = False
        for _ in range(2):
            with lacking(what, number) as failed, contextlib.suppress(*REFUSALS):
                mounted.engine.probe(0)
            reached |= bool(failed)
        if mounted.engine.down_mask():
            failures += 1
            assert not before.left_by(*files)
        mounted.engine.probe(0)
        assert mounted.engine.down_mask() == 0, f"request {number} for {what}"
        if not reached:
            break
    assert failures or what == "pools"
    assert mounted.close() == 0
    assert nobody_claims(path)


def test_a_store_that_cannot_have_all_shards_keeps_none(folder: Path) -> None:
    path = small_volume(folder)
    config = settings.load(path)
    second = mount(config, shards=[1])
    with pytest.raises(FX100Error, match="shard 1 is in use"):
        mount(config, shards=[0, 1])
    first = mount(config, shards=[0])
    first.close()
    second.close()
    assert nobody_claims(path)


@pytest.mark.parametrize(
    ("limit", "amounts"), [("NOFILE", [1, 2, 3]), ("NPROC", [1, 3, 10]), ("AS", [8, 40, 120, 400])]
)
def test_a_mount_under_a_real_limit_leaves_nothing(
    folder: Path, limit: str, amounts: list[int]
) -> None:
    """Descriptors, threads, and MiB of address space beyond what the process has."""
    path = small_volume(folder)
    if limit == "NPROC":
        if os.geteuid() != 0:
            pytest.skip("only root can become a user without other processes")
        folder.chmod(0o777)
        for file in folder.iterdir():
            file.chmod(0o666)
    found = subprocess.run(
        [sys.executable, "-m", "support.limited_child", path, limit, *map(str, amounts)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    outcomes = found.stdout.splitlines()
    assert len(outcomes) == len(amounts)
    assert set(outcomes) <= {"refused, nothing left", "mounted, nothing left"}
    assert "refused, nothing left" in outcomes
