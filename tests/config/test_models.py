from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fx100_lmcache.config import (
    Config,
    ConfigError,
    DeadlineConfig,
    IdentityConfig,
    IoConfig,
    MemberConfig,
    NvmeNamespace,
    NvmeSubsystem,
    SpaceConfig,
    VolumeConfig,
    load,
)
from fx100_lmcache.config.section import Section

NGUID = "6c8f2a104b5d4e6f8a9b000000000001"


def minimal() -> Config:
    return Config(volume=VolumeConfig(members=(MemberConfig(path=Path("/dev/null")),)))


def write(folder: Path, text: str) -> Path:
    file = folder / "volume.yaml"
    file.write_text(text)
    return file


def test_defaults_are_those_of_the_design() -> None:
    config = minimal()
    assert config.volume.shards == 1
    assert config.volume.object_bytes == 8_126_464
    assert config.volume.inode_bytes == 1024
    assert config.stripe.width == "all"
    assert (config.io.reader_threads, config.io.writer_threads) == (16, 4)
    assert (config.io.max_io_bytes, config.io.read_in_flight_bytes) == (2 << 20, 8 << 20)
    assert config.io.max_write_bytes == 8 << 30
    assert config.deadlines.store_s <= 60
    assert config.deadlines.stuck_io_s < 600
    assert config.space.reserve_fraction == 0.03
    assert config.nvme is None
    assert config.metrics.host == "127.0.0.1"


def test_every_field_is_described() -> None:
    known = Section.__subclasses__()  # with those of acceptance, if another test has loaded them
    sections = [each for each in known if each.__module__.startswith("fx100_lmcache.config.")]
    assert len(sections) == 15
    for section in sections:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_admission_is_one_of_two_words(tmp_path: Path) -> None:
    text = "volume: {members: [{path: a}]}\ninprocess: {admission: %s}"
    assert minimal().inprocess.admission == "all"
    config = load(write(tmp_path, text % "second_touch"))
    assert config.inprocess.admission == "second_touch"
    with pytest.raises(ConfigError, match="admission"):
        load(write(tmp_path, text % "third_touch"))


def test_configuration_is_frozen() -> None:
    config = minimal()
    with pytest.raises(ValidationError, match="frozen"):
        config.io.engine = "python"
    assert isinstance(config.volume.members, tuple)


def test_paths_are_relative_to_the_file_and_home_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.chdir("/")
    text = "volume: {members: [{path: a/../b}, {path: ~/c}, {path: /d}]}"
    members = load(write(tmp_path, text)).volume.members
    assert [member.path for member in members] == [tmp_path / "b", Path("/home/user/c"), Path("/d")]


def test_a_relative_file_name_still_gives_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "volume: {members: [{path: a}]}")
    monkeypatch.chdir(tmp_path)
    assert load("volume.yaml").volume.members[0].path == tmp_path / "a"


