"""A volume of its members, found by their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fx100_lmcache.buffers import aligned_buffer
from fx100_lmcache.errors import (
    DuplicateMemberError,
    InterruptedFormatError,
    MemberSizeError,
    MissingMemberError,
    NotFormattedError,
    RecordError,
    SectorSizeError,
    UnsupportedVersionError,
    VolumeError,
    WrongVolumeError,
)
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.geometry import LABEL_BYTES, Geometry, label_copy_offset
from fx100_lmcache.ondisk.label import Label, is_label, unpack_label


@dataclass(frozen=True)
class Volume:
    """A complete volume.

    Attributes
    ----------
    members : tuple of Member
        In stripe order.
    damaged_labels : tuple of str
        Members with one unreadable label copy: they work, but should be looked at.
    """

    label: Label
    members: tuple[Member, ...]
    damaged_labels: tuple[str, ...] = ()

    @property
    def uuid(self) -> bytes:
        """The volume's UUID as 16 bytes."""
        return self.label.volume.bytes

    @property
    def geometry(self) -> Geometry:
        """The volume's geometry."""
        return self.label.geometry


def read_at(member: Member, offset: int, size_bytes: int) -> bytes:
    """Read a few aligned bytes whole, or raise OSError."""
    with aligned_buffer(size_bytes) as view:
        try:
            count = member.read_into(offset, view)
        except OSError as problem:
            what = f"{member.name}: {problem.strerror} at byte {offset}"
            raise OSError(problem.errno, what) from problem
        if count != size_bytes:
            raise OSError(f"{member.name}: short read at {offset}")
        return bytes(view)


def read_label(member: Member) -> tuple[Label, bool]:
    """Read a member's label; the flag says that one of its two copies is damaged.

    Raises
    ------
    VolumeError
        A subclass that says what is wrong with this member, and what to do.
    """
    if member.size_bytes < 2 * LABEL_BYTES:
        raise MemberSizeError(f"{member.name} has {member.size_bytes} bytes: too small for a label")
    front_block = read_at(member, 0, LABEL_BYTES)
    front, front_flaw = _try_label(member, front_block)
    size = _size_in(member, front) if front else member.size_bytes
    back_block = read_at(member, label_copy_offset(size), LABEL_BYTES)
    back, back_flaw = _try_label(member, back_block)
    if front is not None and front == back:
        return front, False
    only = front or back
    if only is None:
        if is_label(front_block) or is_label(back_block):
            flaw = front_flaw if is_label(front_block) else back_flaw
            raise VolumeError(
                f"{member.name}: both label copies are damaged ({flaw})",
                remedy="for a new, empty volume: fx100 format CONFIG",
            )
        raise NotFormattedError(
            f"{member.name} is not formatted",
            remedy="check that it is the right device; for an empty volume: fx100 format CONFIG",
        )
    other = back_block if front else front_block
    if (front and back) or not any(other):
        raise InterruptedFormatError(
            f"{member.name}: a format did not finish (its label copies disagree)",
            remedy="fx100 format CONFIG",
        )
    _size_in(member, only)
    return only, True


def _size_in(member: Member, label: Label) -> int:
    """Return the size that a member's label says, which the member must have."""
    size = label.geometry.members[label.index].size_bytes
    if member.size_bytes < size:
        raise MemberSizeError(
            f"{member.name} shrank: formatted with {size} bytes, it now has {member.size_bytes}",
            remedy="give the device its size back; or, for an empty volume: fx100 format CONFIG",
        )
    return size


def _try_label(member: Member, block: bytes) -> tuple[Label | None, str]:
    """Decode a label, or say why it is none."""
    try:
        return unpack_label(block), ""
    except RecordError as problem:
        return None, str(problem)
    except UnsupportedVersionError as problem:
        raise UnsupportedVersionError(
            f"{member.name}: {problem.what}",
            remedy="install the newer package that formatted it: pip install --upgrade "
            "fx100-lmcache",
        ) from problem


def assemble(members: Sequence[Member]) -> Volume:
    """Make a volume of its members, given in any order and under any names.

    Raises
    ------
    VolumeError
        A subclass that names the member and what to do.
    """
    found: dict[int, tuple[Member, Label]] = {}
    damaged = []
    for member in members:
        label, is_damaged = read_label(member)
        if is_damaged:
            damaged.append(member.name)
        if found:
            _check_same_volume(next(iter(found.values())), (member, label))
        if label.index in found:
            raise DuplicateMemberError(
                f"{member.name} and {found[label.index][0].name} are the same member "
                f"({label.index}) of the volume",
                remedy="list each member once in `volume.members`",
            )
        if member.logical_block_bytes > label.geometry.io_align_bytes:
            raise SectorSizeError(
                f"{member.name} has logical blocks of {member.logical_block_bytes} bytes, but the "
                f"volume was formatted for {label.geometry.io_align_bytes}",
                remedy="for a new, empty volume with larger units: fx100 format CONFIG",
            )
        found[label.index] = (member, label)
    label = next(iter(found.values()))[1]
    missing = sorted(set(range(len(label.geometry.members))) - set(found))
    if missing:
        raise MissingMemberError(
            f"volume {label.volume}: {len(found)} of {len(label.geometry.members)} members found; "
            f"missing in stripe order: {missing}",
            remedy="connect them (`nvme list` shows what is there) and list them in "
            "`volume.members`",
        )
    ordered = tuple(found[i][0] for i in range(len(found)))
    return Volume(found[0][1], ordered, tuple(damaged))


def _check_same_volume(one: tuple[Member, Label], other: tuple[Member, Label]) -> None:
    if one[1].volume != other[1].volume or one[1].geometry != other[1].geometry:
        raise WrongVolumeError(
            f"{other[0].name} belongs to volume {other[1].volume}, {one[0].name} to volume "
            f"{one[1].volume}",
            remedy="list only members of one volume in `volume.members`, or make a new one of "
            "these: fx100 format CONFIG",
        )
