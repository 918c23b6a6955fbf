"""Errors that a person can act on.

Every message says what happened, to which device or key, and what to do. None of these reaches
vLLM or LMCache: the adapters turn them into misses, log lines and counters. The one exception is
``LayerLoadError`` of the in-process adapter, without which vLLM would go on with wrong KV.
"""

from __future__ import annotations


class FX100Error(Exception):
    """Base of every error that this package raises on purpose.

    Attributes
    ----------
    remedy : str or None
        What to do, where that is a sentence of its own; the text ends with it.
    """

    def __init__(self, *arguments: object, remedy: str | None = None) -> None:
        super().__init__(*arguments)
        self.remedy = remedy

    @property
    def what(self) -> str:
        """The text without its remedy."""
        return super().__str__()

    def __str__(self) -> str:
        return self.what if self.remedy is None else f"{self.what}\n  do: {self.remedy}"


class VolumeError(FX100Error):
    """The members do not form a usable volume."""


class NotFormattedError(VolumeError):
    """A member carries no label of ours."""


class ForeignDataError(VolumeError):
    """A device to be formatted holds data that is not ours."""


class InterruptedFormatError(VolumeError):
    """The two label copies of a member disagree: a format did not finish."""


class UnsupportedVersionError(VolumeError):
    """The label was written by a newer format version than this package knows."""


class MissingMemberError(VolumeError):
    """Fewer members were found than the volume has."""


class DuplicateMemberError(VolumeError):
    """One member of the volume was found twice."""


class WrongVolumeError(VolumeError):
    """A member belongs to another volume."""


class MemberSizeError(VolumeError):
    """A member shrank since it was formatted, or is too small to be formatted."""


class SectorSizeError(VolumeError):
    """A member's logical block size does not fit the volume."""


class MemberOpenError(VolumeError):
    """A member cannot be opened: missing, a directory, read-only, no direct I/O."""


class ClaimError(FX100Error):
    """A shard or a whole volume is owned by somebody else."""


class RecordError(FX100Error):
    """Bytes that should be one of our on-disk records are not."""


class TooLargeError(FX100Error):
    """An object does not fit the limits that the volume was formatted with."""
