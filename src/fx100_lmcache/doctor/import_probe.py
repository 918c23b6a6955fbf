"""Import classes as LMCache would, and say how that went; run by ``loading.py``.

``python -m fx100_lmcache.doctor.import_probe MODULE CLASS BASE ...``, BASE as ``module:Class``.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import Any

MARK = "FX100-IMPORT "
"""Starts the line with the answer: importing LMCache may print lines of its own."""


def probe(module_path: str, class_name: str, base: str) -> dict[str, Any]:
    """Import one class.

    Returns
    -------
    dict
        ``outcome``: ``ok``, ``no module``, ``import failed``, ``no class``, ``wrong base`` or
        ``no base``; ``detail``: the error; ``names``: classes that the module does have.
    """
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # noqa: BLE001 - whatever it is, LMCache would log it and go on
        missing = isinstance(error, ModuleNotFoundError) and _is_part(error.name, module_path)
        return _answer("no module" if missing else "import failed", _text(error))
    names = sorted(name for name, value in vars(module).items() if isinstance(value, type))
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        return _answer("no class", "", names)
    base_module, _, base_name = base.partition(":")
    try:
        wanted = getattr(importlib.import_module(base_module), base_name)
    except (ImportError, AttributeError) as error:
        return _answer("no base", _text(error))
    if not issubclass(found, wanted):
        return _answer("wrong base", base_name, names)
    return _answer("ok", "")


def _is_part(missing: str | None, module_path: str) -> bool:
    """Whether what is missing is the module itself, or a package on the way to it."""
    return missing is not None and f"{module_path}.".startswith(f"{missing}.")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _answer(outcome: str, detail: str, names: list[str] | None = None) -> dict[str, Any]:
    return {"outcome": outcome, "detail": detail, "names": names or []}


def main(arguments: list[str]) -> None:
    """Probe each triple of arguments, and print all answers on one line."""
    warnings.simplefilter("ignore")
    triples = zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True)
    answers = [probe(*triple) for triple in triples]
    sys.stdout.write(f"\n{MARK}{json.dumps(answers)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
