from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.nvmf import parse
from fx100_lmcache.nvmf.address import FabricAddress, parse_address
from fx100_lmcache.nvmf.errors import UnknownOutputError

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = ["1.16", "2.0", "2.3", "2.10.2", "2.16", "3.0"]
NQN = "nqn.2024-01.io.fx100:array"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_all_versions_are_recorded() -> None:
    assert sorted(path.name for path in RECORDED.iterdir() if path.is_dir()) == sorted(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_form_of_discover_gives_the_same(version: Any) -> None:
    records = parse.parse_discovery(recorded(f"{version}/discover.json"), version)

    offered = [record for record in records if not record.is_discovery]
    assert [(each.subsystem_nqn, each.transport, each.port_id) for each in offered] == [
        (NQN, "tcp", 1)
    ]
    assert offered[0].address == FabricAddress("127.0.0.1", "4420")


@pytest.mark.parametrize(
    "before",
    [
        "Failed to open /dev/nvme1: Permission denied\n",
        "[1] failed to open slots dir /sys/bus/pci/slots\n",
        "warning: {odd} text\n[2.3] more\n\n",
    ],
)
def test_text_before_the_json_is_skipped(before: str) -> None:
    alone = parse.parse_discovery(recorded("2.3/discover.json"), "2.3")
    assert parse.parse_discovery(before + recorded("2.3/discover.json"), "2.3") == alone
    assert alone


@pytest.mark.parametrize("text", ["", "\n", "No discovery log entries to fetch.\n"])
def test_a_target_that_offers_nothing_is_an_empty_list(text: str) -> None:
    assert parse.parse_discovery(text, "2.3") == []


@pytest.mark.parametrize("text", ["gibberish", "{}", '{"records":[{"trtype":"tcp"}]}', "[]"])
def test_unknown_discovery_is_an_error_with_the_version(text: str) -> None:
    with pytest.raises(UnknownOutputError, match=r"nvme discover of nvme-cli 9\.9"):
        parse.parse_discovery(text, "9.9")


@pytest.mark.parametrize("version", VERSIONS)
def test_cut_off_output_is_never_a_shorter_list(version: Any) -> None:
    text = recorded(f"{version}/discover.json").rstrip()
    for end in range(1, len(text), 7):
        with pytest.raises(UnknownOutputError):
            parse.parse_discovery(text[:end], "x")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("nvme version 2.3 (git 2.3)\nlibnvme version 1.3 (git 1.3)\n", "2.3"),
        ("nvme version 2.10.2 (git 2.10.2)", "2.10.2"),
        ("nvme version 3.0-rc1 (git 3.0-rc1)", "3.0-rc1"),
        ("nvme version 1.16", "1.16"),
        ("", "unknown"),
    ],
)
def test_version(text: str, version: str) -> None:
    assert parse.parse_version(text) == version


def test_error_text_of_json() -> None:
    assert parse.error_text(recorded("3.0/connect-again.json")).startswith("already connected to")
    assert parse.error_text("no json") is None
    assert parse.error_text('{"device":"nvme0"}') is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("traddr=10.0.0.1,trsvcid=4420", FabricAddress("10.0.0.1", "4420")),
        (
            "traddr=10.0.0.1 trsvcid=4420 host_traddr=10.0.0.9",
            FabricAddress("10.0.0.1", "4420", "10.0.0.9"),
        ),
        (
            "traddr=fe80::1,trsvcid=1,host_iface=eth0,src_addr=fe80::2",
            FabricAddress("fe80::1", "1", "", "eth0", "fe80::2"),
        ),
        ("0000:3d:00.0", FabricAddress("0000:3d:00.0")),
        ("", FabricAddress()),
    ],
)
def test_address(text: str, address: Any) -> None:
    assert parse_address(text) == address


def test_address_reaches() -> None:
    there = FabricAddress("fd00::1", "4420", "", "eth1", "fd00::9")

    assert there.reaches(FabricAddress("fd00:0:0::1", "4420"))
    assert there.reaches(FabricAddress("fd00::1", "4420", host_traddr="fd00:0::9"))
    assert there.reaches(FabricAddress("fd00::1", "4420", host_iface="eth1"))
    assert not there.reaches(FabricAddress("fd00::1", "4421"))
    assert not there.reaches(FabricAddress("fd00::2", "4420"))
    assert not there.reaches(FabricAddress("fd00::1", "4420", host_iface="eth0"))
    assert not there.reaches(FabricAddress("fd00::1", "4420", host_traddr="fd00::8"))
