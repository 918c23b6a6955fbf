"""JSON of nvme-cli -> plain values. Pure; every shape from 1.13 to 3.x gives the same result.

``nvme list -o json`` comes flat (1.x, 2.x: one entry per namespace) or nested (``-v``, and the
default of some 2.11+ builds: host, subsystem, controller, namespace); 3.x has a second nested
form in which namespaces hold their paths. Text may stand before the JSON, or nothing at all be
printed where there is nothing to list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fx100_lmcache.nvmf.address import FabricAddress, address_of, parse_address
from fx100_lmcache.nvmf.errors import UnknownOutputError

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
"""The well-known name of every discovery service; 1.x does not know its newer subtype."""

_Object = Mapping[str, Any]
_HIDDEN_PATH = re.compile(r"/dev/nvme\d+c\d+n\d+")
_NOTHING_THERE = re.compile(
    r"no nvme devices? detected|no (nvme )?subsystems? found|no discovery log entries", re.I
)


@dataclass(frozen=True)
class ListedNamespace:
    """One namespace of ``nvme list``.

    Attributes
    ----------
    device : str
        E.g. ``/dev/nvme0n1``.
    nsid : int or None
        None where the version does not print it.
    subsystem_nqn : str or None
        None in the flat form.
    """

    device: str
    nsid: int | None
    size_bytes: int
    lba_bytes: int
    subsystem_nqn: str | None = None
    serial: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class ListedPath:
    """One controller of ``nvme list-subsys``."""

    controller: str
    transport: str
    address: FabricAddress
    state: str
    ana_state: str | None = None


@dataclass(frozen=True)
class ListedSubsystem:
    """One subsystem of ``nvme list-subsys``; the host's names are None before 2.0."""

    name: str
    nqn: str
    paths: tuple[ListedPath, ...]
    host_nqn: str | None = None
    host_id: str | None = None


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


def parse_list(text: str, version: str) -> list[ListedNamespace]:
    """Parse ``nvme list -o json``, plain or verbose, sorted by device.

    Raises
    ------
    UnknownOutputError
        If the output has no known shape; it names `version`.
    """
    command = "nvme list"
    root = find_json(text, command, version)
    if root is None:
        return []
    if not isinstance(root, dict) or not isinstance(root.get("Devices", None), list):
        raise UnknownOutputError(command, version, "no list called Devices", text)
    try:
        found = [each for entry in root["Devices"] for each in _listed(entry)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"an entry of Devices is not as expected ({error!r})"
        raise UnknownOutputError(command, version, what, text) from error
    open_to_all = [each for each in found if not _HIDDEN_PATH.fullmatch(each.device)]
    return list({each.device: each for each in sorted(open_to_all, key=_by_device)}.values())


def _by_device(namespace: ListedNamespace) -> tuple[int, str]:
    return len(namespace.device), namespace.device


def _listed(entry: _Object) -> Iterator[ListedNamespace]:
    if "DevicePath" in entry:
        yield _flat(entry)
        return
    for subsystem in entry["Subsystems"]:
        nqn = subsystem["SubsystemNQN"]
        controllers = subsystem.get("Controllers", [])
        shared = subsystem.get("Namespaces", [])
        about = next(iter(controllers), {}) or _first_path(shared)
        for namespace in shared:
            yield _nested(namespace, nqn, about)
        for controller in controllers:
            for namespace in controller.get("Namespaces", []):
                yield _nested(namespace, nqn, controller)


def _first_path(namespaces: list[_Object]) -> _Object:
    return next((path for each in namespaces for path in each.get("Paths", [])), {})


def _flat(entry: _Object) -> ListedNamespace:
    nsid = entry.get("NameSpace")
    return ListedNamespace(
        device=str(entry["DevicePath"]),
        nsid=None if nsid is None else int(nsid),
        size_bytes=int(entry["PhysicalSize"]),
        lba_bytes=int(entry["SectorSize"]),
        serial=_text(entry, "SerialNumber"),
        model=_text(entry, "ModelNumber"),
    )


def _nested(entry: _Object, nqn: str, controller: _Object) -> ListedNamespace:
    return ListedNamespace(
        device=f"/dev/{str(entry['NameSpace']).removeprefix('/dev/')}",
        nsid=int(entry["NSID"]),
        size_bytes=int(entry["PhysicalSize"]),
        lba_bytes=int(entry["SectorSize"]),
        subsystem_nqn=nqn,
        serial=_text(controller, "SerialNumber"),
        model=_text(controller, "ModelNumber"),
    )


def parse_list_subsys(text: str, version: str) -> list[ListedSubsystem]:
    """Parse ``nvme list-subsys -o json``: a list of hosts, or before 2.0 one mapping.

    Raises
    ------
    UnknownOutputError
        If the output has no known shape.
    """
    command = "nvme list-subsys"
    root = find_json(text, command, version)
    hosts = root if isinstance(root, list) else [root] if root else []
    try:
        return [
            ListedSubsystem(
                name=each["Name"],
                nqn=each["NQN"],
                # 2.0 repeats the paths for every namespace.
                paths=tuple(dict.fromkeys(_listed_path(path) for path in each.get("Paths", []))),
                host_nqn=host.get("HostNQN"),
                host_id=host.get("HostID"),
            )
            for host in hosts
            for each in host["Subsystems"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        what = f"hosts and subsystems are not as expected ({error!r})"
        raise UnknownOutputError(command, version, what, text) from error


def _listed_path(entry: _Object) -> ListedPath:
    details = entry.get("AddressDetails")
    return ListedPath(
        controller=entry["Name"],
        transport=entry["Transport"],
        address=address_of(details) if details else parse_address(entry.get("Address") or ""),
        state=entry["State"],
        ana_state=entry.get("ANAState"),
    )


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


def _text(entry: _Object, name: str) -> str | None:
    return str(entry.get(name) or "").strip() or None
