"""Files of users that are opened for reading: regular ones only, so that no FIFO, device or socket blocks a rank."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "a folder"),
    (stat.S_ISFIFO, errno.EINVAL, "a FIFO"),
    (stat.S_ISSOCK, errno.EINVAL, "a socket"),
    (stat.S_ISCHR, errno.EINVAL, "a device"),
    (stat.S_ISBLK, errno.EINVAL, "a device"),
)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises
    ------
    OSError
        It cannot be read, or is a FIFO, a device, a folder or a socket. It has not been read from.
    """
    _refuse_others(Path(path).stat().st_mode, path)  # opening a device may do something, and a socket cannot be opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_others(os.fstat(descriptor).st_mode, path)  # another file may have taken its place
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_others(mode: int, path: str | os.PathLike[str]) -> None:
    for is_kind, number, name in _KINDS:
        if is_kind(mode):
            raise OSError(number, f"it is {name}, not a regular file", str(path))
