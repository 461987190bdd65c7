"""Thread that reads rows of a store's file ahead, and writes rows behind the computation.

Rows that wait to be written are read from memory, so a read always returns the last write. Reading ahead comes first,
as a caller may soon wait for the row. Rows that wait to be written and rows that were read ahead take a bounded number
of bytes each: writers then wait for the disk, and the rows that were read ahead earliest are dropped.

One thread calls the methods of `StoreThread`, and only that one: so a row cannot change while its caller reads it.
"""

# Stores without the thread were measured: `pread` and `pwrite` in the caller, and `numpy.memmap`, with the same marks
# and the kernel's own read-ahead. Both survive the crash tests, and cost about as much with rows of 32 and 256 KiB.
# With larger rows the caller waits for copies and checksums, which the thread hides behind the computation:
# micro-batches of 4 rows of 1 MiB took 1.1 to 1.2 times as long, and those of 4 MiB 1.2 to 1.35 times. See
# mpicomp help pipeline-store. Futures of one executor in place of the condition: shorter, up to 1.06 times as long in a
# step.

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from collectives.annotations import Bytes
from mpicomp.pipeline.store_file import StoreFile
from mpicomp.pipeline.store_rows import Ids, Stamps, sum_codes


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingRows:
    """Rows that wait to be written together."""

    rows: list[int]
    payload: Bytes
    stamps: list[int]


class StoreThread:
    """Reads and writes of one file, in a thread."""

    def __init__(self, file: StoreFile, row_bytes: int, most_bytes: int) -> None:
        self._file, self._row_bytes = file, row_bytes
        # for rows read ahead, and again for rows that wait; at least one batch of any size fits
        self._most_bytes, self._most_ahead = most_bytes, max(1, most_bytes // row_bytes)
        self._changed = threading.Condition()
        self._batches: deque[_WaitingRows] = deque()
        self._pending: dict[int, tuple[_WaitingRows, int]] = {}  # where the newest bytes of a row wait
        self._pending_bytes = 0
        self._wanted: dict[int, None] = {}  # in order
        self._reading: int | None = None
        self._ahead: dict[int, Bytes] = {}
        self.sum = 0  # `sum_codes` of all writes that are in the file; complete after `drain`
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = self._left = False

    def read_ahead(self, rows: Ids) -> None:
        """Read rows that have a message when there is time."""
        self._start()
        with self._changed:
            self._check()
            for row in rows.tolist()[: self._most_ahead]:
                if row not in self._ahead and row not in self._pending:
                    self._wanted[row] = None
            while len(self._wanted) > self._most_ahead:
                del self._wanted[next(iter(self._wanted))]
            self._changed.notify_all()

    def read_rows(self, rows: Ids) -> list[Bytes]:
        """Return the last written bytes of rows that have a message. The caller must not change them."""
        found: dict[int, Bytes] = {}
        numbers = rows.tolist()
        with self._changed:
            self._check()
            while self._reading is not None and self._reading in numbers:
                self._changed.wait()
            self._check()
            for row in numbers:
                self._wanted.pop(row, None)
                early = self._ahead.pop(row, None)
                if row in self._pending:
                    batch, place = self._pending[row]
                    found[row] = batch.payload[place]
                elif early is not None:
                    found[row] = early
        for row in numbers:
            if row not in found:
                found[row] = np.empty(self._row_bytes, np.uint8)
                self._file.read_row(row, found[row])
        return [found[row] for row in numbers]

    def write_behind(self, rows: Ids, payload: Bytes, stamps: Stamps) -> None:
        """Have rows written when there is time; waits if too many wait already."""
        if not rows.size:
            return
        self._start()
        with self._changed:
            self._check()
            while self._batches and self._pending_bytes + payload.nbytes > self._most_bytes:
                self._changed.wait()
                self._check()
            batch = _WaitingRows(rows.tolist(), payload, stamps.tolist())
            self._batches.append(batch)
            self._pending_bytes += payload.nbytes
            for place, row in enumerate(batch.rows):
                self._pending[row] = batch, place
                self._ahead.pop(row, None)
                self._wanted.pop(row, None)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all rows are in the file."""
        with self._changed:
            self._check()
            while self._batches:
                self._changed.wait()
                self._check()

    def stop(self, process: int) -> None:
        """Write all rows that wait, and end the thread and the file; OSError if a row could not be written."""
        # a process that was forked has no such thread
        if os.getpid() != process:
            return
        with self._changed:
            self._stopping = True
            self._wanted.clear()
            self._changed.notify_all()
            if threading.current_thread() is self._thread:  # in which the store was collected as garbage
                self._left = True
                return
        if self._thread is not None:
            self._thread.join()
        self._finish()

    def _finish(self) -> None:
        try:
            self._check()
            self._file.sync()
        finally:
            self._file.close()
            self._ahead.clear()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpicomp message store", daemon=True)
            self._thread.start()

    def _check(self) -> None:
        """Raise the error that has ended the thread."""
        if self._error is None:
            return
        text = f"{self._file.name}: rows could not be written back, so this store has lost messages"
        number = self._error.errno if isinstance(self._error, OSError) else None
        text += f" ({self._error}): resume from the last checkpoint"
        raise OSError(number or errno.EIO, text) from self._error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._wanted or self._batches or self._stopping):
                        self._changed.wait()
                    row = next(iter(self._wanted), None)
                    if row is not None:
                        del self._wanted[row]
                        self._reading = row
                    elif not self._batches:
                        break
                if row is not None:
                    self._read_early(row)
                else:
                    self._write_first_batch()
            if self._left:
                self._finish()
        except BaseException as error:  # noqa: BLE001 - the next call raises it
            with self._changed:
                self._error = error
                self._reading = None
                self._changed.notify_all()

    def _read_early(self, row: int) -> None:
        payload: Bytes = np.empty(self._row_bytes, np.uint8)
        found = True
        try:
            self._file.read_row(row, payload)
        except (OSError, ValueError):
            found = False  # the caller that needs the row reads it again, and receives the error
        with self._changed:
            self._reading = None
            if found and row not in self._pending:
                self._ahead[row] = payload
                while len(self._ahead) > self._most_ahead:
                    del self._ahead[next(iter(self._ahead))]
            self._changed.notify_all()

    def _write_first_batch(self) -> None:
        batch = self._batches[0]
        codes = [
            self._file.write_row(row, payload, stamp)
            for row, payload, stamp in zip(batch.rows, batch.payload, batch.stamps, strict=True)
        ]
        with self._changed:
            self.sum = (self.sum + sum_codes(batch.rows, batch.stamps, codes)) % 2**64
            self._batches.popleft()
            self._pending_bytes -= batch.payload.nbytes
            for row in batch.rows:
                if self._pending[row][0] is batch:
                    del self._pending[row]
            self._changed.notify_all()
