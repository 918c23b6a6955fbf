"""Could this process connect a path? Asked at the start, not when the first one is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fx100_lmcache.config.nvme import NvmeConfig
from fx100_lmcache.findings import Finding, warning
from fx100_lmcache.nvmf.connect import ETC_NVME, host_identity
from fx100_lmcache.nvmf.errors import HostIdentityError
from fx100_lmcache.nvmf.fabrics import FABRICS_DEVICE


async def obstacles(
    nvme: NvmeConfig,
    device: Path = FABRICS_DEVICE,
    sysfs: Path = Path("/sys"),
    etc: Path = ETC_NVME,
    search_path: str | None = None,
) -> list[Finding]:
    """Return why this process could not connect the configured subsystems; empty if it could.

    Nothing is connected: the device is opened and closed again.

    Parameters
    ----------
    device, sysfs, etc : Path
        What connecting needs; others in tests.
    search_path : str or None
        Where the ``nvme`` program is looked for; by default ``PATH``.
    """
    found = [_device(nvme, device), _sysfs(sysfs), _program(nvme, search_path)]
    try:
        await host_identity(nvme.host_nqn, nvme.host_id, etc)
    except HostIdentityError as error:
        found.append(_obstacle(error.what, error.remedy or ""))
    return [each for each in found if each is not None]


def _obstacle(what: str, do: str) -> Finding:
    why = "nvme.reconnect is on, but this process could not connect a lost path"
    return warning("nvme", what, why, do)


def _device(nvme: NvmeConfig, device: Path) -> Finding | None:
    # the kernel asks for no capability; whoever may open the device may connect
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        transports = " ".join(sorted({f"nvme-{each.transport}" for each in nvme.subsystems}))
        return _obstacle(
            f"{device} is missing",
            f"modprobe -a {transports}; in a container: --device {device}",
        )
    except OSError as error:
        return _obstacle(
            f"{device} cannot be opened ({error.strerror})",
            f"run as root; in a container also: --device {device}",
        )
    return None


def _sysfs(sysfs: Path) -> Finding | None:
    try:
        read_only = bool(os.statvfs(sysfs).f_flag & os.ST_RDONLY)
    except OSError:
        read_only = True
    if not read_only:
        return None
    return _obstacle(
        f"{sysfs} cannot be written to, so that time-outs of new paths stay the kernel's",
        f"in a container, mount it writable: -v {sysfs}:{sysfs}:rw",
    )


def _program(nvme: NvmeConfig, search_path: str | None) -> Finding | None:
    needed = any(each.dhchap_secret_file is None for each in nvme.subsystems)
    if not needed or shutil.which("nvme", path=search_path):
        return None
    return _obstacle("the program nvme is not installed", "apt install nvme-cli (dnf, zypper)")
