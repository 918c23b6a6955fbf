import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fx100_lmcache.config import Config, ConfigError, load, parse
from fx100_lmcache.errors import FX100Error

ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
FILE = Path("/etc/fx100/volume.yaml")
MEMBER = "volume: {members: [{path: a}]}\n"
NVME = MEMBER + "nvme: {subsystems: [{subsystem_nqn: nqn.2024-01.com.example:a, "
NGUID = "6c8f2a104b5d4e6f8a9b000000000001"


def problems(text: str) -> list[tuple[str, str | None, str, int | None]]:
    with pytest.raises(ConfigError) as caught:
        parse(text, FILE)
    error = caught.value
    assert str(error).startswith(f"{FILE}: {len(error.problems)} problem")
    for problem in error.problems:
        assert str(problem) in str(error)
    return [(p.where, p.value, p.allowed, p.line) for p in error.problems]


# ----- the file itself


@pytest.mark.parametrize(
    ("text", "allowed", "line"),
    [
        ("", "is empty", None),
        ("# nothing but a comment\n", "is empty", None),
        ("---\n...\n", "is empty", None),
        ("null", "is empty", None),
        ("- a\n- b\n", "must hold a mapping of sections", None),
        ("volume", "must hold a mapping of sections", None),
        ("8126464", "must hold a mapping of sections", None),
        ("&a [*a]", "must hold a mapping of sections", None),
        (MEMBER + "io: {engine: auto\n", "is not valid YAML", 3),
        ("volume:\n  members:\n\t- path: a\n", "is not valid YAML", 3),
        (MEMBER + "io: *nowhere\n", "undefined alias 'nowhere'", 2),
        (MEMBER + "io: !!python/object/apply:os.getcwd []\n", "is not valid YAML", 2),
        (MEMBER + "---\nio: {}\n", "is not valid YAML", 2),
        ("volume: {members: [{path: a\0b}]}", "is not valid YAML", None),
        ("{[1]: 2}", "is not valid YAML", 1),
        ("[" * 5000, "cannot be read as YAML", None),
    ],
)
def test_what_is_no_configuration(text: Any, allowed: str, line: int | None) -> None:
    [(where, _, found, found_line)] = problems(text)
    assert where == ""
    assert allowed in found
    assert found_line == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (MEMBER + "io: {engine: auto}\nio: {engine: native}\n", 3),
        (MEMBER + "io:\n  engine: auto\n  max_io: 1MiB\n  engine: native\n", 5),
        ('volume:\n  members:\n    - {path: a, "path": b}\n', 3),
        (MEMBER + "identity: {namespaces: {m: a,\n  m: b}}\n", 3),
    ],
)
def test_a_field_given_twice(text: Any, line: int) -> None:
    [(_, _, allowed, found_line)] = problems(text)
    assert "is given twice, first in line" in allowed
    assert found_line == line


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.yaml.*\n.*No such file"):
        load(tmp_path / "absent.yaml")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path)


def test_file_name_with_a_nul() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load("a\0b")


