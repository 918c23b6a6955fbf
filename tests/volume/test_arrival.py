"""Members that are late: waited for with a limit, and connected meanwhile where that is wanted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fx100_lmcache.config import Config, load
from fx100_lmcache.nvmf.errors import (
    AmbiguousNamespaceError,
    IdentityError,
    NamespaceNotFoundError,
    NvmeError,
    StaleNodeError,
)
from fx100_lmcache.volume import arrival
from fx100_lmcache.volume.arrival import missing_members, wait_for_members
from fx100_lmcache.volume.opening import open_volume

UUID = "00000000-0000-4000-8000-000000000001"
SUBSYSTEM = {"subsystem_nqn": "nqn.x", "addresses": [{"traddr": "192.0.2.1"}]}


def configured(folder: Path, *members: dict[str, Any], **nvme: Any) -> Config:
    file = folder / "fx100.yaml"
    document: dict[str, Any] = {"volume": {"members": list(members), "object": "256KiB"}}
    if nvme:
        document["nvme"] = {"subsystems": [SUBSYSTEM], **nvme}
    file.write_text(yaml.safe_dump(document))
    return load(file)


class Boot:
    """A machine on which members appear at their time, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, there_at: float) -> None:
        self.now_s = 1000.0
        self.there_at = 1000.0 + there_at
        self.lines: list[str] = []
        self.node = folder / "node"
        self.node.touch()
        self.why: NvmeError = NamespaceNotFoundError(UUID, [])
        monkeypatch.setattr(arrival, "locate", self.locate)

    def locate(self, members: Any) -> list[Path | NvmeError]:
        found = self.node if self.now_s >= self.there_at else self.why
        return [found if member.nvme else member.path for member in members]

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def wait(self, config: Config, wait_s: float, **options: Any) -> float:
        """Wait; return how long it took by the clock."""
        before = self.now_s
        options = {"clock": lambda: self.now_s, "pause": self.pause, **options}
        wait_for_members(config, wait_s, self.lines.append, **options)
        return self.now_s - before


NAMED = {"nvme": {"uuid": UUID}}


def test_what_is_there_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = Boot(monkeypatch, tmp_path, there_at=0)
    assert boot.wait(configured(tmp_path, NAMED), 60) == 0
    assert boot.lines == []


def test_without_a_limit_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = Boot(monkeypatch, tmp_path, there_at=5)
    assert boot.wait(configured(tmp_path, NAMED), 0) == 0
    assert boot.lines == []


def test_a_late_member_is_waited_for_and_named_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = Boot(monkeypatch, tmp_path, there_at=12)
    assert boot.wait(configured(tmp_path, NAMED), 60) == 12
    name = f"volume.members[0] (uuid {UUID})"
    assert boot.lines == [
        f"waiting, 0 of 60 s: missing {name}",
        f"waiting, 5 of 60 s: missing {name}",
        f"waiting, 10 of 60 s: missing {name}",
        "nothing is missing any more, after 12 s",
    ]


@pytest.mark.parametrize("limit_s", [0.3, 1, 7.3, 60])
def test_at_the_limit_the_open_says_what_it_always_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    boot = Boot(monkeypatch, tmp_path, there_at=1e9)
    config = configured(tmp_path, NAMED)
    assert boot.wait(config, limit_s) == pytest.approx(limit_s, abs=0.002)
    assert boot.lines
    with pytest.raises(NamespaceNotFoundError, match="no namespace is attached"):
        open_volume(config)


def test_only_what_may_come_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = Boot(monkeypatch, tmp_path, there_at=1e9)
    config = configured(tmp_path, NAMED)
    for error, waited_s in (
        (NamespaceNotFoundError(UUID, []), 9),
        (StaleNodeError("the node is missing"), 9),
        (AmbiguousNamespaceError(UUID, ["a", "b"]), 0),
        (IdentityError("no identity"), 0),
    ):
        boot.why = error
        assert boot.wait(config, 9) == waited_s


def test_paths_are_missing_while_nothing_is_there(tmp_path: Path) -> None:
    link, loop, below = tmp_path / "by-id", tmp_path / "loop", tmp_path / "fx100.yaml" / "m"
    link.symlink_to(tmp_path / "nvme0n1")
    loop.symlink_to(loop)
    config = configured(tmp_path, *({"path": str(path)} for path in (link, loop, below)))
    assert missing_members(config) == [f"volume.members[0] ({link})"]
    (tmp_path / "nvme0n1").touch()
    assert missing_members(config) == []


def test_a_file_that_format_creates_is_not_missing(tmp_path: Path) -> None:
    made, given = {"path": "made", "size": "4MiB"}, {"path": "given"}
    config = configured(tmp_path, made, given)
    assert len(missing_members(config)) == 2
    assert missing_members(config, creating=True) == [f"volume.members[1] ({tmp_path / 'given'})"]


# Connecting meanwhile


class Attempts:
    """Stands for what connects; counts attempts, and remembers how it was made."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.tried = threading.Semaphore(0)
        self.thread: threading.Thread | None = None

    def __call__(self, nvme: Any, **options: Any) -> Attempts:
        self.made.append(options)
        return self

    def attempt(self) -> None:
        self.thread = threading.current_thread()
        self.tried.release()


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    made = Attempts()
    monkeypatch.setattr(arrival, "reconnector", made)
    return made


def waiting_for(attempts: Attempts, boot: Boot) -> Callable[[float], None]:
    """Pause, but not before an attempt was made: the thread has a clock of its own."""

    def pause(seconds: float) -> None:
        assert attempts.tried.acquire(timeout=30)
        boot.pause(seconds)

    return pause


def test_what_is_configured_is_connected_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: Attempts
) -> None:
    boot = Boot(monkeypatch, tmp_path, there_at=1)
    config = configured(tmp_path, NAMED, reconnect=True)

    boot.wait(config, 60, pause=waiting_for(attempts, boot))

    [options] = attempts.made
    assert options["at_start"]
    assert options["longest_pause_s"] == arrival.LONGEST_PAUSE_S
    assert options["stopped"]()
    attempts.thread.join(30)
    assert not attempts.thread.is_alive()


@pytest.mark.parametrize(
    ("nvme", "connect", "expected"),
    [({}, None, 0), ({"reconnect": False}, None, 0), ({"reconnect": True}, None, 1),
     ({"reconnect": False}, True, 1), ({"reconnect": True}, False, 0)],
)  # fmt: skip
def test_nothing_is_connected_where_that_is_not_wanted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempts: Attempts,
    nvme: dict[str, Any],
    connect: bool | None,
    expected: int,
) -> None:
    boot = Boot(monkeypatch, tmp_path, there_at=1)
    assert boot.wait(configured(tmp_path, NAMED, **nvme), 60, connect=connect) == 1
    assert len(attempts.made) == expected


def test_an_interrupt_ends_the_wait_and_the_connecting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: Attempts
) -> None:
    boot = Boot(monkeypatch, tmp_path, there_at=1e9)

    def interrupted(_seconds: float) -> None:
        assert attempts.tried.acquire(timeout=30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        boot.wait(configured(tmp_path, NAMED, reconnect=True), 60, pause=interrupted)
    assert attempts.made[0]["stopped"]()
    attempts.thread.join(30)
    assert not attempts.thread.is_alive()


def test_a_file_that_appears_ends_a_real_wait(tmp_path: Path) -> None:
    config = configured(tmp_path, {"path": "m0"})
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        os.close(os.open(tmp_path / "m0", os.O_CREAT))

    wait_for_members(config, 60, say)

    assert len(lines) == 2
