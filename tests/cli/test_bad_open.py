"""Opening what is not right: a typed, readable error, and not one byte written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fx100_lmcache.mount import mount
from fx100_lmcache.testing.harness import value_of
from support.cli import MIB, Rig, fill, fx100, fx100_process, get, planned, put
from support.situations import SITUATIONS, doubled_by_hard_link


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.__name__)
def test_open_is_refused_and_nothing_is_written(rig: Rig, situation: Callable[[Rig], None]) -> None:
    kind, words = SITUATIONS[situation]
    fill(rig, ["a"])
    situation(rig)
    before = rig.contents()
    with pytest.raises(kind) as caught:
        mount(rig.load())
    assert words in str(caught.value)
    assert type(caught.value) is kind
    assert rig.contents() == before


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.__name__)
def test_commands_say_what_is_wrong(rig: Rig, situation: Callable[[Rig], None]) -> None:
    _, words = SITUATIONS[situation]
    situation(rig)
    before = rig.contents()
    status = fx100("status", rig.config)
    assert status.exit_code == 1
    assert "not healthy" in status.stdout
    assert "why: " in status.stdout
    assert "do:  " in status.stdout
    flat = " ".join(status.stdout.split())
    assert words in flat or situation is doubled_by_hard_link  # two labels alike: named as such
    for command in ("verify", "l2-adapter"):
        result = fx100(command, rig.config)
        assert result.exit_code == 1, command
        assert result.stdout == ""
        assert words in " ".join(result.stderr.split()), command
        assert "Traceback" not in result.output
    assert rig.contents() == before


def test_a_read_only_file(rig: Rig) -> None:
    rig.members[1].chmod(0o400)
    prefix = []
    if not os.geteuid():  # root may write everything, unless it gives that up
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv (package util-linux) when run as root")
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    before = rig.contents()
    refused = fx100_process("format", rig.config, "--yes", prefix=prefix)
    assert refused.returncode == 1
    assert f"{rig.members[1]}: Permission denied\n  do: run as a user that may" in refused.stderr
    status = fx100_process("status", rig.config, prefix=prefix)
    assert status.returncode == 1
    assert "cannot be written by this user" in status.stdout
    assert rig.contents() == before


def test_a_grown_member_works(rig: Rig) -> None:
    fill(rig, ["a"])
    os.truncate(rig.members[0], 6 * MIB)
    mounted = mount(rig.load())
    assert get(mounted, "a", 200_000) == value_of("a", 1, 200_000)
    assert put(mounted, "b", b"b" * 1000) == "stored"
    mounted.close()
    report = rig.status()
    assert report["healthy"]
    assert "grew from" in report["warnings"][0]["what"]
    assert fx100("verify", rig.config).exit_code == 0


def test_members_of_unequal_size(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume")
    sizes = ["4MiB", "9MiB", "2MiB"]
    rig.rewrite([{"path": str(tmp_path / f"m{n}"), "size": size} for n, size in enumerate(sizes)])
    assert fx100("format", rig.config, "--yes").exit_code == 0
    fill(rig, [f"k{n}" for n in range(20)])
    assert rig.status()["usage"]["entries"] == 20
    assert fx100("verify", rig.config).exit_code == 0


# ----- the configuration file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("volume: {members: {a: b}}", "must be a list"),
        ("volume: {members: [{path: a, size: many}]}", "must be a size"),
        ("volume: {members: [{path: 7}]}", "must be a path"),
        ("volume: {members: [{path: a}]}\nio: {direct: 1}", "io.direct"),
        ("volume: {members: []}", "1 to 16"),
        ("volume: {members: [{path: a}], sharts: 2}", "did you mean 'shards'?"),
    ],
)
@pytest.mark.parametrize("command", ["format", "status", "verify", "l2-adapter", "take-over"])
def test_bad_configuration(tmp_path: Path, command: str, text: str, words: str) -> None:
    config = tmp_path / "fx100.yaml"
    config.write_text(text)
    result = fx100(command, config)
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert str(config) in "".join(result.output.split())
    assert list(tmp_path.iterdir()) == [config]


def test_no_configuration(tmp_path: Path) -> None:
    result = fx100("format", tmp_path / "none.yaml", "--yes")
    assert result.exit_code == 1
    assert "cannot be read: No such file" in result.stderr
