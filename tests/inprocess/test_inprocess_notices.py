"""Notices of failed loads, between the ranks of one engine."""

import subprocess
import sys

import pytest
from inprocess_rig import descriptors

from fx100_lmcache.lmcache.inprocess_notices import LIMIT_BYTES, NOTICE_BYTES, Notices

OTHER_PROCESS = """
import os, signal, sys
from pathlib import Path
from fx100_lmcache.lmcache.inprocess_notices import Notices
notices = Notices(Path(sys.argv[1]))
notices.tell(["from another process"])
print("told", flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "notices"


def test_every_rank_hears_of_what_one_tells(path):
    ranks = [Notices(path) for _ in range(3)]
    assert not any(rank.names(["a", "b"]) for rank in ranks)
    ranks[1].tell(["a", "x"])
    assert all(rank.names(["b", "a"]) for rank in ranks)
    assert not any(rank.names(["b", "c"]) for rank in ranks)
    ranks[2].tell(["b"])
    assert all(rank.names(["b"]) for rank in ranks)
    assert not any(rank.names([]) for rank in ranks)
    for rank in ranks:
        rank.close()


def test_the_last_one_removes_the_file(path):
    first, second = Notices(path), Notices(path)
    first.tell(["a"])
    first.close()
    first.close()
    assert path.exists()
    assert second.names(["a"])
    second.close()
    assert not path.exists()


def test_nothing_is_said_or_heard_after_close(path):
    notices = Notices(path)
    notices.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        notices.tell(["a"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        notices.names(["a"])


def test_the_file_stays_small_and_the_newest_notices_are_in_it(path):
    one, other = Notices(path), Notices(path)
    for number in range(3 * LIMIT_BYTES // NOTICE_BYTES):
        one.tell([f"request-{number}"])
        assert path.stat().st_size <= LIMIT_BYTES
        if number % 1000 == 0:
            assert other.names([f"request-{number}"])
    assert other.names([f"request-{number}"])
    one.close()
    other.close()


def test_processes_share_and_what_a_killed_engine_left_is_forgotten(path):
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


def test_a_file_that_is_unlinked_meanwhile_is_made_again(path, monkeypatch):
    original = Notices._is_named
    unlinked = []

    def unlink_once(self):
        if not unlinked:
            unlinked.append(path.unlink())
        return original(self)

    monkeypatch.setattr(Notices, "_is_named", unlink_once)
    before = descriptors()
    one = Notices(path)
    other = Notices(path)
    one.tell(["a"])
    assert other.names(["a"])
    one.close()
    other.close()
    assert descriptors() == before


def test_links_are_not_followed(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("content")
    path.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        Notices(path)
    assert victim.read_text() == "content"
