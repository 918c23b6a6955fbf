"""From a YAML file to a `Config`, or to one `ConfigError` with everything that is wrong."""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fx100_lmcache.config.errors import (
    ConfigError,
    Place,
    Problem,
    dotted,
    is_path,
    problems_of,
    renamed,
    shown,
)
from fx100_lmcache.config.model import Config
from fx100_lmcache.config.variables import expand

log = logging.getLogger(__name__)

_TEXT = "tag:yaml.org,2002:str"
MAX_FILE_BYTES = 1 << 20
"""No honest configuration comes near it; a device or a log given by mistake does."""


def load(path: str | Path) -> Config:
    """Read and check a configuration file.

    Parameters
    ----------
    path
        The YAML file. Relative paths inside it are relative to its directory, and ``${NAME}`` in
        a text value is a variable of the environment (see `variables`).

    Returns
    -------
    Config
        Frozen, with every default filled in.

    Raises
    ------
    ConfigError
        For every failure, from a missing file to a wrong value.
    """
    file = Path(path)
    return parse(_read(file), file)


def parse(text: str, file: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Check the `text` of the configuration file `file`; see `load`."""
    try:
        node, data, unknown = _yaml(text, environment)
    except yaml.YAMLError as error:
        raise ConfigError(file, [_syntax_problem(error)]) from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(file, [Problem("", None, f"cannot be read as YAML: {error}")]) from error
    if unknown:
        raise ConfigError(file, unknown)
    if data is None:
        allowed = "is empty: it needs at least volume.members"
        raise ConfigError(file, [Problem("", None, allowed)])
    if not isinstance(data, dict):
        allowed = "must hold a mapping of sections, such as volume: and io:"
        raise ConfigError(file, [Problem("", shown(data), allowed)])
    try:
        config = Config.model_validate(
            data, context={"base_dir": file.absolute().parent}, by_alias=True, by_name=False
        )
    except ValidationError as error:
        problems = [
            Problem(found.where, found.value, found.allowed, _line(node, place))
            for place, found in problems_of(error, Config)
        ]
        raise ConfigError(file, problems) from error
    for place, name in renamed(data, Config):
        log.warning(
            "%s: %s (line %s) is now called %s: rename it, the old name ends with the next version",
            file,
            dotted(place),
            _line(node, place),
            name,
        )
    return config


def _read(file: Path) -> str:
    try:
        if file.is_dir():
            raise ConfigError(file, [Problem("", None, "is a directory: name the YAML file in it")])
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(file, [Problem("", None, f"cannot be read: {reason}")]) from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(file, [Problem("", None, "is larger than 1MiB: not a configuration")])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem("", None, f"is not UTF-8 text: see byte {error.start}")
        raise ConfigError(file, [problem]) from error


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values instead of 1.1's, and no key twice.

    In YAML 1.1 ``yes`` is a boolean, ``010`` is eight, ``1:30`` is ninety and ``2026-01-01`` is
    a date. Here all four are text, which a field then accepts or refuses by its own rule.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                what = f"field {key.value!r} is given twice, first in line {lines[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            lines[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}  # forget YAML 1.1
for _tag, _pattern, _first in (
    ("null", r"~|null|", "~n"),
    ("bool", r"true|false", "tf"),
    ("int", r"-?(?:0|[1-9][0-9]{0,19})", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]{0,19})\.[0-9]{1,20}", "-0123456789"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first]
    )
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])


def _yaml(text: str, environment: Mapping[str, str]) -> tuple[yaml.Node | None, Any, list[Problem]]:
    """Return the syntax tree, which knows the lines, the data, and what is wrong with variables."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None, []
        problems = _expand_all(node, environment)
        return node, loader.construct_document(node), problems
    finally:
        loader.dispose()


def _expand_all(root: yaml.Node, environment: Mapping[str, str]) -> list[Problem]:
    """Expand the variables in all text values; a value with an alias is visited once."""
    problems: list[Problem] = []
    seen: set[int] = set()
    left: list[tuple[yaml.Node, Place]] = [(root, ())]
    while left:
        node, place = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            problems += [_in_name(key, place) for key, _ in node.value if _has_variable(key)]
            pairs = [(value, (*place, str(key.value))) for key, value in node.value]
            left += reversed(pairs)
        elif isinstance(node, yaml.SequenceNode):
            left += reversed([(item, (*place, at)) for at, item in enumerate(node.value)])
        elif node.tag == _TEXT:
            try:
                node.value = expand(node.value, environment, in_path=is_path(Config, place))
            except ValueError as error:
                line = node.start_mark.line + 1
                problems.append(Problem(dotted(place), shown(node.value), str(error), line))
    return problems


def _has_variable(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and "${" in key.value


def _in_name(key: yaml.Node, place: Place) -> Problem:
    allowed = "is a name, and ${NAME} is for values only: write the name out"
    return Problem(dotted((*place, key.value)), None, allowed, key.start_mark.line + 1)


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    line = None if mark is None else mark.line + 1
    return Problem("", None, f"is not valid YAML: {what}", line)


def _line(node: yaml.Node | None, place: Place) -> int | None:
    """Return the line of `place`, or of the nearest section around it."""
    line = None
    for key in place:
        found: tuple[yaml.Node, yaml.Node] | None = None
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == str(key)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            found = (node.value[key],) * 2 if key < len(node.value) else None
        if found is None:
            return line
        line, node = found[0].start_mark.line + 1, found[1]
    return line
