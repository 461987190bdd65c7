"""File of a store: a page that identifies it, a mark of 8 bytes per row, and the rows.

    0      magic, version, length and CRC-32 of a JSON text (20 bytes), and the text: the store's description
    4080   number that the files of both ends of a cut share, uint64; 0: none yet
    4088   whether all rows are whole: a process changes it before its first write
    4096   per row: its stamp and the code of its message (`row_code`), uint32 each
    ...    the rows, from a multiple of 4096 bytes on

All blocks are taken from the disk when the file is made, so a full disk is found at the start. The file is read and
written by `pread` and `pwrite` and not through a mapping: both go through the same page cache, but an error of the disk
is then an exception here. With a mapping it is a signal that ends the process, as does a truncated file.
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

import numpy as np

from collectives.annotations import Bytes
from collectives.json_file import parse_json
from collectives.quoting import one_line, shown
from collectives.regular_file import open_regular
from mpicomp.pipeline.store_rows import FORGOTTEN, Ids, Stamps, has_message, row_code

PAGE = 4096
_MAGIC, _VERSION, _HEAD = b"mpicMSG\n", 1, struct.Struct("<8sIII")
_MAKING = b"mpicNEW\n"  # instead of the magic, until the file is complete for the first time
_CLEAN_AT, _CLEAN, _UNCLEAN = PAGE - 8, b"whole..\n", b"writing\n"
_PAIR_AT, _PAIR = _CLEAN_AT - 8, struct.Struct("<Q")
_MARK = struct.Struct("<II")
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

Description = Mapping[str, object]


class StoreFile:
    """Open file of rows, locked against other processes; OSError or ValueError if it cannot be opened or used."""

    def __init__(self, path: str | PathLike[str], description: Description, rows: int, row_bytes: int) -> None:
        self.name = one_line(os.fspath(path))  # for errors
        self._path, self._row_bytes = Path(path), row_bytes
        self._start = -(-(PAGE + 8 * rows) // PAGE) * PAGE
        self._size = self._start + rows * row_bytes
        self.torn: Ids = np.zeros(0, np.int64)  # rows that a killed process had not finished; they are forgotten
        self._clean, self.pair = True, 0  # pair: number that both ends' files share; 0: none yet
        if Path(path).exists():
            open_regular(path).close()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            page = os.pread(self._file, PAGE, 0)
            if not page or page.startswith(_MAKING):
                self._make(description)
            else:
                _check_header(page, description, self.name)
                size = os.fstat(self._file).st_size
                if size != self._size:
                    raise _damage_error(self.name, f"it has {size} of {self._size} bytes")
                if page[_CLEAN_AT:] not in (_CLEAN, _UNCLEAN):
                    raise _damage_error(self.name, "the end of its first page has been overwritten")
                self._clean = page[_CLEAN_AT:] == _CLEAN
                (self.pair,) = _PAIR.unpack_from(page, _PAIR_AT)
            self.marks: Stamps = np.empty((rows, 2), np.uint32)  # stamp and code of each row, as in the file
            self._read(self.marks.reshape(-1).view(np.uint8), PAGE)
            if not self._clean:
                self._forget_torn()
        except BaseException:
            os.close(self._file)
            raise

    # Rows ------------------------------------------------------------------------------------------------------------

    def read_row(self, row: int, out: Bytes) -> None:
        """Read a row that has a message; ValueError if its bytes are not those that were written."""
        self._read(out, self._start + row * self._row_bytes)
        stamp, expected = self.marks[row].tolist()
        if row_code(row, stamp, out) != expected:
            raise ValueError(
                f"row {row} of {self.name} is damaged on the disk: forget it on both ends of the cut (forget), or "
                "remove the file, and its message is sent in full precision again"
            )

    def write_row(self, row: int, payload: Bytes, stamp: int) -> int:
        """Write a row and then its mark, and return its code. No thread may read the row meanwhile."""
        if self._clean:
            self._set_clean(False)
        # Of a write to the page cache the code takes 62 to 68 %, and the mark 12 % with rows of 32 KiB, 7 % with 1 MiB.
        # They show which rows a killed process had finished: without them all would have to be sent in full again.
        code = row_code(row, stamp, payload)
        self._write(payload.data, self._start + row * self._row_bytes)
        self._mark(row, stamp, code)
        return code

    def set_stamps(self, rows: Ids, stamps: Stamps) -> None:
        """Change the stamps of rows, and keep their messages."""
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
        self._write(_PAIR.pack(pair), _PAIR_AT)
        os.fdatasync(self._file)
        self.pair = pair

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fdatasync(self._file)
        if not self._clean:
            self._set_clean(True)

    def close(self) -> None:
        """Let other processes open the file."""
        if self._file >= 0:
            with suppress(OSError):  # forked processes may hold the file open for longer
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1

    def _forget_torn(self) -> None:
        """Read all rows that have a message, after a process was killed or the machine stopped."""
        payload, torn = np.empty(self._row_bytes, np.uint8), []
        for row in np.flatnonzero(has_message(self.marks[:, 0])).tolist():
            try:
                self.read_row(row, payload)
            except ValueError:
                torn.append(row)
                self._mark(row, int(self.marks[row, 0] | FORGOTTEN), int(self.marks[row, 1]))
        self.torn = np.array(torn, np.int64)

    def _mark(self, row: int, stamp: int, code: int) -> None:
        self._write(_MARK.pack(stamp, code), PAGE + 8 * row)
        self.marks[row] = stamp, code

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
        try:
            while view:
                put = os.pwrite(self._file, view, offset)
                view, offset = view[put:], offset + put
        except OSError as error:
            cause = f"cannot be written ({error.strerror}): make room or mend the disk"
            raise OSError(error.errno, cause, self.name) from error

    # A new file ------------------------------------------------------------------------------------------------------

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                errno.EWOULDBLOCK, "another process has this store open: give every rank a file of its own", self.name
            ) from None
        except OSError:  # not every file system has locks
            return

    def _make(self, description: Description) -> None:
        try:
            self._fill(_header(description, self.name))
        except BaseException:
            with suppress(OSError):
                self._path.unlink()
            raise

    def _fill(self, header: bytes) -> None:
        """Take the file's room on the disk, and write its first page; the very beginning last."""
        try:
            self._write(_MAKING, 0)
            os.ftruncate(self._file, len(_MAKING))  # of a file that a killed process began
            self._allocate()
        except OSError as error:
            cause = os.strerror(error.errno or errno.EIO)
            raise OSError(
                error.errno,
                f"the store takes {self._size} bytes, and the disk has {self._free_bytes()} free ({cause}): make room, "
                "name a folder on another disk, or keep rows in fewer bits (codec=)",
                self.name,
            ) from error
        self._write(_CLEAN, _CLEAN_AT)
        self._write(header[len(_MAKING) :], len(_MAKING))
        os.fdatasync(self._file)
        self._write(header[: len(_MAKING)], 0)
        os.fdatasync(self._file)

    def _free_bytes(self) -> int:
        disk = os.fstatvfs(self._file)
        return disk.f_bavail * disk.f_frsize

    def _allocate(self) -> None:
        if self._free_bytes() < self._size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(self._file, 0, self._size)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(self._file, self._size)  # such a file system promises no more than that there is room now


