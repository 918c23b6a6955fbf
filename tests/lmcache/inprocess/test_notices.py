"""Notices of failed loads, between the ranks of one engine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.lmcache.inprocess import registry as inprocess_registry
from fx100_lmcache.lmcache.inprocess.notices import (
    LIMIT_BYTES,
    NAMES,
    NOTICE_BYTES,
    Notices,
    open_notices,
)
from support.inprocess import descriptors, key, keys, metadata, plugin_on, put, write_config

OTHER_PROCESS = """
import os, signal, sys
from pathlib import Path
from fx100_lmcache.lmcache.inprocess.notices import Notices
notices = Notices(Path(sys.argv[1]))
notices.publish(["from another process"])
print("told", flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> Any:
    return tmp_path / "notices"


def test_every_rank_hears_of_what_one_tells(path: Any) -> None:
    ranks = [Notices(path) for _ in range(3)]
    assert not any(rank.names(["a", "b"]) for rank in ranks)
    ranks[1].publish(["a", "x"])
    assert all(rank.names(["b", "a"]) for rank in ranks)
    assert not any(rank.names(["b", "c"]) for rank in ranks)
    ranks[2].publish(["b"])
    assert all(rank.names(["b"]) for rank in ranks)
    assert not any(rank.names([]) for rank in ranks)
    for rank in ranks:
        rank.close()


def test_the_last_one_removes_the_file(path: Any) -> None:
    first, second = Notices(path), Notices(path)
    first.publish(["a"])
    first.close()
    first.close()
    assert path.exists()
    assert second.names(["a"])
    second.close()
    assert not path.exists()


def test_nothing_is_said_or_heard_after_close(path: Any) -> None:
    notices = Notices(path)
    notices.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        notices.publish(["a"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        notices.names(["a"])


def test_the_file_stays_small_and_the_newest_notices_are_in_it(path: Any) -> None:
    one, other = Notices(path), Notices(path)
    for number in range(3 * LIMIT_BYTES // NOTICE_BYTES):
        one.publish([f"request-{number}"])
        assert path.stat().st_size <= LIMIT_BYTES
        if number % 1000 == 0:
            assert other.names([f"request-{number}"])
    assert other.names([f"request-{number}"])
    one.close()
    other.close()


def test_processes_share_and_what_a_killed_engine_left_is_forgotten(path: Any) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "told\n"
        notices = Notices(path)
        assert notices.names(["from another process"])
        notices.close()
        child.communicate("end")
    assert path.exists()
    notices = Notices(path)
    assert not notices.names(["from another process"])
    notices.close()
    assert not path.exists()


def test_a_file_that_is_unlinked_meanwhile_is_made_again(
    path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Notices._is_named
    unlinked: list[bool] = []

    def unlink_once(self: Notices) -> bool:
        if not unlinked:
            path.unlink()
            unlinked.append(True)
        return original(self)

    monkeypatch.setattr(Notices, "_is_named", unlink_once)
    before = descriptors()
    one = Notices(path)
    other = Notices(path)
    one.publish(["a"])
    assert other.names(["a"])
    one.close()
    other.close()
    assert descriptors() == before


# ----- what others have left


VICTIM = "what somebody else wrote"
OPEN = Path("/proc/self/fd")


def symbolic_link(path: Any, victim: Any) -> None:
    path.symlink_to(victim)


def dangling_link(path: Any, victim: Any) -> None:
    path.symlink_to(victim.with_name("nothing"))


def hard_link(path: Any, victim: Any) -> None:
    path.hardlink_to(victim)


def pipe(path: Any, _: Any) -> None:
    os.mkfifo(path)


def directory(path: Any, _: Any) -> None:
    path.mkdir()


def file_that_all_may_write(path: Any, _: Any) -> None:
    path.touch()
    path.chmod(0o666)


def file_of_somebody_else(path: Any, _: Any) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give a file away")
    path.touch(0o600)
    os.chown(path, 12345, 12345)


LEAVINGS = [
    symbolic_link,
    dangling_link,
    hard_link,
    pipe,
    directory,
    file_that_all_may_write,
    file_of_somebody_else,
]


@pytest.fixture
def victim(tmp_path: Path) -> Any:
    victim = tmp_path / "victim"
    victim.write_text(VICTIM)
    victim.chmod(0o600)
    return victim


@pytest.mark.parametrize("leave", LEAVINGS)
def test_what_is_not_ours_alone_is_neither_read_nor_written(
    path: Any, victim: Any, leave: Any
) -> None:
    leave(path, victim)
    before = set(OPEN.iterdir())
    with pytest.raises(OSError, match=str(path)):
        Notices(path)
    assert set(OPEN.iterdir()) == before
    assert victim.read_text() == VICTIM
    assert not victim.with_name("nothing").exists()


@pytest.mark.parametrize("leave", LEAVINGS)
def test_all_ranks_take_the_next_name_and_say_so_once(
    tmp_path: Path, victim: Any, leave: Any, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path / "n", victim)
    leave(tmp_path / "n.1", victim)
    ranks = [open_notices(tmp_path, "n") for _ in range(2)]
    assert [len(caplog.records), caplog.text.count("n.2")] == [2, 2], "one line for each process"
    ranks[0].publish(["a"])
    assert ranks[1].names(["a"])
    for rank in ranks:
        rank.close()
    assert victim.read_text() == VICTIM
    assert sorted(p.name for p in tmp_path.iterdir()) == ["n", "n.1", "victim"]


def test_a_plugin_opens_whatever_others_have_left(
    tmp_path: Path, victim: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr(inprocess_registry, "FOLDER", folder)
    path, told = write_config(tmp_path / "v", shards=2), metadata(world_size=2)
    with plugin_on(path, told) as plugin:
        [name] = [found.name for found in folder.iterdir()]
    (folder / name).symlink_to(victim)
    with plugin_on(path, told) as plugin:
        notices = plugin._opened.notices
        assert notices is not None
        notices.publish(["a"])
        assert notices.names(["a"])
    for number in range(1, NAMES):
        (folder / f"{name}.{number}").symlink_to(victim)
    caplog.clear()
    with plugin_on(path, told) as plugin:
        assert plugin._opened.notices is None
        put(plugin, keys(1, like=told))
        assert plugin.contains(key(0, like=told))
    assert caplog.text.count("ranks cannot tell each other of failed loads") == 1
    assert victim.read_text() == VICTIM


def test_a_notice_for_which_there_is_no_room_spoils_no_other(
    path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Notices(path), Notices(path)
    one.publish(["a"])
    with monkeypatch.context() as patch:
        write = os.write
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        with pytest.raises(OSError, match="no memory for a notice"):
            one.publish(["b"])
    one.publish(["c"])
    assert other.names(["c"])
    one.close()
    other.close()
