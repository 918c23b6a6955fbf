import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fx100_lmcache.cli import app
from fx100_lmcache.cli import doctor as command
from fx100_lmcache.cli.adapter import adapter_spec
from fx100_lmcache.config import load
from fx100_lmcache.doctor.loading import Outcome
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.snapshot import NEVER, Controller, Namespace, Snapshot, Subsystem
from support.doctor import vllm_settings, write_volume, written

TAGS = {"model_tags": {"model": "1"}}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache and vLLM as they should be, without importing them."""
    versions = {"lmcache": "0.5.6", "vllm": "0.32.0"}
    monkeypatch.setattr(
        "fx100_lmcache.doctor.versions.installed_version", lambda name: versions.get(name)
    )
    monkeypatch.setattr(command, "try_imports", lambda wanted: [Outcome("ok")] * len(wanted))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    for name in ("LMCACHE_CONFIG_FILE", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return write_volume(tmp_path / "volume", identity=TAGS)


def doctor(config: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", str(config), "--json", *map(str, arguments)])
    told = json.loads(result.stdout)
    assert told["ok"] is (result.exit_code == 0)
    return result.exit_code, told


def graded(told: dict[str, Any], severity: str) -> list[dict[str, str]]:
    return [each for each in told["findings"] if each["severity"] == severity]


def everything(config: Path, directory: Path, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Ask with all there is to know about the in-process mode."""
    settings = written(directory / "vllm.json", vllm_settings(config, **fields))
    numbers = ("--model-len", 16, "--kv-bytes-per-token", 256)
    mode = ("--mode", "in-process", "--lmcache-config", settings)
    return doctor(config, *mode, *numbers)


def test_a_volume_that_works_exits_zero_in_both_modes(volume: Path) -> None:
    code, told = doctor(volume)
    assert code == 0
    assert not graded(told, "problem")
    assert not graded(told, "warning")
    assert told["mode"] == "both"
    assert told["config"] == str(volume)
    assert {"severity", "subject", "what", "why", "do", "member"} == set(told["findings"][0])


def test_in_process_with_everything_known_has_nothing_to_note(volume: Path, tmp_path: Path) -> None:
    code, told = everything(volume, tmp_path, chunk_size=256)
    assert code == 0
    assert {each["severity"] for each in told["findings"]} == {"ok"}


