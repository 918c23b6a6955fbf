"""The one exception of a bad configuration, and how pydantic's findings become readable."""

import difflib
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from fx100_lmcache.errors import FX100Error

Place = tuple[int | str, ...]
"""Keys and list positions from the top of the file, e.g. ``("volume", "members", 2)``."""

_MESSAGES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of names to text",
    "invalid_key": "is not a field name: names are text",
    "missing": "is required",
    "string_type": "must be text: put it in quotes",
    "tuple_type": "must be a list",
}
_SECRET_MARK = "DHHC-1:"  # noqa: S105 - the public prefix of NVMe in-band secrets
_NOTHING = object()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration file.

    Attributes
    ----------
    where : str
        YAML path such as ``volume.members[2].path``; empty for the file as a whole.
    value : str or None
        The offending value, shortened; None where there is none or it may be a secret.
    allowed : str
        What is allowed, or what to do.
    line : int or None
        Line in the file, counted from 1.
    """

    where: str
    value: str | None
    allowed: str
    line: int | None = None

    def __str__(self) -> str:
        place = self.where or "file"
        line = f" (line {self.line})" if self.line else ""
        value = f" = {self.value}" if self.value is not None else ""
        return f"{place}{line}{value}: {self.allowed}"


class ConfigError(FX100Error):
    """A configuration that cannot be used. Its text names the file and every problem found.

    Attributes
    ----------
    file : Path
        The file as it was named by the caller.
    problems : tuple of Problem
        At least one, in the order of the file's sections.
    """

    def __init__(self, file: Path, problems: Sequence[Problem]) -> None:
        super().__init__(file, problems)
        self.file = file
        self.problems = tuple(problems)

    @property
    def what(self) -> str:
        """Every problem on a line of its own, below the name of the file."""
        count = len(self.problems)
        heading = f"{self.file}: {count} problem{'s' if count != 1 else ''} in the configuration"
        return "\n  ".join([heading, *map(str, self.problems)])


def reject(allowed: str, at: Place = (), value: object = _NOTHING) -> NoReturn:
    """Raise from a model's validator, pointing at `at` below that model and showing `value`."""
    context = {"allowed": allowed, "at": at, "value": value}
    raise PydanticCustomError("rejected", "{allowed}", context)


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[tuple[Place, Problem]]:
    """Translate what pydantic found while it validated `model`, without line numbers."""
    return [_problem(details, model) for details in error.errors(include_url=False)]


def dotted(place: Place) -> str:
    """Return ``volume.members[2].path`` for ``("volume", "members", 2, "path")``."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return text.removeprefix(".")


def yaml_names(model: type[BaseModel]) -> dict[str, str]:
    """Map every name of a field, in YAML and in Python, to its name in YAML."""
    names = {}
    for python_name, field in model.model_fields.items():
        yaml_name, *old_names = _names_in_yaml(python_name, field)
        names[python_name] = yaml_name
        names |= dict.fromkeys((yaml_name, *old_names), yaml_name)
    return names


def renamed(data: object, model: type[BaseModel], place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield where data calls a field by an old name, and its name today."""
    for python_name, field in model.model_fields.items():
        today, *old_names = _names_in_yaml(python_name, field)
        here = data if isinstance(data, dict) else {}
        yield from (((*place, name), today) for name in old_names if name in here)
        if (section := _model_in(field.annotation)) is not None:
            yield from renamed(here.get(today), section, (*place, today))


def _names_in_yaml(python_name: str, field: FieldInfo) -> list[str]:
    """Return a field's name in YAML, then its names in older versions."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return [str(name) for name in alias.choices]
    return [str(alias or python_name)]


def is_path(model: type[BaseModel], place: Place) -> bool:
    """Whether the field at `place` below `model` holds the path of a file."""
    fields = _model_at(model, place[:-1]).model_fields.items()
    here = [field for name, field in fields if {*place[-1:]} & {*_names_in_yaml(name, field)}]
    return any(_is_for_paths(field.annotation) for field in here)


def _is_for_paths(annotation: Any) -> bool:
    """Find ``Path`` inside ``Annotated[Path, ...] | None``."""
    return annotation is Path or any(map(_is_for_paths, get_args(annotation)))


def shown(value: object) -> str | None:
    """Return `value` shortened for a message, or None where it may hold a secret."""
    if value is None:
        return "null"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 120
    text = short.repr(value)
    return None if _SECRET_MARK in (value if isinstance(value, str) else text) else text


def _problem(details: ErrorDetails, model: type[BaseModel]) -> tuple[Place, Problem]:
    kind, context = details["type"], details.get("ctx", {})
    place: Place = details["loc"]
    if kind == "invalid_key" or place[-1:] == ("[key]",):  # a number here is no position
        place = tuple(str(key) for key in place if key != "[key]")
    value: str | None = None if kind == "missing" else shown(details["input"])
    allowed = _MESSAGES.get(kind, details["msg"].replace("Input should be", "must be", 1))
    if kind == "value_error":
        allowed = str(context["error"])
    elif kind == "rejected":
        place += context["at"]
        allowed = context["allowed"]
        value = None if context["value"] is _NOTHING else shown(context["value"])
    elif kind == "extra_forbidden":
        # The value of a misspelt field stays out of the message: it may be a secret.
        value, allowed = None, _unknown_field(str(place[-1]), _model_at(model, place[:-1]))
    elif kind == "model_type":
        names = sorted(set(yaml_names(_model_at(model, place)).values()))
        allowed = f"must be a mapping with fields of {', '.join(names)}; or leave it out"
    return place, Problem(dotted(place), value, allowed)


def _unknown_field(name: str, model: type[BaseModel]) -> str:
    names = yaml_names(model)
    if any(place == (name,) for place, _ in renamed({name: None}, model)):
        return f"is the old name of {names[name]!r}, which is given, too: keep that one"
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {names[nearest[0]]!r}? " if nearest else ""
    return f"unknown field: {hint}Allowed here: {', '.join(dict.fromkeys(names.values()))}"


def _model_at(model: type[BaseModel], place: Place) -> type[BaseModel]:
    """Follow the names of `place` down to the section that they lead to."""
    for key in place:
        for python_name, field in model.model_fields.items():
            if key in _names_in_yaml(python_name, field):
                model = _model_in(field.annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Find the section's class inside ``tuple[Section, ...]`` or ``Section | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
