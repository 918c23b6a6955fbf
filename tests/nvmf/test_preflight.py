"""Whether this process could connect a lost path, and who hears of it when it could not."""

import asyncio
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from fx100_lmcache.config import NvmeAddress, NvmeConfig, NvmeSubsystem
from fx100_lmcache.findings import Finding, warning
from fx100_lmcache.nvmf.preflight import obstacles
from fx100_lmcache.volume import opening as access
from support.fake_sysfs import HOST_ID, HOST_NQN, NQN

NVME = NvmeConfig(
    subsystems=(NvmeSubsystem(subsystem_nqn=NQN, addresses=(NvmeAddress(traddr="10.0.0.1"),)),)
)


class Machine:
    """What connecting needs, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.device = folder / "nvme-fabrics"
        self.sysfs = folder
        self.etc = folder / "etc"
        self.etc.mkdir()
        self.device.touch()
        program = folder / "nvme"
        program.touch()
        program.chmod(stat.S_IRWXU)
        (self.etc / "hostnqn").write_text(HOST_NQN)
        (self.etc / "hostid").write_text(HOST_ID)
        self.search_path = str(folder)

    def obstacles(self, nvme: NvmeConfig = NVME) -> list[Finding]:
        given = (self.device, self.sysfs, self.etc, self.search_path)
        return asyncio.run(obstacles(nvme, *given))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_where_all_is_there_nothing_is_said(machine: Machine) -> None:
    assert machine.obstacles() == []


def test_a_missing_device_is_named_with_the_modules_that_make_it(machine: Machine) -> None:
    machine.device.unlink()
    [found] = machine.obstacles()
    assert found.what == f"{machine.device} is missing"
    assert "modprobe -a nvme-tcp" in found.do


def test_a_device_that_may_not_be_opened_needs_root(machine: Machine) -> None:
    machine.device.unlink()
    machine.device.mkdir()  # opened for writing: refused, for root too
    [found] = machine.obstacles()
    assert "cannot be opened" in found.what
    assert "run as root" in found.do


def test_sysfs_that_is_read_only_keeps_time_outs_from_being_set(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda _path: read_only)
    [found] = machine.obstacles()
    assert "time-outs" in found.what
    assert "rw" in found.do


def test_the_program_is_needed_unless_all_have_a_secret(machine: Machine, tmp_path: Path) -> None:
    machine.search_path = str(tmp_path / "empty")
    [found] = machine.obstacles()
    assert "nvme-cli" in found.do
    [subsystem] = NVME.subsystems
    secret = subsystem.model_copy(update={"dhchap_secret_file": tmp_path / "secret"})
    assert machine.obstacles(NVME.model_copy(update={"subsystems": (secret,)})) == []


def test_a_host_without_a_name_is_told_how_to_get_one(machine: Machine) -> None:
    (machine.etc / "hostnqn").unlink()
    [found] = machine.obstacles()
    assert "hostnqn is missing" in found.what
    assert found.do.startswith("nvme gen-hostnqn")
    named = NVME.model_copy(update={"host_nqn": HOST_NQN, "host_id": HOST_ID})
    assert machine.obstacles(named) == []


def test_it_is_said_when_the_watch_begins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fx100_lmcache")
    found = [
        warning("nvme", "no device", "nvme.reconnect is on", "make one"),
        warning("nvme", "no program", "nvme.reconnect is on", "install it"),
    ]
    monkeypatch.setattr(access, "reconnect_obstacles", lambda _nvme: found)

    watch = access.watch_paths(NVME, list[str]().append, lambda: False)

    assert watch is not None
    watch.stop()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("nvme.reconnect is on" in each for each in said)
    assert "no device: nvme.reconnect is on (do: make one)" in said[0]
