"""The command line as a whole: version, usage, output for machines, exit codes."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fx100_lmcache import __version__
from fx100_lmcache.cli import adapter as adapter_module
from fx100_lmcache.cli import doctor as doctor_module
from fx100_lmcache.cli import format as format_module
from fx100_lmcache.cli import status as status_module
from fx100_lmcache.cli import waiting
from fx100_lmcache.doctor.loading import Outcome
from support.cli import FX100, Rig, formatted, fx100, fx100_process, planned

COMMANDS = ("format", "status", "verify", "l2-adapter", "take-over")


def test_version() -> None:
    result = fx100("--version")
    assert result.exit_code == 0
    assert result.stdout == f"fx100 {__version__}\n"


@pytest.mark.parametrize("arguments", [["bogus"], ["status"], ["status", "a", "b"], ["--bogus"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert fx100(*arguments).exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    result = fx100(command, "--help")
    assert result.exit_code == 0
    assert "CONFIG" in result.stdout


def test_a_real_process(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume")
    assert fx100_process("format", rig.config, "--yes").returncode == 0
    status = fx100_process("status", rig.config)
    assert status.returncode == 0
    assert status.stdout.splitlines()[-1] == "healthy"
    assert fx100_process("verify", rig.config).returncode == 0
    rig.members[0].unlink()
    broken = fx100_process("l2-adapter", rig.config)
    assert broken.returncode == 1
    assert broken.stdout == ""
    assert broken.stderr.startswith("error: ")
    assert "Traceback" not in broken.stderr


def test_starts_without_lmcache_and_torch() -> None:
    code = (
        "import sys, fx100_lmcache.cli; "
        "print([m for m in ('lmcache', 'torch', 'vllm', 'fx100_lmcache.lmcache') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_defect_keeps_its_traceback(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(status_module, "inspect", broken)
    assert isinstance(fx100("status", rig.config).exception, ZeroDivisionError)


def test_ctrl_c_is_exit_code_130(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status_module, "inspect", interrupted)
    result = fx100("status", rig.config)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_ctrl_c_while_a_file_is_written_leaves_nothing(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume", size="4GiB")
    process = subprocess.Popen(
        [*FX100, "format", rig.config, "--yes"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not rig.members[0].exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "interrupted\n"
    assert list(rig.config.parent.iterdir()) == [rig.config]


# ----- format


def test_format_asks(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume")
    for answer in ("", "n\n", "\n", "maybe\n"):
        result = fx100("format", rig.config, answer=answer)
        assert result.exit_code == 1
        assert "Nothing was written" in result.stderr
        assert not rig.members[0].exists()
    assert "file is created" in " ".join(result.stdout.replace("│", "").split())
    assert fx100("format", rig.config, answer="y\n").exit_code == 0
    assert rig.members[0].exists()


def test_format_shows_what_would_be_destroyed(rig: Rig) -> None:
    volume = rig.status()["volume"]
    result = fx100("format", rig.config, answer="n\n")
    assert result.exit_code == 1
    assert "Destroy what the members hold" in result.stderr
    text = "".join(result.stdout.replace("│", "").split())
    for part in ("destroyed:member", "logicalblock", "inodeslots", "capacity", "frame"):
        assert part in text
    assert rig.status()["volume"] == volume


def test_format_json(tmp_path: Path) -> None:
    rig = planned(tmp_path / "volume")
    result = fx100("format", rig.config, "--json", answer="y\n")
    assert result.exit_code == 0
    made = json.loads(result.stdout)  # the plan and the question went to stderr
    assert "Format?" in result.stderr
    assert set(made) == {
        *("volume", "members", "shards", "block_bytes", "frame_bytes", "inode_bytes"),
        *("inode_slots", "capacity_bytes"),
    }
    assert [m["created"] for m in made["members"]] == [True, True]
    again = json.loads(fx100("format", rig.config, "--yes", "--json").stdout)
    assert made["volume"] in again["members"][0]["destroyed"]
    assert rig.status()["volume"] == again["volume"]


def test_an_io_error_while_formatting_is_readable(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(format_module, "format_members", fail)
    result = fx100("format", rig.config, "--yes")
    assert result.exit_code == 1
    assert "error: a member cannot be read or written" in result.stderr


# ----- l2-adapter


def test_l2_adapter_prints_one_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"trigger_watermark": 0.85, "eviction_ratio": 0.07}
    rig = formatted(tmp_path / "volume", space=space)
    monkeypatch.chdir(rig.config.parent)
    result = fx100("l2-adapter", "fx100.yaml")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout) == {
        "type": "plugin",
        "module_path": "fx100_lmcache.lmcache.l2_adapter",
        "class_name": "FX100L2Adapter",
        "adapter_params": {"config": str(rig.config)},
        "eviction": {"eviction_policy": "LRU", **space},
    }


PARSE = """
import argparse, json, sys
from lmcache.v1.distributed.l2_adapters import config
parser = config.add_l2_adapters_args(argparse.ArgumentParser())
arguments = parser.parse_args(["--l2-adapter", sys.argv[1]])
[adapter] = config.parse_args_to_l2_adapters_config(arguments).adapters
eviction = vars(adapter.eviction_config)
print(json.dumps({**vars(adapter), "eviction_config": eviction}, default=str))
"""


@pytest.mark.lmcache
def test_lmcache_understands_the_json(rig: Rig) -> None:
    if importlib.util.find_spec("lmcache") is None:
        pytest.skip("needs the lmcache package")
    text = fx100("l2-adapter", rig.config).stdout.strip()
    command = [sys.executable, "-c", PARSE, text]  # in a process of its own: it imports torch
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert parsed["class_name"] == "FX100L2Adapter"
    assert parsed["module_path"] == "fx100_lmcache.lmcache.l2_adapter"
    assert parsed["adapter_params"] == {"config": str(rig.config)}
    assert parsed["eviction_config"]["eviction_policy"] == "LRU"
    assert parsed["eviction_config"]["trigger_watermark"] == 0.9
    assert parsed["eviction_config"]["eviction_ratio"] == 0.05


# ----- --wait

WAITING = (["status"], ["verify"], ["doctor"], ["l2-adapter"], ["format", "--yes"])


@pytest.mark.parametrize("command", WAITING, ids=lambda command: command[0])
def test_a_late_member_is_waited_for(
    rig: Rig, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.rewrite(rig.members)  # without sizes: nothing is to be created
    away = rig.members[1].with_name("away")
    rig.members[1].rename(away)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if away.exists():
            away.rename(rig.members[1])

    monkeypatch.setattr(waiting, "say", say)
    monkeypatch.setattr(doctor_module, "try_imports", lambda wanted: [Outcome("ok")] * len(wanted))
    result = fx100(*command, rig.config, "--wait", 60)
    assert f"missing volume.members[1] ({rig.members[1]})" in said[0]
    assert "nothing is missing any more" in said[-1]
    assert "No such file" not in result.output
    assert rig.members[1].exists()
    if command != ["doctor"]:
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", WAITING, ids=lambda command: command[0])
def test_what_is_missing_at_the_limit_is_told_as_without_waiting(
    rig: Rig, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.rewrite(rig.members)
    rig.members[1].unlink()
    monkeypatch.setattr(doctor_module, "try_imports", lambda wanted: [Outcome("ok")] * len(wanted))
    at_once = fx100(*command, rig.config)
    waited = fx100(*command, rig.config, "--wait", 0.01)
    assert (at_once.exit_code, waited.exit_code) == (1, 1)
    assert waited.stdout == at_once.stdout
    assert waited.stderr.splitlines()[0].startswith("waiting, 0 of 0.01 s: missing volume.members")
    assert waited.stderr.splitlines()[1:] == at_once.stderr.splitlines()


def test_what_starts_a_server_waits_as_the_server_does(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.rewrite(rig.members, deadlines={"start": "7s"})
    waited: list[float] = []
    monkeypatch.setattr(adapter_module, "wait_as_asked", lambda _path, s: waited.append(s))
    assert fx100("l2-adapter", rig.config).exit_code == 0
    assert fx100("l2-adapter", rig.config, "--wait", 0).exit_code == 0
    assert waited == [7, 0]


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon", "1e9"])
@pytest.mark.parametrize("command", ["status", "l2-adapter"])
def test_an_impossible_wait_is_wrong_usage(rig: Rig, command: str, seconds: str) -> None:
    assert fx100(command, rig.config, "--wait", seconds).exit_code == 2