def test_links_keep_their_name_and_are_seen_through(tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    (tmp_path / "by-id").symlink_to("disk")
    file = write(tmp_path, "volume: {members: [{path: by-id}]}")
    assert load(file).volume.members[0].path == tmp_path / "by-id"
    with pytest.raises(ValidationError, match=r"same as volume.members\[0\]"):
        VolumeConfig(
            members=(
                MemberConfig(path=tmp_path / "disk"),
                MemberConfig(path=tmp_path / "by-id"),
            )
        )


@pytest.mark.parametrize(
    "written",
    [
        NGUID,
        NGUID.upper(),
        "6c8f2a10-4b5d-4e6f-8a9b-000000000001",
        "6c:8f:2a:10:" + NGUID[8:],
    ],
)
def test_nguid_is_normalised(written: Any) -> None:
    assert NvmeNamespace(nguid=written).nguid == NGUID


def test_names_of_a_namespace() -> None:
    by_number = NvmeNamespace(subsystem_nqn="nqn.2024-01.com.example:a", nsid=3)
    assert by_number.names() == {("nsid", "3 of nqn.2024-01.com.example:a")}
    assert NvmeNamespace(nguid=NGUID, nsid=3).names() == {("nguid", NGUID)}


def test_namespace_of_a_model() -> None:
    identity = IdentityConfig(model_tags={"m": "r1"}, default_model_tag="d")
    assert (identity.tag_of("m"), identity.tag_of("x")) == ("r1", "d")
    strict = IdentityConfig(model_tags={"m": "r1"}, require_model_tag=True)
    assert (strict.tag_of("m"), strict.tag_of("x")) == ("r1", None)


def test_python_takes_the_names_with_units() -> None:
    assert IoConfig(max_io_bytes=128 << 10).max_io_bytes == 128 << 10
    assert DeadlineConfig(load_s="500ms").load_s == 0.5  # type: ignore[arg-type]
    assert SpaceConfig(reserve_fraction=0, trigger_watermark=0.99).reserve_fraction == 0.0


def test_loop_needs_no_address() -> None:
    subsystem = NvmeSubsystem(subsystem_nqn="nqn.2024-01.com.example:a", transport="loop")
    assert subsystem.addresses == ()


@pytest.mark.parametrize("nothing", ["0", "0s", '"0"', "0.0"])
def test_waiting_at_the_start_can_be_off(tmp_path: Path, nothing: str) -> None:
    text = f"volume: {{members: [{{path: a}}]}}\ndeadlines: {{start: {nothing}}}"
    assert load(write(tmp_path, text)).deadlines.start_s == 0.0


def test_whole_file_with_every_section(tmp_path: Path) -> None:
    text = """
volume:
  members:
    - {path: a, size: 1GiB}
    - nvme: {subsystem_nqn: "nqn.2024-01.com.example:a", nsid: 1}
  shards: 8
  object: 62MiB
  inode: 2KiB
  bytes_per_inode: 1MiB
stripe: {width: 1}
io: {reader_threads: 32, writer_threads: 8, max_io: 2MiB,
     max_write_in_flight: 1GiB, engine: python, direct: "off"}
deadlines: {load: 5, store: 30s, close: 2.5, pin_ttl: 2m, claim_check: 500ms,
            probe_interval: 2s, stuck_io: 4m, start: 1m}
space: {reserve_fraction: 0.05, evict_batch_fraction: 0.02, trigger_watermark: 0.8,
        eviction_ratio: 0.1}
claim: {heartbeat: 1s, watch: 30s}
identity: {namespaces: {a: 2026-01-01, b: yes}, default_model_tag: x, require_model_tag: true}
inprocess: {shard_base: 4}
nvme:
  subsystems:
    - subsystem_nqn: nqn.2024-01.com.example:a
      transport: rdma
      addresses: [{traddr: "fe80::1"}, {traddr: array.example, trsvcid: 4421}]
      dhchap_secret_file: key
metrics: {enabled: false, port: 9000, host: "::1"}
"""
    config = load(write(tmp_path, text))
    assert config.volume.members[0].size_bytes == 1 << 30
    assert config.volume.object_bytes == 62 << 20
    assert config.stripe.width == 1
    assert (config.io.engine, config.io.direct) == ("python", "off")
    assert (config.deadlines.load_s, config.deadlines.claim_check_s) == (5.0, 0.5)
    assert config.deadlines.stuck_io_s == 240.0
    assert (config.claim.heartbeat_s, config.claim.watch_s) == (1.0, 30.0)
    assert config.deadlines.start_s == 60.0
    assert config.identity.model_tags == {"a": "2026-01-01", "b": "yes"}
    assert config.inprocess.shard_base == 4
    assert config.nvme is not None
    assert config.nvme.subsystems[0].addresses[1].trsvcid == 4421
    assert config.nvme.subsystems[0].dhchap_secret_file == tmp_path / "key"


def test_old_names_of_fields_work_and_warn_with_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = (
        "volume: {members: [{path: a}]}\n"
        "identity:\n"
        "  namespaces: {m: r1}\n"
        "  default_namespace: d\n"
        "  require_namespace: true\n"
    )
    identity = load(write(tmp_path, text)).identity
    assert identity == IdentityConfig(
        model_tags={"m": "r1"}, default_model_tag="d", require_model_tag=True
    )
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 3
    assert "identity.namespaces (line 3) is now called model_tags" in warned[0]


def test_todays_names_of_fields_do_not_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "volume: {members: [{path: a}]}\nidentity: {model_tags: {namespaces: r1}}\n"
    assert load(write(tmp_path, text)).identity.tag_of("namespaces") == "r1"
    assert not caplog.records
