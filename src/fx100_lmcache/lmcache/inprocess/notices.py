"""What the ranks of one engine on one host tell each other: requests of which a load failed.

With tensor or pipeline parallelism all ranks compute from what each of them has loaded, but only
the rank whose read failed knows. The others would store what they computed in that pass under keys
of good chunks. A rank writes its notice before it goes on with the pass, and hears from no rank
that waits for its results, so whoever computes from what is missing can read the notice first.

The notices are in a small file in memory, which goes with the last rank that has it open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

import xxhash

log = logging.getLogger(__name__)

NOTICE_BYTES = 16
LIMIT_BYTES = 64 * 1024
"""Then the file starts anew: notices are of use during one pass, so old ones are of none."""

FOLDER = Path("/dev/shm")  # noqa: S108 - ranks on one host share it; only files of ours are used

NAMES = 8
"""Names that are tried one after the other: others may have taken some in a folder of all."""

_TRIES = 100


class Notices:
    """Requests that must not be believed, shared between processes. Thread-safe.

    A request stays noted, though only its pass is bad: what it computes anew in a later pass, which
    loads nothing, is not asked about.

    Parameters
    ----------
    path : Path
        The same for all ranks of one engine, and for no other.

    Raises
    ------
    OSError
        If the file cannot be made, or what is there is not a plain file of ours alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # so that nothing is written to a descriptor after close
        self._version: tuple[int, int] = (0, 0)
        self._known: frozenset[bytes] = frozenset()
        for _ in range(_TRIES):
            self._fd = _open_ours(path)
            if self._alone() and self._is_named():
                os.ftruncate(self._fd, 0)  # of an engine that was killed
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            if self._is_named():
                return
            os.close(self._fd)  # the last user unlinked it just now
        raise OSError(errno.EAGAIN, "it goes again and again", str(path))

    def publish(self, requests: Iterable[str]) -> None:
        """Note requests of which something could not be loaded.

        Raises
        ------
        OSError
            If there is no memory for it.
        """
        notices = b"".join(map(_notice, requests))
        with self._lock:
            if os.fstat(self._fd).st_size + len(notices) > LIMIT_BYTES:
                os.ftruncate(self._fd, 0)
            if os.write(self._fd, notices) < len(notices):
                os.ftruncate(self._fd, 0)  # what follows a part of a notice could not be read
                raise OSError(errno.ENOSPC, "no memory for a notice", str(self._path))

    def names(self, requests: Iterable[str]) -> bool:
        """Whether one of the requests has been noted by any rank.

        Raises
        ------
        OSError
            After :meth:`close`.
        """
        with self._lock:
            found = os.fstat(self._fd)
            version = (found.st_size, found.st_mtime_ns)
            if version != self._version:
                content = os.pread(self._fd, found.st_size, 0)
                starts = range(0, len(content), NOTICE_BYTES)
                self._known = frozenset(content[at : at + NOTICE_BYTES] for at in starts)
                self._version = version
        return bool(self._known) and any(_notice(request) in self._known for request in requests)

    def close(self) -> None:
        """Let go of the file; the last one removes it."""
        with self._lock:
            if self._fd < 0:
                return
            if self._alone() and self._is_named():
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _alone(self) -> bool:
        """Lock the file for ourselves, if nobody else has it open."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False


def open_notices(folder: Path, name: str) -> Notices | None:
    """Open the notices of an engine; all of its ranks find the same.

    Where a name is taken by somebody else's file, or by a link, the next one is tried. If there is
    none that would be said, once, and ranks do without.
    """
    names = [name, *(f"{name}.{number}" for number in range(1, NAMES))]
    problems: list[str] = []
    for path in (folder / each for each in names):
        try:
            notices = Notices(path)
        except OSError as problem:
            problems.append(f"{problem.filename or path}: {problem.strerror}")
            continue
        if problems:
            log.warning("ranks tell each other of failed loads in %s: %s", path, problems[0])
        return notices
    log.warning(
        "ranks cannot tell each other of failed loads, and may keep what was computed after one on "
        "another rank: %s; make %s writable and remove what is not this user's",
        problems[0],
        folder,
    )
    return None


def _open_ours(path: Path) -> int:
    """Open a file that nobody else can write to, or make it.

    Raises
    ------
    OSError
        If what is there is not a plain file of ours alone: in a folder of all, anybody could have
        put there a link to another file of ours, or a file that is read and written by others.
    """
    # never waits, as a pipe would have it
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = -1
    for _ in range(_TRIES):  # others may make and remove it at the same time
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, flags)
            break
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            break
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(errno.EPERM, "not a plain file", str(path))
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            text = f"a file of user {found.st_uid} with mode {found.st_mode & 0o777:o}"
            raise OSError(errno.EPERM, text, str(path))
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def _notice(request: str) -> bytes:
    return xxhash.xxh3_128_digest(request.encode())
