"""Sections that speak of NVMe: which namespace a member is, and which subsystems to connect."""

import ipaddress
import re
import uuid
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fx100_lmcache.config.errors import reject
from fx100_lmcache.config.section import Section
from fx100_lmcache.config.values import (
    PATH_FIELD,
    SEQUENCE_FIELD,
    count_field,
    duration_field,
    hex_field,
    text_field,
)

MAX_NSID = 0xFFFF_FFFE
MAX_FAST_IO_FAIL_S = 5
"""A blocked I/O must end well inside LMCache's own limits; `fx100 doctor` demands the same."""

_HOST_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?"

Nqn = Annotated[
    str,
    text_field(r"nqn\.[!-+\--~]{1,219}", "an NVMe qualified name: nqn., 223 characters at most"),
]


def _address(value: object) -> str:
    allowed = "must be an IPv4 address, an IPv6 address or a host name"
    if not isinstance(value, str):
        raise ValueError(allowed)
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        looks_numeric = re.fullmatch(r"[0-9.]+", value)
        if looks_numeric or not re.fullmatch(_HOST_NAME, value):
            raise ValueError(allowed) from None
        return value


Address = Annotated[str, BeforeValidator(_address)]


def _host_id(value: str) -> str:
    try:
        parsed = uuid.UUID(value)
    except ValueError:
        raise ValueError("must be a UUID such as the one in /etc/nvme/hostid") from None
    if not parsed.int:
        raise ValueError("is all zero, which is no host identifier")
    return str(parsed)


class NvmeNamespace(Section):
    """Which namespace a member is, by names that survive a reconnect; all given must match."""

    subsystem_nqn: Nqn | None = Field(
        default=None, description="NQN of the subsystem; with nsid it identifies the namespace."
    )
    nsid: Annotated[int, count_field(1, MAX_NSID)] | None = Field(
        default=None, description="Namespace number inside the subsystem; needs subsystem_nqn."
    )
    nguid: Annotated[str, hex_field(32)] | None = Field(
        default=None, description="NGUID, 32 hexadecimal digits: the best name, worldwide unique."
    )
    eui64: Annotated[str, hex_field(16)] | None = Field(
        default=None, description="EUI-64, 16 hexadecimal digits."
    )
    uuid: Annotated[str, hex_field(32)] | None = Field(
        default=None, description="Namespace UUID, kept as 32 hexadecimal digits without dashes."
    )

    @model_validator(mode="after")
    def _identifies_one_namespace(self) -> Self:
        by_number = self.subsystem_nqn is not None and self.nsid is not None
        if not (self.nguid or self.eui64 or self.uuid or by_number):
            reject("needs nguid, eui64 or uuid, or subsystem_nqn together with nsid")
        return self

    def names(self) -> frozenset[tuple[str, str]]:
        """Return every name that alone identifies the namespace, as (kind, value) pairs."""
        pairs = [("nguid", self.nguid), ("eui64", self.eui64), ("uuid", self.uuid)]
        if self.nsid is not None and self.subsystem_nqn is not None:
            pairs.append(("nsid", f"{self.nsid} of {self.subsystem_nqn}"))
        return frozenset((kind, value) for kind, value in pairs if value is not None)


class NvmeAddress(Section):
    """One path to a subsystem: a port of the array, and if wanted the host's own side."""

    traddr: Address = Field(description="Address of the array's port.")
    trsvcid: Annotated[int, count_field(1, 65535)] = Field(
        default=4420, description="Port number; 4420 is IANA's for NVMe-oF."
    )
    host_traddr: Address | None = Field(
        default=None, description="Address of this host to connect from; default: by routing."
    )
    host_iface: Annotated[str, text_field(r"[A-Za-z0-9_.-]{1,15}", "an interface name")] | None = (
        Field(default=None, description="Interface of this host to connect from (tcp only).")
    )


