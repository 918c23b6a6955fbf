"""Where a controller is reached: the transport's address as sysfs and nvme-cli write it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FabricAddress:
    """One end to end path between host and array. Empty text means: not given.

    Attributes
    ----------
    traddr : str
        Address of the array's port; empty for transport loop without one.
    trsvcid : str
        Port number as text.
    host_traddr, host_iface : str
        Address and interface of the host's side, where they were chosen.
    src_addr : str
        Address that the kernel in fact uses (newer kernels only).
    """

    traddr: str = ""
    trsvcid: str = ""
    host_traddr: str = ""
    host_iface: str = ""
    src_addr: str = ""

    def __str__(self) -> str:
        port = f":{self.trsvcid}" if self.trsvcid else ""
        host = f"[{self.traddr}]" if ":" in self.traddr else self.traddr
        source = self.host_traddr or self.host_iface
        return (f"{host}{port}" or "local") + (f" from {source}" if source else "")

    def reaches(self, wanted: FabricAddress) -> bool:
        """Tell whether a controller at this address is the path that `wanted` asks for.

        The host's side counts only where `wanted` names it.
        """
        return (
            _canonical(self.traddr) == _canonical(wanted.traddr)
            and self.trsvcid == wanted.trsvcid
            and wanted.host_iface in ("", self.host_iface)
            and _canonical(wanted.host_traddr)
            in ("", _canonical(self.host_traddr), _canonical(self.src_addr))
        )


def parse_address(text: str) -> FabricAddress:
    """Parse ``traddr=10.0.0.1,trsvcid=4420,src_addr=10.0.0.9``; a PCIe address is kept whole.

    Older nvme-cli separates with spaces.
    """
    if "=" not in text:
        return FabricAddress(traddr=text.strip())
    pairs = (part.partition("=") for part in text.replace(",", " ").split())
    return address_of({key: value for key, _, value in pairs})


def address_of(found: Mapping[str, object]) -> FabricAddress:
    """Take an address from a mapping with NVMe's names; names that are not ours are ignored."""
    names = FabricAddress.__dataclass_fields__
    return FabricAddress(**{name: str(found[name]).strip() for name in names if found.get(name)})


def _canonical(text: str) -> str:
    """Return one spelling per IP address: IPv6 has many."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text.lower()
