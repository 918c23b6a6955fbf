"""Variables of the environment in the file: expanded, or refused where that is not meant."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fx100_lmcache.config import Config, ConfigError, load, parse
from fx100_lmcache.config.errors import is_path
from fx100_lmcache.config.variables import expand

FILE = Path("/etc/fx100/volume.yaml")
ENVIRONMENT = {"KV_DIR": "/srv/kv", "SIZE": "4MiB", "EMPTY": "", "_x1": "a", "HOSTILE": "a: [b]#$q"}
NQN = "nqn.2024-01.com.example:"


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("${KV_DIR}/m0", "/srv/kv/m0"),
        ("a${_x1}${_x1}b", "aaab"),
        ("${HOSTILE}", "a: [b]#$q"),
        ("$${KV_DIR}", "${KV_DIR}"),
        ("$$${KV_DIR}", "$${KV_DIR}"),
        ("costs 5$", "costs 5$"),
        ("$", "$"),
        ("$/a", "$/a"),
        ("$5", "$5"),
        ("}{", "}{"),
    ],
)
@pytest.mark.parametrize("in_path", [True, False])
def test_what_stands_for_a_variable(text: str, expanded: str, in_path: bool) -> None:
    assert expand(text, ENVIRONMENT, in_path=in_path) == expanded


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${NOWHERE}/m0", "variable NOWHERE is not set in the environment"),
        ("${EMPTY}/m0", "variable EMPTY is empty in the environment"),
        ("${KV_DIR", "without a plain name and }"),
        ("${", "without a plain name and }"),
        ("${}", "without a plain name and }"),
        ("${KV_DIR:-/tmp}", "there are no defaults"),
        ("${ KV_DIR }", "without a plain name"),
        ("${5}", "without a plain name"),
        ("${a${KV_DIR}}", "without a plain name"),
    ],
)
@pytest.mark.parametrize("in_path", [True, False])
def test_what_is_refused(text: str, words: str, in_path: bool) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        expand(text, ENVIRONMENT, in_path=in_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["$KV_DIR/m0", "/a/$b", "$_x1"])
def test_a_variable_without_braces_is_refused_in_paths_alone(text: str) -> None:
    with pytest.raises(ValueError, match=r"without braces: write \$\{NAME\}"):
        expand(text, ENVIRONMENT, in_path=True)
    assert expand(text, ENVIRONMENT) == text
    assert expand(text.replace("$", "$$"), ENVIRONMENT, in_path=True) == text
    assert expand(text.replace("$", "$$"), ENVIRONMENT) == text.replace("$", "$$")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.sampled_from("${}aK_ /"), max_size=12), st.booleans())
def test_nothing_that_looks_like_a_variable_is_left_by_mistake(text: Any, in_path: Any) -> None:
    """Every ``${`` in the result was written ``$${``, whatever else stands there."""
    try:
        result = expand(text, {"a": "x", "K": "y", "aK": "z"}, in_path=in_path)
    except ValueError:
        return
    assert result.count("${") == text.count("$${")


def problems(text: Any, environment: Any = ENVIRONMENT) -> Any:
    with pytest.raises(ConfigError) as caught:
        parse(text, FILE, environment)
    return [(each.where, each.line, each.allowed) for each in caught.value.problems]


def test_paths_sizes_addresses_names_and_tags_are_expanded() -> None:
    text = f"""
volume: {{members: [{{path: '${{KV_DIR}}/m0', size: '${{SIZE}}'}}, {{path: relative/$$x}}]}}
identity: {{namespaces: {{m: "${{REVISION}}"}}, default_model_tag: a$b}}
nvme:
  host_nqn: {NQN}${{HOST}}
  host_id: ${{HOST_ID}}
  subsystems:
  - {{subsystem_nqn: "{NQN}cost$$of$a", addresses: [{{traddr: "${{ARRAY}}"}}],
     dhchap_secret_file: "~/${{HOST}}.key"}}
"""
    host_id = "3b6f1c52-9d1e-4a57-9f53-2f1f0a6c7d11"
    more = {"REVISION": "2025-07", "HOST": "h1", "HOST_ID": host_id, "ARRAY": "192.0.2.1"}

    config = parse(text, FILE, ENVIRONMENT | more)

    assert [member.path for member in config.volume.members] == [
        Path("/srv/kv/m0"),
        FILE.parent / "relative/$x",
    ]
    assert config.volume.members[0].size_bytes == 4 << 20
    assert config.identity.model_tags == {"m": "2025-07"}
    assert config.identity.default_model_tag == "a$b"
    assert config.nvme is not None
    assert (config.nvme.host_nqn, config.nvme.host_id) == (f"{NQN}h1", host_id)
    [subsystem] = config.nvme.subsystems
    assert subsystem.subsystem_nqn == f"{NQN}cost$$of$a"
    assert subsystem.addresses[0].traddr == "192.0.2.1"
    assert subsystem.dhchap_secret_file == Path.home() / "h1.key"


def test_an_unknown_variable_is_named_with_its_field_and_line() -> None:
    text = (
        "volume:\n  members:\n  - path: ${KV_DIR}/m0\n  - path: ${KV_DRI}/m1\n  - path: $KV_DIR\n"
    )
    first, second = problems(text)
    assert first[:2] == ("volume.members[1].path", 4)
    assert "variable KV_DRI is not set" in first[2]
    assert second[:2] == ("volume.members[2].path", 5)
    assert "$ without braces" in second[2]


def test_no_directory_is_made_in_the_name_of_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KV_DIR", raising=False)
    file = tmp_path / "fx100.yaml"
    file.write_text("volume: {members: [{path: '${KV_DIR}/m0', size: 4MiB}]}")
    with pytest.raises(ConfigError, match="variable KV_DIR is not set"):
        load(file)
    monkeypatch.setenv("KV_DIR", str(tmp_path / "kv"))
    assert load(file).volume.members[0].path == tmp_path / "kv" / "m0"


def test_a_variable_in_a_name_is_refused() -> None:
    """It would tell apart nothing: no model has that name."""
    [(where, line, allowed)] = problems("identity:\n  model_tags: {'${MODEL}': a}\n")
    assert (where, line) == ("identity.model_tags.${MODEL}", 2)
    assert "is for values only" in allowed


def test_a_value_of_the_environment_is_never_yaml() -> None:
    text = "volume: {members: [{path: a}]}\nidentity: {default_model_tag: '${HOSTILE}'}"
    assert parse(text, FILE, ENVIRONMENT).identity.default_model_tag == "a: [b]#$q"


@pytest.mark.parametrize(
    "text",
    [
        "volume: &a {members: [*a]}\n",
        "a: &a ['${KV_DIR}', x]\n"
        + "".join(f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip(
            "abcdefghijkl", "bcdefghijklm", strict=True)),
    ],
    ids=["a loop", "a billion laughs"],
)  # fmt: skip
def test_aliases_neither_hang_nor_recurse(text: Any) -> None:
    assert problems(text)


def test_every_path_of_the_models_is_known_as_one() -> None:
    found = {
        place
        for place in (
            ("volume", "members", 0, "path"),
            ("volume", "members", 0, "size"),
            ("volume", "shards"),
            ("nvme", "subsystems", 1, "dhchap_secret_file"),
            ("nvme", "subsystems", 1, "subsystem_nqn"),
            ("nvme", "host_nqn"),
            ("identity", "model_tags", "path"),
            ("identity", "default_model_tag"),
            ("metrics", "host"),
            (),
            ("nothing",),
        )
        if is_path(Config, place)
    }
    assert found == {
        ("volume", "members", 0, "path"),
        ("nvme", "subsystems", 1, "dhchap_secret_file"),
    }
