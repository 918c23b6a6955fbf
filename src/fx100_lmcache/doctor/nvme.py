"""Whether lost paths come back."""

from __future__ import annotations

from collections.abc import Sequence

from fx100_lmcache.config.nvme import NvmeConfig
from fx100_lmcache.findings import Finding, note, ok, warning


def check_reconnect(nvme: NvmeConfig, obstacles: Sequence[Finding]) -> Finding:
    """Say whether lost paths come back by themselves.

    Parameters
    ----------
    obstacles : sequence of Finding
        Why this process could not connect one.
    """
    subject, why = "nvme: reconnect", "a path that the kernel gives up stays lost until"
    if not nvme.reconnect:
        return note(
            subject,
            "nvme.reconnect is off",
            f"{why} somebody connects it",
            "after a loss: fx100 nvme connect CONFIG; or set nvme.reconnect: true",
        )
    if obstacles:
        return warning(
            subject,
            "; ".join(each.what for each in obstacles),
            f"{why} somebody connects it: nvme.reconnect is on, but this process could not",
            "; ".join(each.do for each in obstacles),
        )
    return ok(subject, "this process can connect lost paths again")
