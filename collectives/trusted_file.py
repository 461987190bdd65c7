"""Files that are executed once they are read: only this user, root and the owner of the sources may have written them.

The folder and the file are checked once they are open, so that neither can be exchanged behind the check. The folders
above need none: who may write to them can put another folder in the place of this one, but none of a trusted owner.
Files of an owner whom a user namespace does not map have the number of "nobody", which all of them share.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block
_NOBODY = 65534
# Whose code runs anyway, such as the one who has installed it for all; nobody where the sources are in an archive.
_OWNERS = {Path(__file__).stat().st_uid} - {_NOBODY} if Path(__file__).exists() else set[int]()


def open_trusted(folder: Path, name: str) -> BinaryIO:
    """Open a file of a folder for reading.

    Raises
    ------
    OSError
        There is no such file, or another user may have written it.
    """
    place = open_folder(folder)
    try:
        return os.fdopen(_checked(os.open(name, _FILE, dir_fd=place)), "rb")
    finally:
        os.close(place)


def open_folder(folder: Path) -> int:
    """Return the descriptor of a folder; raises OSError if another user can write to it."""
    return _checked(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))


def _checked(descriptor: int) -> int:
    """Return the descriptor of a file or a folder, or close it if another user may have written there."""
    found = os.fstat(descriptor)  # the bits of the group have the mask of an access list
    if found.st_uid in (os.geteuid(), 0, *_OWNERS) and not found.st_mode & 0o022:
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it belongs to another user, or others may write to it")
