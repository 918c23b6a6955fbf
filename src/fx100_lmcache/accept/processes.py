"""The processes of a session, and what they leave in shared memory after SIGKILL."""

from __future__ import annotations

import contextlib
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the kernel has it


def session_processes(session_id: int) -> set[int]:
    """Return the ids of the living processes of a process session."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command name is in parentheses and may hold anything; after it come the state,
            # the parent, the process group and the session.
            state, _parent, _group, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == session_id and state not in "ZX":
                found.add(int(stat.parent.name))
    return found


def shared_memory_of(processes: set[int]) -> set[int]:
    """Return the inode numbers of the files of /dev/shm that the processes have mapped.

    Inodes and not names, because a named semaphore is mapped before it gets its name.
    """
    inodes = set()
    for process_id in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
                # Address range, permissions, offset, device, inode, path.
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                    inodes.add(int(fields[4]))
    return inodes


def remove_shared_memory(inodes: set[int]) -> None:
    """Remove files of /dev/shm by their inode numbers.

    Python and LMCache remove theirs when they end in an orderly way; SIGKILL leaves behind the
    queues of vLLM and the KV cache that vLLM on a CPU shares with `lmcache server`.
    """
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            if path.lstat().st_ino in inodes:
                path.unlink()
