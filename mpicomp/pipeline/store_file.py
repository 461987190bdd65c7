"""The file of a store: a page that says whose it is, a mark of 8 bytes per row, and the rows.

    0      whose it is (`store_header`)
    4096   per row: its stamp and the code of its message (`checksum.code`), uint32 each
    ...    the rows, from a multiple of 4096 bytes on

All blocks are taken from the disk when the file is made, so a full disk is found at the start. The file is read and
written by `pread` and `pwrite` and not through a mapping: both go through the same page cache, but what goes wrong with
the disk is then an exception here and not a signal that ends the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.quoting import one_line
from mpicomp.codecs.base import Bytes
from mpicomp.pipeline.checksum import code
from mpicomp.pipeline.stamps import FORGOTTEN, Ids, Stamps, seen
from mpicomp.pipeline.store_header import CLEAN, CLEAN_AT, MAKING, PAGE, PAIR, PAIR_AT, UNCLEAN, is_clean, packed

_MARK = struct.Struct("<II")
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class StoreFile:
    """An open file of rows, locked against other processes.

    Parameters
    ----------
    path
    description : dict
        JSON values that a file must have been made with. "fingerprint" is told apart in messages.
    rows, row_bytes : int

    Attributes
    ----------
    name : str
        The path, as messages have it.
    marks : uint32[rows, 2]
        Stamp and code of each row, as they are in the file.
    torn : int64[k]
        Rows that a process which was killed had not finished; they are forgotten.
    pair : int
        Number that the files of both ends of a cut share; 0: none yet.

    Raises
    ------
    OSError
        The file cannot be made, such as for a full disk, or another process has it open.
    ValueError
        The file is damaged, truncated, no store, or another run's.
    """

    def __init__(self, path: str | PathLike[str], description: Mapping[str, Any], rows: int, row_bytes: int) -> None:
        self.name = one_line(os.fspath(path))
        self._path, self._row_bytes = Path(path), row_bytes
        self._start = -(-(PAGE + 8 * rows) // PAGE) * PAGE
        self._size = self._start + rows * row_bytes
        self.torn: Ids = np.zeros(0, np.int64)
        self._clean, self.pair = True, 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            head = os.pread(self._file, PAGE, 0)
            if not head or head.startswith(MAKING):
                self._make(description)
            else:
                size = os.fstat(self._file).st_size
                self._clean = is_clean(head, size, self._size, description, self.name)
                (self.pair,) = PAIR.unpack_from(head, PAIR_AT)
            self.marks: NDArray[np.uint32] = np.empty((rows, 2), np.uint32)
            self._read(self.marks.reshape(-1).view(np.uint8), PAGE)
            if not self._clean:
                self._forget_torn()
        except BaseException:
            os.close(self._file)
            raise

    def read(self, row: int, out: Bytes) -> None:
        """Read a row, which has a message.

        Raises
        ------
        ValueError
            The bytes are not those that were written.
        OSError
            The disk fails.
        """
        self._read(out, self._start + row * self._row_bytes)
        stamp, expected = self.marks[row].tolist()
        if code(row, stamp, out) != expected:
            raise ValueError(
                f"row {row} of {self.name} is damaged on the disk: forget it on both ends of the cut (forget), or "
                "remove the file, and its message is sent in full precision again"
            )

    def write(self, row: int, payload: Bytes, stamp: int) -> int:
        """Write a row and then its mark, and return its code. Nobody may read the row meanwhile."""
        if self._clean:
            self._set_clean(False)
        check = code(row, stamp, payload)
        self._write(payload.data, self._start + row * self._row_bytes)
        self._mark(row, stamp, check)
        return check

    def forget(self, rows: Ids, stamps: Stamps) -> None:
        """Change the stamps of rows, and nothing else."""
        if not rows.size:
            return
        if self._clean:
            self._set_clean(False)
        self.marks[rows, 0] = stamps
        first, last = int(rows.min()), int(rows.max())
        # One write for the rows between, too: a write for each of a million rows takes seconds.
        self._write(self.marks[first : last + 1].tobytes(), PAGE + 8 * first)

    def set_pair(self, pair: int) -> None:
        """Change the pair's number, once everything before it is on the disk."""
        os.fdatasync(self._file)
        self._write(PAIR.pack(pair), PAIR_AT)
        os.fdatasync(self._file)
        self.pair = pair

    def sync(self) -> None:
        """Have everything on the disk."""
        os.fdatasync(self._file)
        if not self._clean:
            self._set_clean(True)

    def close(self) -> None:
        """Let others open the file."""
        if self._file >= 0:
            with suppress(OSError):  # forked processes may hold the file open for longer
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                errno.EWOULDBLOCK, "another process has this store open: give every rank a file of its own", self.name
            ) from None
        except OSError:  # not every file system has locks
            return

    def _make(self, description: Mapping[str, Any]) -> None:
        try:
            self._fill(packed(description, self.name))
        except BaseException:
            with suppress(OSError):
                self._path.unlink()
            raise

    def _fill(self, head: bytes) -> None:
        """Take the file's room on the disk, and write its first page; the very beginning last."""
        self._write(MAKING, 0)
        os.ftruncate(self._file, len(MAKING))  # of a file that a killed process began
        free = self._free()
        try:
            self._allocate()
        except OSError as error:
            raise OSError(
                error.errno,
                f"the store takes {self._size} bytes, and the disk has {free} free ({error.strerror}): make room, name "
                "a folder on another disk, or keep rows in fewer bits (codec=)",
                self.name,
            ) from error
        self._write(CLEAN, CLEAN_AT)
        self._write(head[len(MAKING) :], len(MAKING))
        os.fdatasync(self._file)
        self._write(head[: len(MAKING)], 0)
        os.fdatasync(self._file)

    def _allocate(self) -> None:
        if self._free() < self._size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(self._file, 0, self._size)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(self._file, self._size)  # there is room now, which is all that such a file system tells

    def _free(self) -> int:
        disk = os.fstatvfs(self._file)
        return disk.f_bavail * disk.f_frsize

    def _forget_torn(self) -> None:
        """Read all rows that have a message, after a process was killed or the machine stopped."""
        payload, torn = np.empty(self._row_bytes, np.uint8), []
        for row in np.flatnonzero(seen(self.marks[:, 0])).tolist():
            try:
                self.read(row, payload)
            except ValueError:
                torn.append(row)
                self._mark(row, int(self.marks[row, 0] | FORGOTTEN), int(self.marks[row, 1]))
        self.torn = np.array(torn, np.int64)

    def _mark(self, row: int, stamp: int, check: int) -> None:
        self._write(_MARK.pack(stamp, check), PAGE + 8 * row)
        self.marks[row] = stamp, check

    def _set_clean(self, clean: bool) -> None:
        self._write(CLEAN if clean else UNCLEAN, CLEAN_AT)
        os.fdatasync(self._file)
        self._clean = clean

    def _read(self, out: Bytes, offset: int) -> None:
        view = out.data
        while view:
            got = os.preadv(self._file, [view], offset)
            if not got:
                raise ValueError(f"{self.name} has been truncated while it was open: remove it and start again")
            view, offset = view[got:], offset + got

    def _write(self, content: bytes | memoryview, offset: int) -> None:
        view = memoryview(content)
        while view:
            put = os.pwrite(self._file, view, offset)
            view, offset = view[put:], offset + put