def test_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "latin1.yaml"
    file.write_bytes(MEMBER.encode() + "# é\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=f"is not UTF-8 text: see byte {len(MEMBER) + 2}"):
        load(file)


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "bom.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + MEMBER.encode())
    assert isinstance(load(file), Config)


def test_a_device_given_by_mistake() -> None:
    with pytest.raises(ConfigError, match="larger than 1MiB"):
        load("/dev/zero")


# ----- one wrong value: (text below a valid volume, YAML path, value as shown, what is allowed)

WRONG_VALUES = [
    ("io: {reader_threads: 0}", "io.reader_threads", "0", "whole number from 1 to 64"),
    ("io: {reader_threads: true}", "io.reader_threads", "True", "whole number"),
    ('io: {reader_threads: "16"}', "io.reader_threads", "'16'", "whole number"),
    ("io: {reader_threads: 16.0}", "io.reader_threads", "16.0", "whole number"),
    ("io: {reader_threads: 010}", "io.reader_threads", "'010'", "whole number"),
    ("io: {reader_threads: }", "io.reader_threads", "null", "whole number"),
    ("io: {reader_threads: 2}", "io.writer_threads", "4", "at most reader_threads"),
    ("io: {max_io: 8MB}", "io.max_io", "'8MB'", "ambiguous"),
    ("io: {max_io: 64KiB}", "io.max_io", "'64KiB'", "from 128KiB to 16MiB"),
    ("io: {max_io: 32MiB}", "io.max_io", "'32MiB'", "from 128KiB to 16MiB"),
    ("io: {max_io: 1000000}", "io.max_io", "1000000", "a multiple of 4096"),
    ("io: {max_io: -1MiB}", "io.max_io", "'-1MiB'", "size such as 8MiB"),
    ("io: {max_write_in_flight: 0}", "io.max_write_in_flight", "0", "greater than zero"),
    ("io: {max_write_in_flight: 4MiB}", "io.max_write_in_flight", "'4MiB'",
     "at least volume.object"),
    ("io: {engine: rust}", "io.engine", "'rust'", "'auto', 'native' or 'python'"),
    ("io: {direct: off}", None, None, None),  # YAML 1.1 would read false here
    ("io: {direct: false}", "io.direct", "False", "'require', 'prefer' or 'off'"),
    ("io: []", "io", "[]", "mapping with fields of direct, engine"),
    ("io:", "io", "null", "or leave it out"),
    ("stripe: {width: every}", "stripe.width", "'every'", "'all' or a whole number from 1 to 16"),
    ("stripe: {width: 0}", "stripe.width", "0", "'all' or a whole number from 1 to 16"),
    ("stripe: {width: true}", "stripe.width", "True", "'all' or a whole number"),
    ("stripe: {width: 2}", "stripe.width", "2", "at most the number of members, 1"),
    ("deadlines: {store: 61}", "deadlines.store", "61", "from 0.01s to 60s"),
    ("deadlines: {store: 2m}", "deadlines.store", "'2m'", "from 0.01s to 60s"),
    ("deadlines: {start: 11m}", "deadlines.start", "'11m'", "from 0s to 600s"),
    ("deadlines: {start: -1}", "deadlines.start", "-1", "must be a duration"),
    ("deadlines: {start: false}", "deadlines.start", "False", "must be a duration"),
    ("deadlines: {load: 0}", "deadlines.load", "0", "greater than zero"),
    ("deadlines: {load: -2s}", "deadlines.load", "'-2s'", "must be a duration"),
    ("deadlines: {load: 1:30}", "deadlines.load", "'1:30'", "must be a duration"),
    ("deadlines: {load: 2h}", "deadlines.load", "'2h'", "use ms, s, m"),
    ("deadlines: {load: .inf}", "deadlines.load", "'.inf'", "must be a duration"),
    ("deadlines: {close: 11s}", "deadlines.close", "'11s'", "to 10s"),
    ("deadlines: {stuck_io: 10m}", "deadlines.stuck_io", "'10m'", "to 599s"),
    ("claim: {watch: 14s}", "claim.watch", "14.0", "at least 5 heartbeats, here 15s"),
    ("claim: {watch: 1s, heartbeat: 100ms}", "claim.watch", "'1s'", "from 5s"),
    ("claim: {heartbeat: 61s}", "claim.heartbeat", "'61s'", "to 60s"),
    ("deadlines: {stuck_io: 30s}", "deadlines.stuck_io", "30.0", "at least load and store"),
    ("space: {reserve_fraction: 0.6}", "space.reserve_fraction", "0.6", "from 0 to 0.5"),
    ("space: {reserve_fraction: 3%}", "space.reserve_fraction", "'3%'", "from 0 to 0.5"),
    ("space: {evict_batch_fraction: 0}", "space.evict_batch_fraction", "0", "from 0.0001 to 0.25"),
    ("space: {trigger_watermark: 0.98}", "space.trigger_watermark", "0.98", "1 - reserve_fraction"),
    ("space: {eviction_ratio: 0.9}", "space.eviction_ratio", "0.9", "from 0.001 to 0.5"),
    ("identity: {model_tags: {m: 1.0}}", "identity.model_tags.m", "1.0", "put it in quotes"),
    ("identity: {model_tags: {1: a}}", "identity.model_tags.1", "1", "put it in quotes"),
    ("identity: {model_tags: [m]}", "identity.model_tags", "['m']", "mapping of names to text"),
    ("identity: {require_model_tag: yes}", "identity.require_model_tag", "'yes'", "true or false"),
    ("inprocess: {shard_base: 1}", "inprocess.shard_base", "1", "below volume.shards, 1"),
    ("inprocess: {shard_base: -1}", "inprocess.shard_base", "-1", "from 0 to 63"),
    ("metrics: {port: 65536}", "metrics.port", "65536", "from 1 to 65535"),
    ("metrics: {host: 127.0.0.256}", "metrics.host", "'127.0.0.256'", "IPv4 address"),
    ("metrics: {host: --bind}", "metrics.host", "'--bind'", "IPv4 address"),
    ("nvme: {}", "nvme.subsystems", None, "is required"),
    ("nvme: {subsystems: []}", "nvme.subsystems", None, "1 to 16 subsystems"),
    ("nvme: {subsystems: {}}", "nvme.subsystems", "{}", "must be a list"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "value", "allowed"), WRONG_VALUES)
def test_wrong_value(text: Any, where: Any, value: Any, allowed: Any) -> None:
    if where is None:
        assert isinstance(parse(MEMBER + text, FILE), Config)
        return
    [(found_where, found_value, found_allowed, line)] = problems(MEMBER + text)
    assert (found_where, found_value) == (where, value)
    assert allowed in found_allowed
    assert line == 2


WRONG_VOLUMES = [
    ("volume: {}", "volume.members", None, "is required"),
    ("volume: {members: []}", "volume.members", None, "list of 1 to 16 members"),
    ("volume: {members: a}", "volume.members", "'a'", "must be a list"),
    ("volume: {members: {path: a}}", "volume.members", "{'path': 'a'}", "must be a list"),
    ("volume: {members: [a]}", "volume.members[0]", "'a'",
     "mapping with fields of nvme, path, size"),
    ("volume: {members: [{}]}", "volume.members[0]", None, "exactly one of path and nvme"),
    ("volume: {members: [{path: }]}", "volume.members[0]", None, "exactly one of path and nvme"),
    ('volume: {members: [{path: ""}]}', "volume.members[0].path", "''", "must be a path"),
    ("volume: {members: [{path: ~no-such-user-1/a}]}", "volume.members[0].path",
     "'~no-such-user-1/a'",
     "no such user's home"),
    ("volume: {members: [{path: a}, {path: b}, {path: 7}]}", "volume.members[2].path", "7",
     "a path"),
    ("volume: {members: [{path: a}, {path: ./b/../a}]}", "volume.members[1].path", "'/etc/fx100/a'",
     "same as volume.members[0]"),
    ("volume: {members: [{path: a, size: 0}]}", "volume.members[0].size", "0", "greater than zero"),
    ("volume: {members: [{path: a, size: 5000000}]}", "volume.members[0].size", "5000000",
     "multiple"),
    (f"volume: {{members: [{{path: a, nvme: {{nguid: {NGUID}}}}}]}}", "volume.members[0]", None,
     "exactly one of path and nvme"),
    (f"volume: {{members: [{{nvme: {{nguid: {NGUID}}}, size: 1GiB}}]}}", "volume.members[0].size",
     "1073741824", "for files only"),
    ("volume: {members: [{nvme: {}}]}", "volume.members[0].nvme", None,
     "needs nguid, eui64 or uuid"),
    ("volume: {members: [{nvme: {nsid: 1}}]}", "volume.members[0].nvme", None,
     "together with nsid"),
    ("volume: {members: [{nvme: {subsystem_nqn: nqn.2024-01.x:a}}]}",
     "volume.members[0].nvme", None,
     "together with nsid"),
    ("volume: {members: [{nvme: {subsystem_nqn: array1, nsid: 1}}]}",
     "volume.members[0].nvme.subsystem_nqn", "'array1'", "NVMe qualified name"),
    ("volume: {members: [{nvme: {nguid: 12}}]}", "volume.members[0].nvme.nguid", "12", "in quotes"),
    ('volume: {members: [{nvme: {nguid: "12"}}]}', "volume.members[0].nvme.nguid", "'12'",
     "32 hexadecimal digits"),
    ('volume: {members: [{nvme: {eui64: "00-00-00-00-00-00-00-00"}}]}',
     "volume.members[0].nvme.eui64", "'00-00-00-00-00-00-00-00'", "is all zero"),
    (f"volume: {{members: [{{nvme: {{nguid: {NGUID}}}}}, {{nvme: {{nguid: {NGUID.upper()}}}}}]}}",
     "volume.members[1].nvme.nguid", f"'{NGUID}'", "same as volume.members[0]"),
    ("volume: {members: [{path: a}], shards: 65}", "volume.shards", "65", "from 1 to 64"),
    ("volume: {members: [{path: a}], object: 1KiB}", "volume.object", "'1KiB'",
     "from 4KiB to 1GiB"),
    ("volume: {members: [{path: a}], inode: 1536}", "volume.inode", "1536", "a power of two"),
    ("volume: {members: [{path: a}], inode: 16KiB}", "volume.inode", "'16KiB'",
     "from 512B to 8KiB"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "value", "allowed"), WRONG_VOLUMES)
def test_wrong_volume(text: Any, where: Any, value: Any, allowed: Any) -> None:
    [(found_where, found_value, found_allowed, line)] = problems(text)
    assert (found_where, found_value) == (where, value)
    assert allowed in found_allowed
    assert line == 1


def test_seventeen_members() -> None:
    members = ", ".join(f"{{path: m{number}}}" for number in range(17))
    [(where, *_)] = problems(f"volume: {{members: [{members}]}}")
    assert where == "volume.members"


WRONG_SUBSYSTEMS = [
    ("transport: tcp}]}", "addresses", None, "tcp needs 1 to 8 addresses"),
    ("transport: fc}]}", "transport", "'fc'", "'tcp', 'rdma' or 'loop'"),
    ("transport: loop, addresses: [{traddr: a}]}]}", "addresses", None, "must be left out"),
    ("addresses: [{}]}]}", "addresses[0].traddr", None, "is required"),
    ("addresses: [{traddr: 1.2.3}]}]}", "addresses[0].traddr", "'1.2.3'", "IPv4 address"),
    ("addresses: [{traddr: 'a,b'}]}]}", "addresses[0].traddr", "'a,b'", "host name"),
    ("addresses: [{traddr: a}, {traddr: a}]}]}", "addresses[1]", "'a'", "listed twice"),
    ('addresses: [{traddr: a, trsvcid: "4420"}]}]}', "addresses[0].trsvcid", "'4420'", "65535"),
    ("addresses: [{traddr: a, host_iface: 'eth 0'}]}]}", "addresses[0].host_iface", "'eth 0'",
     "an interface name"),
    ("transport: rdma, addresses: [{traddr: a, host_iface: eth0}]}]}", "addresses[0].host_iface",
     "'eth0'", "for transport tcp only"),
    ("addresses: [{traddr: a}], fast_io_fail: 6}]}", "fast_io_fail", "6", "from 1s to 5s"),
    ("addresses: [{traddr: a}], fast_io_fail: 1500ms}]}", "fast_io_fail", "'1500ms'",
     "whole seconds"),
    ("addresses: [{traddr: a}], ctrl_loss_timeout: 1}]}", "reconnect_delay", "2",
     "at most ctrl_loss_timeout"),
    ("addresses: [{traddr: a}], queue_size: 8}]}", "queue_size", "8", "from 16 to 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "value", "allowed"), WRONG_SUBSYSTEMS)
def test_wrong_subsystem(text: Any, where: Any, value: Any, allowed: Any) -> None:
    [(found_where, found_value, found_allowed, line)] = problems(NVME + text)
    assert (found_where, found_value) == (f"nvme.subsystems[0].{where}", value)
    assert allowed in found_allowed
    assert line == 2


@pytest.mark.parametrize(
    ("text", "where", "value", "allowed"),
    [
        ("host_nqn: nqn.2024-01.x:h", "nvme.host_nqn", None, "give both or neither"),
        ("host_id: 3b6f1c52-9d1e-4a57-9f53-2f1f0a6c7d11", "nvme.host_id", None, "both or neither"),
        ("host_nqn: nqn.2024-01.x:h, host_id: x", "nvme.host_id", "'x'", "must be a UUID"),
        ("host_nqn: nqn.2024-01.x:h, host_id: 00000000-0000-0000-0000-000000000000", "nvme.host_id",
         "'00000000-0000-0000-0000-000000000000'", "is all zero"),
    ],
)  # fmt: skip
def test_wrong_host(text: str, where: str, value: str | None, allowed: str) -> None:
    whole = NVME + "transport: loop}], " + text + "}"
    [(found_where, found_value, found_allowed, _)] = problems(whole)
    assert (found_where, found_value) == (where, value)
    assert allowed in found_allowed


# ----- unknown fields


@pytest.mark.parametrize(
    ("text", "where", "suggestion"),
    [
        ("deadline: {}", "deadline", "'deadlines'"),
        ("io: {reader_thread: 4}", "io.reader_thread", "'reader_threads'"),
        ("io: {max_io_bytes: 4096}", "io.max_io_bytes", "'max_io'"),
        ("deadlines: {load_s: 4}", "deadlines.load_s", "'load'"),
        ("identity: {model_tag: {}}", "identity.model_tag", "'model_tags'"),
        ("'*': {}", "*", None),
        ("nvme: {subsystems: [{subsystem_nqn: nqn.2024-01.x:a, transport: loop, adresses: []}]}",
         "nvme.subsystems[0].adresses", "'addresses'"),
    ],
)  # fmt: skip
def test_unknown_field(text: str, where: str, suggestion: str | None) -> None:
    [(found_where, value, allowed, line)] = problems(MEMBER + text)
    assert (found_where, value, line) == (where, None, 2)
    assert "unknown field" in allowed
    assert "Allowed here: " in allowed
    if suggestion:
        assert f"did you mean {suggestion}?" in allowed
    else:
        assert "did you mean" not in allowed


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("identity: {namespaces: {m: 5}}", "identity.namespaces.m", "must be text"),
        ("identity: {model_tags: {m: 5}}", "identity.model_tags.m", "must be text"),
        ("identity: {require_namespace: 3}", "identity.require_namespace", "true or false"),
        (
            "identity: {namespaces: {}, model_tags: {}}",
            "identity.namespaces",
            "is the old name of 'model_tags', which is given, too",
        ),
    ],
)
def test_errors_name_a_field_as_the_file_does(text: str, where: str, words: str) -> None:
    [(found_where, _, allowed, line)] = problems(MEMBER + text)
    assert (found_where, line) == (where, 2)
    assert words in allowed


def test_unknown_field_of_a_member() -> None:
    [(where, _, allowed, line)] = problems("volume:\n  members:\n  - path: a\n    sise: 1GiB\n")
    assert (where, line) == ("volume.members[0].sise", 4)
    assert "did you mean 'size'? Allowed here: path, nvme, size" in allowed


@pytest.mark.parametrize(
    "text",
    [
        "dhchap_secret: 'DHHC-1:00:c2VjcmV0:'",
        "io: {engine: 'DHHC-1:00:c2VjcmV0:'}",
        f"io: {{engine: '{'x' * 500}DHHC-1:00:c2VjcmV0:'}}",
        "io: {secret: hunter2c2VjcmV0}",
        "io: [['DHHC-1:00:c2VjcmV0:']]",
    ],
)
def test_secrets_are_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(MEMBER + text, FILE)
    assert "c2VjcmV0" not in str(caught.value)


# ----- the error itself


def test_everything_wrong_is_told_at_once() -> None:
    text = "volume:\n  members: [{path: 1}]\nio:\n  max_io: 1\n  engin: x\nmetrics: 5\n"
    found = {(where, line) for where, _, _, line in problems(text)}
    assert found == {
        ("volume.members[0].path", 2),
        ("io.max_io", 4),
        ("io.engin", 5),
        ("metrics", 6),
    }


def test_aliases_that_multiply_are_not_written_out() -> None:
    lines = [f"a{level}: &a{level} [{f'*a{level - 1}, ' * 9}]" for level in range(1, 40)]
    text = MEMBER + "a0: &a0 [x]\n" + "\n".join(lines)
    assert len(problems(text)) == 40


def test_long_values_are_shortened() -> None:
    [(_, value, *_)] = problems(MEMBER + f"io: {{engine: {'x' * 5000}}}")
    assert value is not None
    assert len(value) < 200


def test_config_error_is_ours_and_can_be_pickled() -> None:
    with pytest.raises(FX100Error) as caught:
        parse("", FILE)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
SECTIONS = st.sampled_from([*Config.model_fields, "other"])


@ANY_SPEED
@given(st.dictionaries(SECTIONS, YAML_VALUES | st.dictionaries(SECTIONS, YAML_VALUES), max_size=4))
def test_any_document_is_a_config_or_a_config_error(document: Any) -> None:
    with contextlib.suppress(ConfigError):
        parse(yaml.safe_dump(document, allow_unicode=True), FILE)


@ANY_SPEED
@given(st.text())
def test_any_text_is_a_config_or_a_config_error(text: Any) -> None:
    with contextlib.suppress(ConfigError):
        parse(text, FILE)
