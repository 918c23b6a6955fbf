"""Volumes with something wrong, and what must be said about each."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from fx100_lmcache import errors
from fx100_lmcache.errors import VolumeError
from fx100_lmcache.ondisk import label as label_module
from fx100_lmcache.ondisk.geometry import LABEL_BYTES
from support.cli import MIB, Rig, formatted


def missing(rig: Rig) -> None:
    rig.members[1].unlink()


def not_listed(rig: Rig) -> None:
    rig.rewrite(rig.members[:1])


def doubled_by_hard_link(rig: Rig) -> None:
    twin = rig.members[0].with_name("twin")
    os.link(rig.members[0], twin)
    rig.rewrite([rig.members[0], twin])


def doubled_by_copy(rig: Rig) -> None:
    twin = rig.members[0].with_name("twin")
    shutil.copy(rig.members[0], twin)
    rig.rewrite([rig.members[0], twin])


def of_another_volume(rig: Rig) -> None:
    other = formatted(rig.config.parent / "other")
    rig.rewrite([rig.members[0], other.members[1]])


def not_formatted(rig: Rig) -> None:
    rig.members[1].write_bytes(bytes(4 * MIB))


def truncated(rig: Rig) -> None:
    os.truncate(rig.members[1], 3 * MIB)


def truncated_to_nothing(rig: Rig) -> None:
    os.truncate(rig.members[1], 0)


def a_directory(rig: Rig) -> None:
    rig.members[1].unlink()
    rig.members[1].mkdir()


def a_pipe(rig: Rig) -> None:
    rig.members[1].unlink()
    os.mkfifo(rig.members[1])


def interrupted(rig: Rig) -> None:
    overwrite(rig.members[1], 0, bytes(LABEL_BYTES))


def both_labels_damaged(rig: Rig) -> None:
    for at in (30, 4 * MIB - LABEL_BYTES + 30):
        overwrite(rig.members[1], at, b"?")


def of_a_newer_format(rig: Rig) -> None:
    overwrite(rig.members[1], 0, newer_label(rig.members[1]))


SITUATIONS: dict[Callable[[Rig], None], tuple[type[VolumeError], str]] = {
    missing: (errors.MemberOpenError, "No such file"),
    not_listed: (errors.MissingMemberError, "1 of 2 members found"),
    doubled_by_hard_link: (errors.DuplicateMemberError, "are the same file"),
    doubled_by_copy: (errors.DuplicateMemberError, "are the same member (0)"),
    of_another_volume: (errors.WrongVolumeError, "belongs to volume"),
    not_formatted: (errors.NotFormattedError, "fx100 format"),
    truncated: (errors.MemberSizeError, "shrank"),
    truncated_to_nothing: (errors.MemberSizeError, "0 bytes"),
    a_directory: (errors.MemberOpenError, "is a directory"),
    a_pipe: (errors.MemberOpenError, "neither a file nor a block device"),
    interrupted: (errors.InterruptedFormatError, "a format did not finish"),
    both_labels_damaged: (errors.VolumeError, "both label copies are damaged"),
    of_a_newer_format: (errors.UnsupportedVersionError, "format version 2"),
}


def newer_label(path: Path) -> bytes:
    """The member's label as a later format version would write it."""
    block = bytearray(path.read_bytes()[:LABEL_BYTES])
    version_at = 8 + len(label_module.MAGIC)
    block[version_at : version_at + 2] = (label_module.VERSION + 1).to_bytes(2, "little")
    used = int.from_bytes(block[version_at + 2 : version_at + 4], "little")
    block[:8] = xxhash.xxh3_64_intdigest(block[8:used]).to_bytes(8, "little")
    return bytes(block)


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)
