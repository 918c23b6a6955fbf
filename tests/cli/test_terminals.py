"""Every command under every kind of terminal, with names that are no text: an exit code, always."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from fx100_lmcache.cli import streams
from support import SUPPORT
from support.cli import FX100

NVMF = Path(__file__).parents[1] / "nvmf"
CHILD = SUPPORT / "terminal_child.py"
NQN = "nqn.2024-01.io.fx100:array"
HOST_ID = "f0100000-1ab0-4000-8000-000000000001"


@dataclass(frozen=True)
class Terminal:
    """What a command is started with.

    Attributes
    ----------
    redirect : str
        Of the shell.
    ascii_only : bool
        Whether nothing else may be printed.
    """

    environment: dict[str, str]
    redirect: str = ""
    ascii_only: bool = False


TERMINALS = {
    "utf-8": Terminal({"LC_ALL": "C.UTF-8"}),
    "ascii streams": Terminal({"PYTHONIOENCODING": "ascii:strict"}, ascii_only=True),
    "POSIX": Terminal({"LC_ALL": "POSIX", "PYTHONUTF8": "0"}, ascii_only=True),
    "stdout closed": Terminal({}, ">&-"),
    "all closed": Terminal({}, "<&- >&- 2>&-"),
    "disk full": Terminal({}, ">/dev/full"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two volumes, a sysfs tree and an nvme-cli, all with names that are hard to print."""
    base = tmp_path_factory.mktemp("terminals")
    subsystem = {"subsystem_nqn": NQN, "addresses": [{"traddr": "10.0.0.1"}]}
    nvme = {"host_nqn": f"{NQN}.host", "host_id": HOST_ID, "subsystems": [subsystem]}
    for name, member in (("odd", os.fsdecode(b"m\xff\xe9" + b"x" * 80)), ("euro", "m\u20ac\u2026")):
        members = [{"path": f"{member}-{n}", "size": "1MiB"} for n in range(2)]
        document = {
            "volume": {"members": members, "object": "64KiB"},
            "identity": {"model_tags": {"mod\u00e8le": "\u65e5\u672c"}},
            "nvme": nvme,
        }
        (base / f"{name}.yaml").write_text(yaml.safe_dump(document))
    make_sysfs(base / "sys")
    program = base / "nvme"
    program.write_bytes(b"#!/bin/sh\nprintf '\\377\\342\\202\\254 no such thing' >&2\nexit 1\n")
    program.chmod(0o755)
    return base


def make_sysfs(root: Path) -> None:
    sys.path.insert(0, str(NVMF))
    try:
        from support.fake_sysfs import FakeSysfs
    finally:
        sys.path.remove(str(NVMF))
    tree = FakeSysfs(root)
    tree.subsystem()
    for attribute in (tree.subsystems / "nvme-subsys0" / "model", tree.controller() / "state"):
        attribute.write_bytes(b"\xff\xe2\x82\xac live\n")
    tree.head("nvme0n1", 1)
    tree.path("nvme0c0n1", 1, "nvme0", ana_state="\u00e9")


@pytest.mark.parametrize("kind", TERMINALS)
def test_every_command_ends_with_an_exit_code(folder: Path, tmp_path: Path, kind: str) -> None:
    terminal = TERMINALS[kind]
    results = tmp_path / "codes.json"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LC_", "LANG", "PYTHONIO", "PYTHONUTF8", "PYTHONCOERCE"))
    }
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {terminal.redirect}', sys.executable, CHILD, folder, results],
        env={**inherited, "COLUMNS": "60", **terminal.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=110,
        check=False,
    )

    said = done.stderr.decode("utf-8", "backslashreplace")
    assert done.returncode == 0, said
    assert not re.search("Traceback|Error:|Exception ignored", said), said
    codes = json.loads(results.read_text())
    assert len(codes) > 30
    assert set(codes.values()) <= {0, 1, 2}
    assert codes["['--version']"] == (1 if kind == "disk full" else 0)
    if terminal.ascii_only:
        assert (done.stdout + done.stderr).isascii()
    if not terminal.redirect:
        assert b"formatted" in done.stdout
        assert b"m\\xff\\xe9" in done.stdout + done.stderr


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


def test_progress_bars_and_tables_are_plain_on_an_ascii_terminal(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    ours, theirs = terminal
    config = tmp_path / "fx100.yaml"
    members = [{"path": "m0\u20ac", "size": "8MiB"}]
    config.write_text(yaml.safe_dump({"volume": {"members": members, "object": "64KiB"}}))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "xterm", "COLUMNS": "70"}
    process = subprocess.Popen(
        [*FX100, "format", str(config), "--yes"],
        env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the terminal's other side is closed
            break
        said += part
    assert process.wait(60) == 0, said
    assert said.isascii()
    assert b"writing zeros" in said
    assert b"formatted" in said


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("caf\u00e9", "caf\\xe9"),
        ("1\u20ac", "1\\u20ac"),
        ("\U0001f600", "\\U0001f600"),
        ("\udcff", "\\xff"),
        ("\ud800", "\\ud800"),
        ("a\u2026", "a..."),
        ("\u250f\u2501\u2533\u2513\u2502", "+-++|"),
    ],
)
def test_what_a_terminal_cannot_show_is_replaced(
    text: str, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    streams.prepare_streams()
    assert text.encode("ascii", streams.PLAIN) == plain.encode()
    assert "\udcff\u20ac".encode("utf-8", streams.PLAIN) == b"\\xff\xe2\x82\xac"


def test_no_file_is_opened_under_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What is printed on stderr would be written over the first member's label."""
    code = (
        "import os, sys; from fx100_lmcache.cli.streams import prepare_streams; prepare_streams();"
        f"fd = os.open({str(tmp_path / 'member')!r}, os.O_CREAT | os.O_RDWR);"
        "os.write(2, b'noise'); print('noise'); sys.exit(0 if fd > 2 else 1)"
    )
    command = f'exec {sys.executable} -c "$0" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command, code], check=False).returncode == 0
    assert (tmp_path / "member").read_bytes() == b""
