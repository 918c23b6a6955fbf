"""Parts of a host's NVMe, as the kernel would show them."""

from dataclasses import replace
from typing import Any

from fx100_lmcache.nvmf.address import FabricAddress
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.snapshot import (
    Controller,
    Namespace,
    NamespacePath,
    Snapshot,
    Subsystem,
)

NQN = "nqn.2024-01.io.fx100:array"


def controller(number: int, **changes: Any) -> Controller:
    made = Controller(
        name=f"nvme{number}",
        subsystem_nqn=NQN,
        transport="tcp",
        address=FabricAddress(f"10.0.0.{number}", "4420"),
        state="live",
        io_queues=8,
        queue_size=128,
        keep_alive_s=5,
        reconnect_delay_s=2,
        ctrl_loss_timeout_s=600,
        fast_io_fail_s=2,
    )
    return replace(made, **changes)


def namespace(**changes: Any) -> Namespace:
    made = Namespace(
        name="nvme0n1",
        device="/dev/nvme0n1",
        device_number="259:1",
        identity=NamespaceIdentity(NQN, 1, nguid="1" * 32),
        size_bytes=1 << 40,
        lba_bytes=4096,
        max_hw_sectors_kb=2048,
        max_sectors_kb=2048,
        paths=(
            NamespacePath("nvme0c1n1", "nvme1", "optimized", "none"),
            NamespacePath("nvme0c2n1", "nvme2", "optimized", "none"),
        ),
    )
    return replace(made, **changes)


def snapshot(*parts: Any, iopolicy: str = "round-robin", nqn: Any = NQN) -> Snapshot:
    controllers = tuple(each for each in parts if isinstance(each, Controller))
    namespaces = tuple(each for each in parts if isinstance(each, Namespace))
    return Snapshot(
        (
            Subsystem(
                "nvme-subsys0",
                nqn,
                iopolicy,
                controllers=controllers or (controller(1), controller(2)),
                namespaces=namespaces or (namespace(),),
            ),
        )
    )
