import json
from pathlib import Path

import pytest

from fx100_lmcache.nvmf import parse
from fx100_lmcache.nvmf.address import FabricAddress, parse_address
from fx100_lmcache.nvmf.errors import UnknownOutputError

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = ["1.16", "2.0", "2.3", "2.10.2", "2.11", "2.16", "3.0"]
NQN = "nqn.2024-01.io.fx100:array"
LISTS = sorted(str(path.relative_to(RECORDED)) for path in RECORDED.glob("*/list*.json"))
LISTS = [name for name in LISTS if "subsys" not in name]


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_all_versions_are_recorded():
    assert sorted(path.name for path in RECORDED.iterdir() if path.is_dir()) == sorted(VERSIONS)
    assert len(LISTS) == 12


@pytest.mark.parametrize("name", LISTS)
def test_every_form_of_list_gives_the_same(name):
    found = parse.parse_list(recorded(name), "x")

    assert [(each.device, each.nsid, each.size_bytes, each.lba_bytes) for each in found] == [
        ("/dev/nvme0n1", 2, 64 << 20, 512),
        ("/dev/nvme0n2", 3, 64 << 20, 4096),
    ]
    assert {(each.serial, each.model) for each in found} == {("fx100lab0001", "fx100")}
    nested = "verbose" in name or name.startswith("2.11")
    assert {each.subsystem_nqn for each in found} == {NQN if nested else None}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_form_of_list_subsys_gives_the_same(version):
    [subsystem] = parse.parse_list_subsys(recorded(f"{version}/list-subsys.json"), version)

    assert (subsystem.name, subsystem.nqn) == ("nvme-subsys0", NQN)
    assert [
        (path.controller, path.transport, path.address.traddr, path.address.trsvcid, path.state)
        for path in subsystem.paths
    ] == [
        ("nvme0", "tcp", "127.0.0.1", "4420", "live"),
        ("nvme1", "tcp", "127.0.0.1", "4421", "live"),
    ]
    if version != "1.16":
        assert subsystem.host_nqn == "nqn.2014-08.org.nvmexpress:uuid:" + subsystem.host_id


@pytest.mark.parametrize("version", [each for each in VERSIONS if each != "2.11"])
def test_every_form_of_discover_gives_the_same(version):
    records = parse.parse_discovery(recorded(f"{version}/discover.json"), version)

    offered = [record for record in records if not record.is_discovery]
    assert [(each.subsystem_nqn, each.transport, each.port_id) for each in offered] == [
        (NQN, "tcp", 1)
    ]
    assert offered[0].address == FabricAddress("127.0.0.1", "4420")


def test_namespaces_without_multipath_stand_below_their_controller():
    text = """
    {"Devices":[{"HostNQN":"h","Subsystems":[{"Subsystem":"nvme-subsys0","SubsystemNQN":"n",
    "Controllers":[{"Controller":"nvme0","SerialNumber":" s ","ModelNumber":"m","Namespaces":[
    {"NameSpace":"nvme0n1","NSID":1,"PhysicalSize":4096,"SectorSize":512}]}]}]}]}"""

    [found] = parse.parse_list(text.strip(), "2.16")

    assert found == parse.ListedNamespace("/dev/nvme0n1", 1, 4096, 512, "n", "s", "m")


def test_hidden_path_nodes_are_not_listed():
    names = ("nvme3c3n1", "nvme3n1", "nvme10n1", "nvme3n10")
    about = {"NameSpace": 1, "PhysicalSize": 4096, "SectorSize": 512}
    text = json.dumps({"Devices": [{"DevicePath": f"/dev/{name}", **about} for name in names]})

    found = [each.device for each in parse.parse_list(text, "2.4")]

    assert found == ["/dev/nvme3n1", "/dev/nvme10n1", "/dev/nvme3n10"]