class NvmeSubsystem(Section):
    """One subsystem to connect, and how the kernel treats it when it is slow or gone."""

    subsystem_nqn: Nqn = Field(description="NQN of the subsystem.")
    transport: Literal["tcp", "rdma", "loop"] = Field(
        default="tcp", description="NVMe-oF transport; loop is a target of this same kernel."
    )
    addresses: Annotated[tuple[NvmeAddress, ...], SEQUENCE_FIELD] = Field(
        default=(), description="1 to 8 paths; none for loop."
    )
    nr_io_queues: Annotated[int, count_field(1, 1024)] | None = Field(
        default=None, description="I/O queues per path; default: the kernel's, one per CPU."
    )
    queue_size: Annotated[int, count_field(16, 1024)] = Field(
        default=128, description="Commands per queue; 128 is the kernel's default."
    )
    keep_alive_s: Annotated[int, duration_field(1, 60, whole=True)] = Field(
        default=5,
        validation_alias="keep_alive",
        description="Keep-alive time-out, whole seconds; 5 is the kernel's default.",
    )
    reconnect_delay_s: Annotated[int, duration_field(1, 60, whole=True)] = Field(
        default=2,
        validation_alias="reconnect_delay",
        description="Pause between attempts to reconnect, whole seconds; 2 to be back soon.",
    )
    ctrl_loss_timeout_s: Annotated[int, duration_field(1, 86400, whole=True)] = Field(
        default=600,
        validation_alias="ctrl_loss_timeout",
        description="How long to try before the controller is dropped, whole seconds; 600 is the "
        "kernel's default.",
    )
    fast_io_fail_s: Annotated[int, duration_field(1, MAX_FAST_IO_FAIL_S, whole=True)] = Field(
        default=2,
        validation_alias="fast_io_fail",
        description="How long I/O waits on a lost path before it fails, whole seconds, at most 5: "
        "a load that hangs in the kernel keeps LMCache's buffer.",
    )
    dhchap_secret_file: Annotated[Path, PATH_FIELD] | None = Field(
        default=None,
        description="File with this host's DH-HMAC-CHAP secret; a secret never stands in YAML.",
    )

    @model_validator(mode="after")
    def _fits_transport(self) -> Self:
        if self.transport == "loop" and self.addresses:
            reject("must be left out: transport loop has no addresses", ("addresses",))
        if self.transport != "loop" and not 1 <= len(self.addresses) <= 8:
            reject(f"transport {self.transport} needs 1 to 8 addresses", ("addresses",))
        for position, address in enumerate(self.addresses):
            at = ("addresses", position)
            if address in self.addresses[:position]:
                reject("is listed twice", at, address.traddr)
            if address.host_iface and self.transport != "tcp":
                reject("is for transport tcp only", (*at, "host_iface"), address.host_iface)
        return self

    @model_validator(mode="after")
    def _timers_fit(self) -> Self:
        for name in ("reconnect_delay", "fast_io_fail"):
            if (value := getattr(self, f"{name}_s")) > self.ctrl_loss_timeout_s:
                limit = self.ctrl_loss_timeout_s
                reject(f"must be at most ctrl_loss_timeout, which is {limit}s", (name,), value)
        return self


class NvmeConfig(Section):
    """The subsystems that `fx100` connects, and the name under which this host does so."""

    subsystems: Annotated[tuple[NvmeSubsystem, ...], SEQUENCE_FIELD] = Field(
        description="1 to 16 subsystems."
    )
    host_nqn: Nqn | None = Field(
        default=None, description="NQN of this host; default: the one in /etc/nvme/hostnqn."
    )
    host_id: Annotated[str, AfterValidator(_host_id)] | None = Field(
        default=None, description="UUID of this host; default: the one in /etc/nvme/hostid."
    )
    reconnect: bool = Field(
        default=True,
        description="Whether a process with members there connects paths again that the kernel has "
        "given up, as `fx100 nvme connect` would; needs root. Without it an operator must, after "
        "`ctrl_loss_timeout`.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not 1 <= len(self.subsystems) <= 16:
            reject("must be a list of 1 to 16 subsystems", ("subsystems",))
        nqns = [subsystem.subsystem_nqn for subsystem in self.subsystems]
        for position, nqn in enumerate(nqns):
            if nqn in nqns[:position]:
                reject("is listed twice", ("subsystems", position, "subsystem_nqn"), nqn)
        # The kernel refuses one host NQN with two host ids, so half a pair fails later and worse.
        if (self.host_nqn is None) != (self.host_id is None):
            given = "host_nqn" if self.host_nqn else "host_id"
            reject("host_nqn and host_id go together: give both or neither", (given,))
        return self
