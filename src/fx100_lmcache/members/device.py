"""A member on a block device or a preallocated file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from fx100_lmcache.errors import MemberOpenError

DirectMode = Literal["require", "prefer", "off"]

_BLKSSZGET = 0x1268  # logical block size of a block device, linux/fs.h
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


class DeviceMember:
    """A block device or file, opened for direct I/O where the file system takes it.

    Byte-range locks are of the *open file description* kind: the kernel drops them with the last
    descriptor, however the process dies. A forked child would keep one, so it closes its copies
    first thing; a child that runs another program has none to begin with (O_CLOEXEC).
    """

    def __init__(self, path: Path, fd: int, *, exclusive: bool, io_mode: str, block: int) -> None:
        self.name = str(path)
        self.io_mode = io_mode
        self.exclusive = exclusive
        self.logical_block_bytes = block
        self.size_bytes = os.lseek(fd, 0, os.SEEK_END)
        self._fd: int | None = fd
        _open_members.add(self)

    def fileno(self) -> int | None:
        """Return the open descriptor, or None after close."""
        return self._fd

    def _open_fd(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, f"{self.name} is closed")
        return self._fd

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read at ``offset``."""
        return os.preadv(self._open_fd(), [buffer], offset)

    def write_from(self, offset: int, buffer: memoryview) -> int:
        """Write at ``offset``."""
        return os.pwritev(self._open_fd(), [buffer], offset)

    def flush(self) -> None:
        """Flush the device's volatile cache."""
        os.fdatasync(self._open_fd())

    def try_lock(self, offset: int, length: int, *, shared: bool = False) -> bool:
        """Take an open-file-description lock on a byte range; a length of 0 means to the end.

        Parameters
        ----------
        shared : bool
            Keep out only those who want the range for themselves.
        """
        kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        request = _FLOCK.pack(kind, os.SEEK_SET, offset, length, 0)
        try:
            fcntl.fcntl(self._open_fd(), fcntl.F_OFD_SETLK, request)
        except OSError as problem:
            if problem.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def is_locked(self, offset: int, length: int) -> bool:
        """Whether somebody else on this host holds a lock within a byte range."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, length, 0)
        answer = fcntl.fcntl(self._open_fd(), fcntl.F_OFD_GETLK, question)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_open_members: weakref.WeakSet[DeviceMember] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: let go of the parent's descriptors, and so of its locks."""
    for member in list(_open_members):
        member.close()


os.register_at_fork(after_in_child=_close_inherited)


def open_member(
    path: Path,
    *,
    direct: DirectMode = "prefer",
    exclusive: bool = False,
    read_only: bool = False,
) -> DeviceMember:
    """Open a member and find out what it takes.

    Parameters
    ----------
    direct : {"require", "prefer", "off"}
        Whether O_DIRECT must, should or should not be used. The mode in force is proven by a
        read, not taken from the flag.
    exclusive : bool
        Open a block device with O_EXCL: the kernel then refuses every other such opener, also
        through another device node.

    Raises
    ------
    MemberOpenError
        With the path, the reason and what to do.
    """
    with _explained(path):
        kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISBLK(kind)):
        what = "a directory" if stat.S_ISDIR(kind) else "neither a file nor a block device"
        raise MemberOpenError(
            f"{path} is {what}", remedy="name a block device or a regular file in `volume.members`"
        )
    is_device = stat.S_ISBLK(kind)
    flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
    if is_device and exclusive:
        flags |= os.O_EXCL
    if direct != "off":
        member = _open_direct(path, flags, is_device)
        if member is not None:
            return member
        if direct == "require":
            raise MemberOpenError(
                f"{path}: direct I/O does not work here",
                remedy="move it to a file system that has it (ext4, XFS) or set io.direct: prefer",
            )
    with _explained(path):
        fd = os.open(path, flags)
    with _closed_on_error(fd):
        block = _sector_bytes(fd) if is_device else 512
        return _member(path, fd, flags, "buffered", block)


