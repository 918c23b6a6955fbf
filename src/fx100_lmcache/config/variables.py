"""``${NAME}`` in a text value of the configuration file stands for a variable of the environment.

``$${NAME}`` stands for the text ``${NAME}``, and any other dollar sign for itself (an NQN may hold
one). In a path ``$NAME`` without braces is refused, since no shell reads it: it would silently
become the name of a file. There ``$$NAME`` is a name with a dollar sign. Pure.
"""

import re
from collections.abc import Mapping

_DOLLAR = re.compile(r"\$\$(?=[{A-Za-z_])|\$\{([^}]*)(\}?)|\$(?=[A-Za-z_])")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def expand(text: str, environment: Mapping[str, str], *, in_path: bool = False) -> str:
    """Return `text` with the values of its variables.

    Parameters
    ----------
    in_path : bool
        Whether the value is the path of a file.

    Raises
    ------
    ValueError
        Says what is wrong: a variable that is not set or empty, braces that are not closed, more
        than a name in them, or none in a path.
    """

    def value_of(found: re.Match[str]) -> str:
        if found[0] == "$$":
            escapes = in_path or text[found.end()] == "{"
            return "$" if escapes else "$$"
        if found[0] != "$":
            return _variable(found[1], bool(found[2]), environment)
        if in_path:
            raise ValueError(
                "has a $ without braces: write ${NAME} for a variable of the environment, $$NAME "
                "for a file whose name has a dollar sign"
            )
        return "$"

    return _DOLLAR.sub(value_of, text)


def _variable(name: str, closed: bool, environment: Mapping[str, str]) -> str:
    if not closed or not _NAME.fullmatch(name):
        raise ValueError(
            "has ${ without a plain name and }: write ${NAME} for a variable of the environment "
            "(there are no defaults), $${ for the text ${"
        )
    if not (value := environment.get(name, "")):
        state = "empty" if name in environment else "not set"
        raise ValueError(f"variable {name} is {state} in the environment of this process")
    return value
