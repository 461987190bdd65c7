"""Files that are complete or absent, even if a process is killed or the machine stops meanwhile."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Some file systems lock only files that are open for writing.
_OLD = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def flushed(path: Path) -> Iterator[BinaryIO]:
    """Create a file, which has reached the disk when the block ends.

    Raises
    ------
    OSError
        The file cannot be written, or the name is taken. The error names the file.
    """
    with _named(path), os.fdopen(os.open(path, _NEW, 0o666), "wb") as file:
        yield file
        _flush(file)


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends, and that is removed if the block fails.

    Until then the file has a hidden name in the same folder. A process that is killed leaves the file behind. The next
    call for the same path, on any host, removes the file unless a living process writes it.

    Parameters
    ----------
    path : Path
    durable : bool
        Wait until file and name have reached the disk. False: readers see a complete file or none, but the file may be
        lost when the machine stops.

    Raises
    ------
    OSError
        The file cannot be written. The error names the hidden file.
    """
    partial = hidden_name(path)
    with _named(partial), os.fdopen(create_locked(partial), "wb") as file:
        try:
            yield file
            if durable:
                _flush(file)
            else:
                file.flush()
            partial.replace(path)  # while the file is open: its lock shows other processes that this one lives
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    if durable:
        flush_folder(path.parent)


def hidden_name(path: Path) -> Path:
    """Return a new ``.NAME.MARK.partial`` next to `path`; files that killed processes left for it are removed."""
    _remove_stale(path)
    return path.with_name(f".{path.name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.partial")


def flush_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_locked(path: Path) -> int:
    """Create a file and lock it for as long as it is open."""
    while True:
        descriptor = os.open(path, _NEW, 0o666)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # another process found the file before it was locked, and has removed it


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to an error: that of a full disk has no name."""
    handled = sys.exception()
    try:
        yield
    except (OSError, RuntimeError) as error:
        # on a full disk torch.save raises RuntimeError, while it handles the OSError
        problem = error if isinstance(error, OSError) else error.__context__
        if not isinstance(problem, OSError) or problem is handled:
            raise
        problem.filename = str(path)
        raise problem from None


def _remove_stale(path: Path) -> None:
    """Remove the hidden files that killed processes left in earlier calls for `path`."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.(?:([0-9a-f]{{8}})-)?(\d+)(?:-[0-9a-f]{{8}})?\.partial")
    with suppress(OSError):  # the writer, next, raises the folder's error
        for other in path.parent.iterdir():
            found = ours.fullmatch(other.name)
            if found:
                _remove_if_stale(other, found[1], int(found[2]))


def _remove_if_stale(partial: Path, host: str | None, pid: int) -> None:
    """Remove a file unless the process that writes it lives."""
    try:
        descriptor = os.open(partial, _OLD)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.unlink(missing_ok=True)  # under the lock, or its writer might lock it just before it is removed
    except BlockingIOError:
        pass
    except OSError:  # without locks, a process of this host shows by its number that it lives
        if host == _host() and not _lives(pid):
            partial.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _host() -> str:
    """Eight characters for this host and its process numbers, of which a container has its own."""
    numbers = 0
    with suppress(OSError):
        numbers = Path("/proc/self/ns/pid").stat().st_ino
    return hashlib.blake2b(f"{platform.node()} {numbers}".encode(), digest_size=4).hexdigest()