@pytest.mark.parametrize(
    "before",
    [
        "Failed to open /dev/nvme1: Permission denied\n",
        "[1] failed to open slots dir /sys/bus/pci/slots\n",
        "warning: {odd} text\n[2.3] more\n\n",
    ],
)
def test_text_before_the_json_is_skipped(before):
    assert len(parse.parse_list(before + recorded("2.3/list.json"), "2.3")) == 2
    assert len(parse.parse_list_subsys(before + recorded("2.3/list-subsys.json"), "2.3")) == 1


@pytest.mark.parametrize(
    "text", ["", "\n", "No NVMe devices detected.\n", '{\n  "Devices":[\n  ]\n}\n']
)
def test_nothing_there_is_an_empty_list(text):
    assert parse.parse_list(text, "2.3") == []


def test_a_target_that_offers_nothing_is_an_empty_list():
    assert parse.parse_discovery("No discovery log entries to fetch.\n", "2.3") == []


@pytest.mark.parametrize("text", ["", "[\n]\n", "{\n}\n"])
def test_no_subsystem_is_an_empty_list(text):
    assert parse.parse_list_subsys(text, "2.3") == []


@pytest.mark.parametrize(
    "text",
    [
        "something else entirely",
        "{}",
        '{"error":"boom"}',
        '{"Devices":{}}',
        '{"Devices":[{"Name":"nvme0n1"}]}',
        '{"Devices":[{"DevicePath":"/dev/nvme0n1"}]}',
        '{"Devices":[{"Subsystems":[{"SubsystemNQN":"n","Namespaces":[{"NameSpace":"x"}]}]}]}',
        '{"Devices":["nvme0n1"]}',
        "[]",
    ],
)
def test_unknown_list_is_an_error_with_the_version(text):
    with pytest.raises(UnknownOutputError, match=r"nvme list of nvme-cli 9\.9") as caught:
        parse.parse_list(text, "9.9")
    assert caught.value.version == "9.9"


@pytest.mark.parametrize(
    "text", ["gibberish", '[{"HostNQN":"h"}]', '{"Devices":[]}', '[{"Subsystems":[{"Name":"x"}]}]']
)
def test_unknown_list_subsys_is_an_error_with_the_version(text):
    with pytest.raises(UnknownOutputError, match=r"nvme list-subsys of nvme-cli 9\.9"):
        parse.parse_list_subsys(text, "9.9")


@pytest.mark.parametrize("text", ["gibberish", "{}", '{"records":[{"trtype":"tcp"}]}', "[]"])
def test_unknown_discovery_is_an_error_with_the_version(text):
    with pytest.raises(UnknownOutputError, match=r"nvme discover of nvme-cli 9\.9"):
        parse.parse_discovery(text, "9.9")


@pytest.mark.parametrize("name", LISTS)
def test_cut_off_output_is_never_a_shorter_list(name):
    text = recorded(name).rstrip()
    for end in range(1, len(text), 7):
        with pytest.raises(UnknownOutputError):
            parse.parse_list(text[:end], "x")


def test_an_empty_list_inside_of_cut_off_output_is_not_the_result():
    text = '[\n  {\n    "HostNQN":"h",\n    "Subsystems":[\n    ]'

    with pytest.raises(UnknownOutputError):
        parse.parse_list_subsys(text, "x")


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
def test_version(text, version):
    assert parse.parse_version(text) == version


def test_error_text_of_json():
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
def test_address(text, address):
    assert parse_address(text) == address


def test_address_reaches():
    there = FabricAddress("fd00::1", "4420", "", "eth1", "fd00::9")

    assert there.reaches(FabricAddress("fd00:0:0::1", "4420"))
    assert there.reaches(FabricAddress("fd00::1", "4420", host_traddr="fd00:0::9"))
    assert there.reaches(FabricAddress("fd00::1", "4420", host_iface="eth1"))
    assert not there.reaches(FabricAddress("fd00::1", "4421"))
    assert not there.reaches(FabricAddress("fd00::2", "4420"))
    assert not there.reaches(FabricAddress("fd00::1", "4420", host_iface="eth0"))
    assert not there.reaches(FabricAddress("fd00::1", "4420", host_traddr="fd00::8"))
