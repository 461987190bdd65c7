"""The file of a store: a page that says whose it is, a mark of 8 bytes per row, and the rows.

    0      magic, version, length and CRC-32 of a JSON text, the text; at 4088 whether all that was written is whole
    4096   per row: its stamp and the code of its message (`checksum.code`), uint32 each
    ...    the rows, from a multiple of 4096 bytes on

All blocks are taken from the disk when the file is made, so a full disk is found at the start. The file is read and
written by `pread` and `pwrite` and not through a mapping: both go through the same page cache, but what goes wrong with
the disk is then an exception here and not a signal that ends the process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.json_file import one_line, parse_json, shown
from mpicomp.codecs.base import Bytes
from mpicomp.pipeline.checksum import code
from mpicomp.pipeline.stamps import FORGOTTEN, Ids, seen

PAGE = 4096
_VERSION = 1
_MAGIC, _MAKING = b"mpicMSG\n", b"mpicNEW\n"  # the second until the file is complete for the first time
_HEAD = struct.Struct("<8sIII")
_MARK = struct.Struct("<II")
_CLEAN_AT, _CLEAN, _UNCLEAN = PAGE - 8, b"whole..\n", b"writing\n"
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
        self._clean = True
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            head = os.pread(self._file, PAGE, 0)
            if not head or head.startswith(_MAKING):
                self._make(description)
            else:
                self._check(head, description)
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

    def forget(self, row: int, mark: int) -> None:
        """Change a row's stamp, and nothing else."""
        if self._clean:
            self._set_clean(False)
        self._mark(row, mark, int(self.marks[row, 1]))

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
        text = json.dumps({**description, "byteorder": sys.byteorder}).encode()
        if _HEAD.size + len(text) > _CLEAN_AT:
            self._path.unlink()
            raise ValueError(f"{self.name}: a store's description has {len(text)} characters: shorten its fingerprint")
        self._write(_MAKING, 0)
        os.ftruncate(self._file, len(_MAKING))  # of a file that a killed process began
        free = self._free()
        try:
            self._allocate()
        except OSError as error:
            with suppress(OSError):
                self._path.unlink()
            raise OSError(
                error.errno,
                f"the store takes {self._size} bytes, and the disk has {free} free ({error.strerror}): make room, name "
                "a folder on another disk, or keep rows in fewer bits (codec=)",
                self.name,
            ) from error
        self._write(_CLEAN, _CLEAN_AT)
        self._write(text, _HEAD.size)
        os.fdatasync(self._file)
        self._write(_HEAD.pack(_MAGIC, _VERSION, len(text), zlib.crc32(text)), 0)
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

    def _check(self, head: bytes, description: Mapping[str, Any]) -> None:
        """Compare the first page and the length with what they should be."""
        damaged = f"{self.name} is damaged (%s): remove it, and messages are sent in full precision again"
        if not head.startswith(_MAGIC):
            raise ValueError(f"{self.name} is no store of messages: name another file")
        if len(head) < PAGE:
            raise ValueError(damaged % f"it ends after {len(head)} bytes")
        _, version, length, check = _HEAD.unpack_from(head)
        if version != _VERSION:
            raise ValueError(f"{self.name} is a store of version {version}, and this is {_VERSION}: remove it")
        text = head[_HEAD.size : _HEAD.size + length]
        if zlib.crc32(text) != check or length > _CLEAN_AT - _HEAD.size:
            raise ValueError(damaged % "its first page has another checksum than it names")
        try:
            found = parse_json(text.decode())
        except ValueError as error:
            raise ValueError(damaged % one_line(error)) from error
        self._compare(found, {**description, "byteorder": sys.byteorder})
        size = os.fstat(self._file).st_size
        if size != self._size:
            raise ValueError(damaged % f"it has {size} of {self._size} bytes")
        if head[_CLEAN_AT:] not in (_CLEAN, _UNCLEAN):
            raise ValueError(damaged % "the end of its first page has been overwritten")
        self._clean = head[_CLEAN_AT:] == _CLEAN

    def _compare(self, found: Any, wanted: Mapping[str, Any]) -> None:
        held = found if isinstance(found, dict) else {}
        if held.get("fingerprint") != wanted["fingerprint"]:
            raise ValueError(
                f"{self.name} is the store of another run or model (its fingerprint is "
                f"{shown(held.get('fingerprint'))}, this one's {shown(wanted['fingerprint'])}): name another file, or "
                "remove this one"
            )
        for name, value in wanted.items():
            if held.get(name) != value:
                raise ValueError(
                    f"{self.name} is a store whose {name} is {shown(held.get(name))}, and {shown(value)} is asked for: "
                    "name another file, or remove this one"
                )

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
        self._write(_CLEAN if clean else _UNCLEAN, _CLEAN_AT)
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
