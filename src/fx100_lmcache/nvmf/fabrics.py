"""Connecting with a secret: the kernel's ``/dev/nvme-fabrics`` instead of nvme-cli.

nvme-cli takes ``--dhchap-secret`` on its command line, where every user of the machine can read
it. Its configuration file is no way out: 2.0 to 2.3 merge a JSON file into the command line's
options, 2.4 to 2.16 ignore the command line when there is one, and 3.x reads INI. All of them end
with one write to ``/dev/nvme-fabrics``, an interface of the kernel that has not changed since 4.8
(the secret's option came with 6.0). So with a secret that write is done here: the secret goes
from its file through a pipe into the kernel and nowhere else.

The write blocks until the target has answered; hence it is made in a child process, this very
module, which can be given up.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from pathlib import Path

import aiofiles

from fx100_lmcache.nvmf.errors import SecretError
from fx100_lmcache.nvmf.runner import run_program

FABRICS_DEVICE = Path("/dev/nvme-fabrics")
MAX_OPTIONS_BYTES = 4095
"""The kernel takes less than a page in one write."""
MAX_SECRET_BYTES = 256
_DHCHAP_SECRET = re.compile(r"DHHC-1:0[0-3]:[A-Za-z0-9+/]+=*:")


async def read_secret(file: Path) -> str:
    """Return the DH-HMAC-CHAP secret in `file`.

    Raises
    ------
    SecretError
        If the file is missing, readable by group or others, or holds no such secret. The text
        never shows what the file holds.
    """
    try:
        async with aiofiles.open(file, encoding="ascii", errors="replace") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = (await stream.read(MAX_SECRET_BYTES + 1)).strip()
    except OSError as error:
        raise SecretError(
            f"{file}: cannot be read ({error.strerror})", remedy="correct dhchap_secret_file"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise SecretError(f"{file}: others may read it", remedy=f"chmod 600 {file}")
    if not _DHCHAP_SECRET.fullmatch(text):
        raise SecretError(
            f"{file}: is no DH-HMAC-CHAP secret (DHHC-1:..: on one line)",
            remedy="make one with nvme gen-dhchap-key, and give it to the array too",
        )
    return text


async def connect_with_secret(
    options: str, secret_file: Path, timeout_s: float, device: Path = FABRICS_DEVICE
) -> None:
    """Connect one controller with the secret in `secret_file`.

    Parameters
    ----------
    options : str
        The kernel's options, ``key=value`` with commas, without the secret.
    secret_file : Path
        File of mode 0600 with one line.
    timeout_s : float
        After this long the attempt is given up.
    device : Path
        The kernel's device; another file in tests.

    Raises
    ------
    SecretError
        As `read_secret`.
    CommandError
        A subclass by cause, if the kernel or the target refuses.
    """
    secret = await read_secret(secret_file)
    await run_program(
        [sys.executable, "-m", __name__, str(device)],
        timeout_s,
        stdin=f"{options},dhchap_secret={secret}".encode(),
        shown=f"write {options},dhchap_secret=(from {secret_file}) to {device}",
    )


def main(device: str) -> int:
    """Write standard input to `device` in one go, as the kernel wants it; 0 if it took it."""
    options = sys.stdin.buffer.read(MAX_OPTIONS_BYTES + 1)
    try:
        if len(options) > MAX_OPTIONS_BYTES:
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.write(descriptor, options)
        finally:
            os.close(descriptor)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        doing = "open" if error.filename else "write to"
        sys.stderr.write(f"failed to {doing} {device}: {name}, {error.strerror}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
