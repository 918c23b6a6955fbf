import sys
from pathlib import Path

import pytest

from demo import store
from fx100_lmcache import config as settings


def fake_fx100(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (directory / "fx100").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "fx100").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(directory / "python"))


def test_the_config_is_one_that_the_store_accepts(tmp_path: Path) -> None:
    config = settings.load(store.write_config(tmp_path, "tiny"))
    assert len(config.volume.members) == store.MEMBERS
    assert config.volume.object_bytes == 1 << 20
    assert config.identity.tag_of("tiny") == "demo"
    members = [member.path for member in config.volume.members]
    assert all(path is not None and path.parent == tmp_path / "volume" for path in members)


def test_fx100_is_called_with_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    fake_fx100(tmp_path, monkeypatch, f'echo "$@" > {said}')
    store.format_volume(Path("a.yaml"))
    assert said.read_text() == "format a.yaml --yes\n"


def test_a_failing_fx100_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fx100(tmp_path, monkeypatch, "echo some plan; echo not enough space >&2; exit 4")
    with pytest.raises(RuntimeError, match=r"format a.yaml --yes.*code 4(.|\n)*not enough space"):
        store.format_volume(Path("a.yaml"))


def test_an_fx100_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fx100(tmp_path, monkeypatch, "sleep 1000 & wait")
    monkeypatch.setattr(store, "COMMAND_TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError, match=r"format a.yaml --yes` did not end within 0\.2 s"):
        store.format_volume(Path("a.yaml"))