def test_mp_with_everything_known_has_nothing_to_note(volume: Path, tmp_path: Path) -> None:
    value = written(tmp_path / "adapter.json", adapter_spec(load(volume), volume))
    numbers = ("--model-len", 16, "--kv-bytes-per-token", 256, "--l1-size-gb", 1)
    code, told = doctor(volume, "--mode", "mp", "--lmcache-config", value, *numbers)
    assert code == 0
    assert {each["severity"] for each in told["findings"]} == {"ok"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"pre_caching_hash_algorithm": "builtin"}, "sha256_cbor"),
        ({"max_local_cpu_size": 0.00001}, "max_local_cpu_size"),
        ({"policy": "fail"}, "recompute"),
        ({"storage_plugins": []}, "storage_plugins"),
    ],
)
def test_wrong_settings_exit_one(
    volume: Path, tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    code, found = everything(volume, tmp_path, **fields)
    assert code == 1
    [problem] = graded(found, "problem")
    assert told in problem["do"]


def test_wrong_module_path_exits_one(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "try_imports", lambda _: [Outcome("no module", "gone")])
    code, told = everything(
        volume, tmp_path, extra_config={"storage_plugin.fx100.module_path": "fx100_lmcache.typo"}
    )
    assert code == 1
    assert "fx100_lmcache.typo" in graded(told, "problem")[0]["what"]


@pytest.mark.parametrize(("name", "version"), [("lmcache", "0.6.0"), ("vllm", "0.40.0")])
def test_versions_outside_the_range_exit_one(
    volume: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    versions = {"lmcache": "0.5.6", "vllm": "0.32.0", name: version}
    monkeypatch.setattr(
        "fx100_lmcache.doctor.versions.installed_version", lambda name: versions.get(name)
    )
    code, told = doctor(volume)
    assert code == 1
    assert version in graded(told, "problem")[0]["subject"]


def test_a_missing_device_exits_one(volume: Path) -> None:
    gone = volume.parent / "m1"
    gone.unlink()
    code, told = doctor(volume)
    assert code == 1
    [problem] = graded(told, "problem")
    assert str(gone) in problem["what"]
    assert str(volume) in problem["do"]


def test_a_busy_shard_exits_one_and_names_its_holder(
    volume: Path, owner: Callable[[Path], int]
) -> None:
    pid = owner(volume)
    code, told = doctor(volume)
    assert code == 1
    [problem] = graded(told, "problem")
    assert problem["subject"] == "shard 0"
    assert f"pid={pid}" in problem["what"]
    assert "-c" in problem["what"], "the command line of the process is told"
    assert f"fx100 doctor {volume} --running" in problem["do"]
    assert any("not proven by a write" in each["what"] for each in graded(told, "note"))


def test_a_running_server_is_expected_to_hold_its_shards(
    volume: Path, owner: Callable[[Path], int]
) -> None:
    assert doctor(volume, "--running")[0] == 1
    owner(volume)
    assert doctor(volume, "--running")[0] == 0


def test_warnings_exit_zero(tmp_path: Path) -> None:
    code, told = doctor(write_volume(tmp_path / "untagged"))
    assert code == 0
    assert [each["subject"] for each in graded(told, "warning")] == ["identity"]


def test_a_configuration_that_cannot_be_read_exits_one(tmp_path: Path) -> None:
    path = tmp_path / "fx100.yaml"
    path.write_text("volume: {members: []}")
    code, told = doctor(path)
    assert code == 1
    assert "volume.members" in graded(told, "problem")[0]["what"]


def test_a_document_that_cannot_be_read_exits_one(volume: Path, tmp_path: Path) -> None:
    code, told = doctor(volume, "--lmcache-config", tmp_path / "gone.yaml")
    assert code == 1
    assert "gone.yaml" in graded(told, "problem")[0]["what"]


def test_lmcache_variable_names_the_document(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "gone.yaml"))
    assert doctor(volume)[0] == 1


@pytest.mark.parametrize("arguments", [["--mode", "other"], ["--model-len", "0"], ["--ranks", "x"]])
def test_wrong_usage_exits_two(volume: Path, arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["doctor", str(volume), *arguments]).exit_code == 2


def test_people_read_what_why_and_what_to_do(volume: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(volume)])
    assert result.exit_code == 0
    assert "this would work, as far as it was checked" in result.stdout
    assert f'--l2-adapter "$(fx100 l2-adapter {volume})"' in result.stdout
    (volume.parent / "m0").unlink()
    result = CliRunner().invoke(app, ["doctor", str(volume)])
    assert result.exit_code == 1
    assert "problem: volume:" in result.stdout
    assert "  why: " in result.stdout
    assert "this would not work" in result.stdout


@pytest.mark.parametrize(("fail_s", "code"), [(2, 0), (NEVER, 1), (60, 1)])
def test_members_on_nvme_need_bounded_io(
    volume: Path, monkeypatch: pytest.MonkeyPatch, fail_s: int, code: int
) -> None:
    snapshot = one_subsystem(str(volume.parent / "m0"), fail_s)

    class FakeSysfs:
        async def snapshot(self) -> Snapshot:
            return snapshot

    monkeypatch.setattr(command, "Sysfs", FakeSysfs)
    found, told = doctor(volume)
    assert found == code
    assert [each["do"][:5] for each in graded(told, "problem")] == ["echo "] * code
    assert any("nvme7" in each["subject"] for each in told["findings"])


def one_subsystem(device: str, fail_s: int) -> Snapshot:
    identity = NamespaceIdentity(subsystem_nqn="nqn.x", nsid=1, nguid="01" * 16)
    space = Namespace("nvme7n1", device, "259:0", identity, 4 << 20, 512, 1024, 1024)
    controllers = tuple(
        Controller(
            name=f"nvme{number}",
            subsystem_nqn="nqn.x",
            transport="tcp",
            address=FabricAddress(traddr=f"192.0.2.{number}", trsvcid="4420"),
            state="live",
            io_queues=4,
            keep_alive_s=5,
            reconnect_delay_s=2,
            ctrl_loss_timeout_s=600,
            fast_io_fail_s=fail_s if number == 7 else 2,
        )
        for number in (7, 8)
    )
    return Snapshot(
        (Subsystem("nvme-subsys7", "nqn.x", "round-robin", None, None, controllers, (space,)),)
    )