def _member(path: Path, fd: int, flags: int, io_mode: str, block: int) -> DeviceMember:
    return DeviceMember(path, fd, exclusive=bool(flags & os.O_EXCL), io_mode=io_mode, block=block)


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def create_file(path: Path, size_bytes: int, progress: Callable[[int], None] | None = None) -> None:
    """Create a member file and write zeros over all of it, so that no later write can fail.

    Parameters
    ----------
    progress : callable or None
        Called with the number of bytes just written.

    Raises
    ------
    MemberOpenError
        If it exists already, or the file system has no room.
    """
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with _explained(path):
            _write_zeros(fd, size_bytes, progress)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(fd)


def write_through(member: DeviceMember, progress: Callable[[int], None] | None = None) -> None:
    """Write zeros over all of a member, so that the storage below really has it.

    To preallocate is not enough on a thin device, and not possible on most.

    Raises
    ------
    MemberOpenError
        If there is no room; how far it came is in the message.
    """
    fd, block = member.fileno(), member.logical_block_bytes
    if fd is None:
        raise MemberOpenError(f"{member.name} is closed")
    done = [0]

    def count(written: int) -> None:
        done[0] += written
        if progress is not None:
            progress(written)

    try:
        _write_zeros(fd, member.size_bytes // block * block, count)
    except OSError as problem:
        raise MemberOpenError(
            f"{member.name}: {problem.strerror} after {done[0]} of {member.size_bytes} bytes; "
            "nothing but zeros was written",
            remedy="give the storage below more room",
        ) from problem


def _write_zeros(fd: int, size_bytes: int, progress: Callable[[int], None] | None) -> None:
    zeros = memoryview(mmap.mmap(-1, 4 << 20))
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.posix_fallocate(fd, 0, size_bytes)  # first, since it knows at once whether there is room
    at = 0
    while at < size_bytes:
        count = os.pwrite(fd, zeros[: min(len(zeros), size_bytes - at)], at)
        at += count
        if progress is not None:
            progress(count)
    os.fsync(fd)


def _open_direct(path: Path, flags: int, is_device: bool) -> DeviceMember | None:
    """Open for direct I/O; None where the file system has none."""
    with _explained(path):
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError as problem:
            if problem.errno == errno.EINVAL:  # the file system has no direct I/O
                return None
            raise
    with _closed_on_error(fd):
        block = _direct_block_bytes(path, fd, is_device)
        if block is not None:
            return _member(path, fd, flags, "direct", block)
    os.close(fd)
    return None


def _sector_bytes(fd: int) -> int:
    answer = bytearray(4)
    fcntl.ioctl(fd, _BLKSSZGET, answer)
    return int.from_bytes(answer, "little")


def _direct_block_bytes(path: Path, fd: int, is_device: bool) -> int | None:
    """Smallest unit that a direct read really takes, or None if none does."""
    candidates = [_sector_bytes(fd)] if is_device else [512, 4096]
    with mmap.mmap(-1, 8192) as page:
        for block in candidates:
            with memoryview(page) as whole, whole[block : 2 * block] as probe:
                try:
                    os.preadv(fd, [probe], block)
                except OSError as problem:
                    if problem.errno != errno.EINVAL:
                        raise MemberOpenError(
                            f"{path}: the first read failed: {problem.strerror}",
                            remedy="check the device and its cabling (dmesg)",
                        ) from problem
                else:
                    return block
    return None


_REMEDIES = {
    errno.ENOENT: "create it with `fx100 format`, or correct `volume.members`",
    errno.EACCES: "run as a user that may read and write it (group `disk` for block devices)",
    errno.EPERM: "run as a user that may read and write it",
    errno.EROFS: "remount it writable, or choose another device",
    errno.EBUSY: "unmount it, take it out of md or LVM, or stop the process of ours that has it",
    errno.EEXIST: "choose another name in `volume.members`, or remove that file",
    errno.ENOSPC: "free some space or make `volume.members[].size` smaller",
    errno.ENXIO: "connect the device again; `nvme list` shows what is there",
}


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        remedy = _REMEDIES.get(problem.errno or 0, "check the device")
        raise MemberOpenError(f"{path}: {problem.strerror}", remedy=remedy) from problem
