"""Small real volumes: a YAML and preallocated files, formatted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fx100_lmcache.config import load
from fx100_lmcache.volume.format import format_members, plan_format


def file_volume(
    directory: Path,
    *,
    members: int = 2,
    size: str = "8MiB",
    volume: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """Write ``fx100.yaml`` and the member files ``m0``, ``m1`` and so on, and format them.

    Parameters
    ----------
    directory : Path
        Absolute; made if it is not there.
    size : str
        Of each member, as YAML has it.
    volume : mapping or None
        Rest of the section ``volume``, such as ``object``.
    sections
        The other sections of the YAML.

    Returns
    -------
    Path
        The YAML.
    """
    directory.mkdir(parents=True, exist_ok=True)
    listed = [{"path": str(directory / f"m{number}"), "size": size} for number in range(members)]
    path = directory / "fx100.yaml"
    path.write_text(yaml.safe_dump({"volume": {"members": listed, **(volume or {})}, **sections}))
    config = load(path)
    for member in format_members(config, plan_format(config)).members:
        member.close()
    return path