# The first page -------------------------------------------------------------------------------------------------------


def _header(description: Description, name: str) -> bytes:
    """Return the first bytes of a file; ValueError if the description does not fit."""
    text = json.dumps(_with_byte_order(description)).encode()
    if _HEAD.size + len(text) > _PAIR_AT:
        raise ValueError(f"{name}: a store's description has {len(text)} characters: shorten its fingerprint")
    return _HEAD.pack(_MAGIC, _VERSION, len(text), zlib.crc32(text)) + text


def _check_header(page: bytes, description: Description, name: str) -> None:
    """Raise ValueError unless the first page of a file is whole and that of a store with this description."""
    if not page.startswith(_MAGIC):
        raise ValueError(f"{name} is no store of messages: name another file")
    if len(page) < PAGE:
        raise _damage_error(name, f"it ends after {len(page)} bytes")
    _, version, length, check = _HEAD.unpack_from(page)
    if version != _VERSION:
        raise ValueError(f"{name} is a store of version {version}, and this is {_VERSION}: remove it")
    text = page[_HEAD.size : _HEAD.size + length]
    if zlib.crc32(text) != check or length > _CLEAN_AT - _HEAD.size:
        raise _damage_error(name, "its first page has another checksum than it names")
    try:
        found = parse_json(text.decode())
    except ValueError as error:
        raise _damage_error(name, one_line(error)) from error
    held = found if isinstance(found, dict) else {}
    wanted = _with_byte_order(description)
    if held.get("fingerprint") != wanted["fingerprint"]:
        raise ValueError(
            f"{name} is the store of another run or model (its fingerprint is {shown(held.get('fingerprint'))}, this "
            f"one's {shown(wanted['fingerprint'])}): name another file, or remove this one"
        )
    for key, value in wanted.items():
        if held.get(key) != value:
            raise ValueError(
                f"{name} is a store whose {key} is {shown(held.get(key))}, and {shown(value)} is asked for: name "
                "another file, or remove this one"
            )


def _with_byte_order(description: Description) -> dict[str, object]:
    return {**description, "byteorder": sys.byteorder}


def _damage_error(name: str, cause: str) -> ValueError:
    return ValueError(f"{name} is damaged ({cause}): remove it, and messages are sent in full precision again")
