"""Exit code and text of a failed command -> a typed error with a cause and a remedy. Pure."""

from __future__ import annotations

import os
import re

from fx100_lmcache.nvmf import errors
from fx100_lmcache.nvmf.errors import CommandError

MAX_DETAIL_CHARACTERS = 300
SECRET = re.compile(r"DHHC-1:[0-9a-zA-Z]{2}:[A-Za-z0-9+/=]*:?|NVMeTLSkey-1:[^\s,\"']*")
"""The two textual forms of NVMe secrets: in-band authentication and TLS."""

# First match wins, so what is more special stands first: 2.0 adds "failed to write to nvme-fabrics
# device" to every cause, and for 2.16 that is all it says when the target refuses. nvme-cli prints
# the C library's text of an errno, its own text, or both, and that changed between versions; so
# every spelling counts.
_CAUSES: tuple[tuple[str, type[CommandError], str, str], ...] = (
    (
        r"already connected|operation already in progress|\bEALREADY\b",
        errors.AlreadyConnectedError,
        "this host is connected to that address already",
        "nothing, if the host NQN is the wanted one: nvme list-subsys shows it",
    ),
    (
        r"hostnqn already in use|same host(id|nqn)|address already in use|\bEADDRINUSE\b",
        errors.HostInUseError,
        "the kernel already uses this host NQN with another host ID, or the other way round",
        "give the pair that /sys/class/nvme/*/{hostnqn,hostid} shows, or disconnect those first",
    ),
    (
        r"permission denied|operation not permitted|\bEACCES\b|\bEPERM\b|must be root",
        errors.NotPermittedError,
        "the kernel lets only root do this",
        "run as root (in a container: privileged, with the host's /dev and /sys)",
    ),
    (
        r"required key not available|key (was rejected|has been revoked|has expired)|authenticat|"
        r"\bENOKEY\b|\bEKEYREJECTED\b|\bECONNABORTED\b|pre-shared tls key",
        errors.AuthenticationError,
        "in-band authentication failed: the target wants a secret, or another one",
        "compare dhchap_secret_file and the host NQN with what the array has for this host",
    ),
    (
        r"no handler found|protocol not supported|invalid transport|unsupported transport|"
        r"\bEPROTONOSUPPORT\b|module .*not found|failed to open \S*nvme-fabrics",
        errors.TransportMissingError,
        "the kernel has no NVMe-oF driver for this transport loaded",
        "modprobe nvme-fabrics, and nvme-tcp, nvme-rdma or nvme-loop (package linux-modules-extra "
        "on some distributions)",
    ),
    (
        r"failed to resolve|name or service not known|name resolution|cannot assign requested|"
        r"no such device|invalid interface|unrecognized address family|\bEADDRNOTAVAIL\b|"
        r"\bENODEV\b",
        errors.AddressError,
        "an address or interface cannot be used on this host",
        "check traddr, host_traddr and host_iface against: ip -brief address",
    ),
    (
        r"connection refused|no route to host|network is unreachable|host is (down|unreachable)|"
        r"timed? ?out|connection reset|\bECONNREFUSED\b|\bEHOSTUNREACH\b|\bENETUNREACH\b|"
        r"\bETIMEDOUT\b|\bECONNRESET\b",
        errors.UnreachableError,
        "no NVMe target answers at this address",
        "check traddr and trsvcid, cabling and VLAN, and that the array's port is enabled",
    ),
    (
        r"invalid argument|\bEINVAL\b|unrecognized option|unknown option",
        errors.InvalidSettingsError,
        "the kernel refused the options: a value out of range, an option that this kernel lacks, "
        "a transport without driver, or a host ID that is used with another host NQN",
        "the kernel log (dmesg) names the option; modprobe the transport (nvme-tcp, nvme-rdma)",
    ),
    (
        r"input/output error|\bEIO\b|connect (invalid|command failed)|no such file|\bENOENT\b|"
        r"failed to write to nvme-fabrics device",
        errors.RefusedByTargetError,
        "the target answered but refused: it has no such subsystem there, or this host NQN is not "
        "allowed to use it, or it wants another secret (the kernel calls all of these EIO)",
        "the kernel log (dmesg) has the target's status; nvme discover lists what the target "
        "offers this host; compare host NQN and secret with what the array has for this host",
    ),
)


def explain(command: str, exit_code: int, said: str) -> CommandError:
    """Turn a failure into the error that a person can act on.

    Parameters
    ----------
    command : str
        What was run; must not hold secrets.
    exit_code : int
        Its exit code, or minus the signal's number.
    said : str
        Everything it printed. Secrets in it are masked before it is shown.
    """
    # 1.x prints nothing and exits with the error's number; 1 itself is everybody's "failed".
    detail = shortened(said) or (os.strerror(exit_code) if exit_code > 1 else "")
    for pattern, kind, cause, remedy in _CAUSES:
        if re.search(pattern, detail, re.I):
            return kind(command, cause, remedy, exit_code, detail)
    return CommandError(
        command,
        "failed for a reason that is not known here",
        "read what it said and the kernel log (dmesg)",
        exit_code,
        detail or "nothing",
    )


def shortened(said: str) -> str:
    """Return text on one line, without secrets, at most `MAX_DETAIL_CHARACTERS` long."""
    line = "; ".join(part.strip() for part in masked(said).splitlines() if part.strip())
    return line if len(line) <= MAX_DETAIL_CHARACTERS else f"{line[:MAX_DETAIL_CHARACTERS]}..."


def masked(text: str) -> str:
    """Replace every NVMe secret in `text`."""
    return SECRET.sub("(secret)", text)
