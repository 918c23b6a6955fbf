"""JSON of nvme-cli -> plain values. Pure; every shape from 1.13 to 3.x gives the same result.

Text may stand before the JSON, or nothing at all be printed where there is nothing to list. What
is connected is read from sysfs, not asked of nvme-cli (:mod:`fx100_lmcache.nvmf.sysfs`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fx100_lmcache.nvmf.address import FabricAddress, address_of
from fx100_lmcache.nvmf.errors import UnknownOutputError

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
"""The well-known name of every discovery service; 1.x does not know its newer subtype."""

_NOTHING_THERE = re.compile(r"no discovery log entries", re.I)


@dataclass(frozen=True)
class DiscoveryRecord:
    """One entry of a discovery log page: a subsystem that may be reached at an address."""

    subsystem_nqn: str
    transport: str
    address: FabricAddress
    port_id: int | None
    is_discovery: bool


def parse_version(text: str) -> str:
    """Return the version that ``nvme version`` printed, e.g. ``2.3``, or ``unknown``."""
    found = re.search(r"nvme version (\S+)", text)
    return found[1] if found else "unknown"


def parse_discovery(text: str, version: str) -> list[DiscoveryRecord]:
    """Parse ``nvme discover -o json``.

    Raises
    ------
    UnknownOutputError
        If the output has no known shape.
    """
    command = "nvme discover"
    root = find_json(text, command, version)
    if root is None:
        return []
    try:
        return [
            DiscoveryRecord(
                subsystem_nqn=entry["subnqn"],
                transport=entry["trtype"],
                address=address_of(entry),
                port_id=entry.get("portid"),
                is_discovery=entry["subnqn"] == DISCOVERY_NQN
                or "discovery" in entry.get("subtype", ""),
            )
            for entry in root["records"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        what = f"records are not as expected ({error!r})"
        raise UnknownOutputError(command, version, what, text) from error


def error_text(text: str) -> str | None:
    """Return what a failed command of 2.11+ says under the JSON key ``error``."""
    for value in _json_values(text):
        if isinstance(value, dict) and isinstance(value.get("error"), str):
            return str(value["error"]).strip()
    return None


def find_json(text: str, command: str, version: str) -> Any:
    """Return the JSON mapping or list of mappings in `text`, whatever stands around it.

    Returns
    -------
    Any
        None if the command printed nothing, or said that there is nothing.

    Raises
    ------
    UnknownOutputError
        If there is text but no JSON.
    """
    for value in _json_values(text):
        return value
    if not text.strip() or _NOTHING_THERE.search(text):
        return None
    raise UnknownOutputError(command, version, "no JSON in it", text.strip())


def _json_values(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    # Only where a line begins with it: what is indented belongs to a value that was cut off.
    for start in re.finditer(r"^[{\[]", text, re.M):
        try:
            value, _ = decoder.raw_decode(text, start.start())
        except json.JSONDecodeError:
            continue
        # "[1]" in a log line is JSON as well, but no output of a command.
        if isinstance(value, dict) or all(isinstance(item, dict) for item in value):
            yield value
