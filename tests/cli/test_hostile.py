"""Every command on every bad input: exit code 1 or 2 and plain lines, never a traceback."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import Result

from fx100_lmcache.cli import doctor, nvme
from fx100_lmcache.config.loader import MAX_FILE_BYTES
from fx100_lmcache.doctor.loading import Outcome
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.volume import opening as access
from support.cli import fx100

COMMANDS = [
    ["format", "--yes"], ["status"], ["nvme", "check"], ["doctor"], ["verify"], ["l2-adapter"],
    ["take-over", "--yes"], ["status", "--json"], ["doctor", "--json"], ["nvme", "list"],
    ["nvme", "discover"], ["nvme", "connect"], ["nvme", "disconnect"], ["nvme", "check", "--json"],
]  # fmt: skip
FEW = COMMANDS[:3]
"""For what ends in one place of the code for all of them."""
OF_MEMBERS = COMMANDS[:7]

GOOD = b"volume: {members: [{path: m0}]}\n"
CONTENTS = {
    "nothing": b"",
    "a list": b"- a",
    "a word": b"volume",
    "an unknown field": GOOD + b"volumes: {}",
    "a wrong value": GOOD + b"io: {direct: perhaps}",
    "a wrong type": b"volume: {members: {a: b}}",
    "no member": b"volume: {members: []}",
    "not UTF-8": GOOD + b"# \xff\xfe",
    "zeros": bytes(4096),
    "a device's bytes": bytes(range(256)) * 16,
    "escape sequences": GOOD + b"\x1b[31m: 1",
    "a tab": b"volume:\n\tmembers: []",
    "a field twice": GOOD + GOOD,
    "two documents": GOOD + b"---\n" + GOOD,
    "a tag of Python": b"volume: !!python/object/apply:os.system [false]",
    "deep nesting": b"[" * 20_000,
    "a loop": b"volume: &a {members: [*a]}",
    "a billion laughs": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9))
               for c in range(ord("a"), ord("m"))),
    "too much": b"#" * (MAX_FILE_BYTES + 1),
    "an unknown variable": b"volume: {members: [{path: '${FX100_NOWHERE}/m0'}]}",
    "a path that is no name": b'volume: {members: [{path: "\\ud800"}]}',
    "a path with a zero": b'volume: {members: [{path: "a\\0b"}]}',
    "an endless path": b"volume: {members: [{path: " + b"x" * 300_000 + b"}]}",
    "a huge number": GOOD + b"volume: 1" + b"0" * 5000,
}  # fmt: skip


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of NVMe, no nvme-cli, and no imports of LMCache."""
    monkeypatch.setattr(doctor, "try_imports", lambda wanted: [Outcome("ok")] * len(wanted))
    monkeypatch.setattr(nvme, "NvmeCli", lambda: NvmeCli(str(tmp_path / "no-nvme")))
    for module in (nvme, doctor, access):
        monkeypatch.setattr(module, "Sysfs", lambda: Sysfs(tmp_path / "no-sysfs"))


def judge(result: Result, *, codes: tuple[int, ...] = (1,)) -> None:
    """Check that a command ended as it should on bad input."""
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code in codes, result.output
    assert "Traceback" not in result.output
    assert result.output.strip()
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) <= 20, "a message, not a flood"
    assert all(len(line) < 2000 for line in lines)


@pytest.mark.parametrize(
    ("what", "command"),
    [(what, command) for what in CONTENTS for command in FEW]
    + [("an unknown variable", command) for command in COMMANDS[len(FEW) :]],
)
def test_bad_contents(tmp_path: Path, command: list[str], what: str) -> None:
    config = tmp_path / "fx100.yaml"
    config.write_bytes(CONTENTS[what])
    judge(fx100(*command, config))
    assert [*tmp_path.iterdir()] == [config]


def a_directory(path: Path) -> None:
    path.mkdir()


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def nothing(_path: Path) -> None:
    pass


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


PLACES = [a_directory, a_dangling_link, a_link_to_itself, a_socket, nothing]


@pytest.mark.parametrize("command", FEW, ids=" ".join)
@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_no_file_where_the_configuration_should_be(
    tmp_path: Path, command: list[str], make: Callable[[Path], None]
) -> None:
    place = tmp_path / "fx100.yaml"
    make(place)
    judge(fx100(*command, place))


@pytest.mark.parametrize("command", FEW, ids=" ".join)
@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "/dev/zero", "", "/proc/self/mem"])
def test_no_name_of_a_configuration(
    tmp_path: Path, command: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    judge(fx100(*command, name), codes=(1, 2))
    assert [*tmp_path.iterdir()] == []


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def below_a_file(path: Path) -> None:
    path.touch()


MEMBERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (nothing, "{}"),
    "a directory": (a_directory, "{}"),
    "a pipe": (a_pipe, "{}"),
    "a socket": (a_socket, "{}"),
    "a dangling link": (a_dangling_link, "{}"),
    "a link to itself": (a_link_to_itself, "{}"),
    "below a file": (below_a_file, "{}/m"),
    "too long a name": (nothing, "{}" + "x" * 300),
    "empty": (below_a_file, "{}"),
    "the null device": (nothing, "/dev/null"),
    "endless zeros": (nothing, "/dev/zero"),
    "memory": (nothing, "/proc/self/mem"),
    "not in /dev": (nothing, "/dev/fx100-nowhere"),
}


@pytest.mark.parametrize(
    ("what", "command", "size"),
    [(what, command, None) for what in MEMBERS for command in OF_MEMBERS]
    + [(what, COMMANDS[0], "1024TiB") for what in MEMBERS],
)
def test_bad_members(tmp_path: Path, command: list[str], what: str, size: str | None) -> None:
    make, name = MEMBERS[what]
    make(tmp_path / "m0")
    member = {"path": name.format(tmp_path / "m0")} | ({"size": size} if size else {})
    config = tmp_path / "fx100.yaml"
    config.write_text(yaml.safe_dump({"volume": {"members": [member]}}))
    before = {path.name for path in tmp_path.iterdir()}
    fine = command[0] == "nvme" and command[1] in ("list", "check")
    judge(fx100(*command, config), codes=(0,) if fine else (1,))
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_namespace_that_is_not_there(tmp_path: Path, command: list[str]) -> None:
    subsystem = {"subsystem_nqn": "nqn.x", "addresses": [{"traddr": "no-such-host.invalid"}]}
    document = {
        "volume": {"members": [{"nvme": {"nguid": "1" * 32}}]},
        "nvme": {"subsystems": [subsystem], "host_nqn": "nqn.h", "host_id": f"{7:032x}"},
    }
    config = tmp_path / "fx100.yaml"
    config.write_text(yaml.safe_dump(document))
    fine = command == ["nvme", "disconnect"]  # nothing is connected
    judge(fx100(*command, config), codes=(0,) if fine else (1,))
