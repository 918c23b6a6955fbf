"""Asking every configured address what it offers to this host."""

from __future__ import annotations

import dataclasses

from fx100_lmcache.config.nvme import NvmeConfig
from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.connect import host_identity
from fx100_lmcache.nvmf.errors import NvmeError
from fx100_lmcache.nvmf.parse import DiscoveryRecord
from fx100_lmcache.nvmf.plan import wanted_addresses
from fx100_lmcache.nvmf.runner import NvmeCli


@dataclasses.dataclass
class Discovery:
    """What one address said.

    Attributes
    ----------
    wanted : set of str
        NQNs of the configured subsystems that should be there.
    offered : list of DiscoveryRecord
        Subsystems, without the discovery service itself.
    error : NvmeError or None
        Why it said nothing.
    """

    transport: str
    address: FabricAddress
    wanted: set[str]
    offered: list[DiscoveryRecord] = dataclasses.field(default_factory=list)
    error: NvmeError | None = None

    @property
    def missing(self) -> set[str]:
        """Configured subsystems that are not offered here."""
        return self.wanted - {record.subsystem_nqn for record in self.offered}


async def discover(section: NvmeConfig, cli: NvmeCli) -> list[Discovery]:
    """Ask each address once, one after the other; an address that fails does not stop the rest.

    Raises
    ------
    HostIdentityError
        If this host has no names to ask with.
    """
    host = await host_identity(section.host_nqn, section.host_id)
    asked: dict[tuple[str, FabricAddress], Discovery] = {}
    for subsystem in section.subsystems:
        for address in wanted_addresses(subsystem):
            key = (subsystem.transport, address)
            asked.setdefault(key, Discovery(*key, set())).wanted.add(subsystem.subsystem_nqn)
    for each in asked.values():
        options = [f"--transport={each.transport}", f"--hostnqn={host.nqn}", f"--hostid={host.id}"]
        given = dataclasses.asdict(each.address)
        options += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value]
        try:
            records = await cli.discover(*options)
            each.offered = [record for record in records if not record.is_discovery]
        except NvmeError as error:
            each.error = error
    return list(asked.values())
