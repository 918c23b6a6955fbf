"""Errors of the NVMe-oF room: each names the device or command and says what to do."""

from __future__ import annotations

from collections.abc import Sequence

from fx100_lmcache.errors import FX100Error


class NvmeError(FX100Error):
    """Base of every error about NVMe-oF."""


class IdentityError(NvmeError):
    """Text that should identify a namespace does not."""


class UnknownOutputError(NvmeError):
    """nvme-cli printed something that no known version prints.

    Attributes
    ----------
    command : str
        The command whose output it was, e.g. ``nvme list``.
    version : str
        Version of nvme-cli as far as it is known.
    """

    def __init__(self, command: str, version: str, what: str, excerpt: str = "") -> None:
        self.command = command
        self.version = version
        shown = f"; output starts with {excerpt[:120]!r}" if excerpt else ""
        super().__init__(
            f"{command} of nvme-cli {version}: {what}{shown}. "
            f"Known are 1.13 to 3.x: report this version, or install one of those"
        )


class NamespaceNotFoundError(NvmeError):
    """No namespace on this host has the identity asked for.

    Attributes
    ----------
    seen : tuple of str
        One line per namespace that is there, with the reason why it is not the one.
    """

    def __init__(self, wanted: str, seen: Sequence[str]) -> None:
        self.seen = tuple(seen)
        there = "".join(f"\n  seen: {line}" for line in self.seen) or "\n  no namespace is attached"
        super().__init__(
            f"namespace not found: {wanted}{there}",
            remedy="connect its subsystem (fx100 nvme connect CONFIG), or correct the identity in "
            "the configuration",
        )


class AmbiguousNamespaceError(NvmeError):
    """More than one device node has the identity asked for.

    Attributes
    ----------
    candidates : tuple of str
        One line per device node.
    """

    def __init__(self, wanted: str, candidates: Sequence[str]) -> None:
        self.candidates = tuple(candidates)
        listed = "".join(f"\n  fits: {line}" for line in self.candidates)
        super().__init__(
            f"namespace is ambiguous: {wanted}{listed}",
            remedy="give more of the identity (nguid and subsystem_nqn); if these are paths to one "
            "namespace, turn native multipath on (nvme_core.multipath=Y)",
        )


class StaleNodeError(NvmeError):
    """A device node in /dev is missing or belongs to another device than sysfs says."""


class SettingError(NvmeError):
    """A controller's setting could not be written to sysfs."""


class SecretError(NvmeError):
    """A secret's file cannot be used, or a secret was about to become visible."""


class HostIdentityError(NvmeError):
    """Host NQN and host ID are not a pair, or one is in use with another partner."""


class CommandError(NvmeError):
    """A command failed. The text holds the human cause and the remedy.

    Attributes
    ----------
    command : str
        What was run, without secrets.
    exit_code : int or None
        None where the command did not end.
    detail : str
        What the command itself said, shortened.
    """

    def __init__(
        self, command: str, cause: str, remedy: str, exit_code: int | None = None, detail: str = ""
    ) -> None:
        self.command = command
        self.exit_code = exit_code
        self.detail = detail
        code = f" (exit code {exit_code})" if exit_code is not None else ""
        said = f"\n  it said: {detail}" if detail else ""
        super().__init__(f"{command}{code}: {cause}{said}", remedy=remedy)


class ToolMissingError(CommandError):
    """The ``nvme`` program is not installed or not executable."""


class CommandTimeoutError(CommandError):
    """A command did not end within its deadline."""


class NotPermittedError(CommandError):
    """The command needs root."""


class UnreachableError(CommandError):
    """Nothing answers at the address."""


class AddressError(CommandError):
    """An address, interface or host name cannot be used."""


class RefusedByTargetError(CommandError):
    """The target answered and refused: unknown subsystem, or this host is not allowed."""


class AuthenticationError(CommandError):
    """In-band authentication is needed, or failed."""


class InvalidSettingsError(CommandError):
    """The kernel refused the combination of settings."""


class TransportMissingError(CommandError):
    """The kernel has no driver for the transport."""


class AlreadyConnectedError(CommandError):
    """The controller is connected already."""


class HostInUseError(CommandError):
    """The kernel knows the host NQN with another host ID, or the other way round."""
