"""Receives of messages between two ranks: that of a header, then that of its content, in the order of their begins.

The content is received once its header has come, with memory of its length. Receives of one rank and tag go on in
their order, whichever of them is polled.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import suppress

import numpy as np
from mpi4py import MPI

from collectives.annotations import Bytes, Testable, override
from collectives.arrays.vectors import Flat
from collectives.errors import is_of_handler

LONGEST_BYTES = 1 << 30  # MPI counts in an int: longer messages are of blocks
_LENGTH_BYTES, _DESCRIPTION_BYTES = 8, 96


def description(vector: Flat) -> str:
    """Return dtype and shape of an array, in as many characters as travel with it."""
    return f"{vector.dtype}{list(vector.shape)}"[:_DESCRIPTION_BYTES]


def read_header(header: Bytes) -> str:
    """Return the description that travels with an array; damaged bytes have replacement characters in their place."""
    return bytes(header[_LENGTH_BYTES:]).rstrip(b"\0").decode(errors="replace")


def message(memory: Bytes) -> list[object]:
    """Return a buffer as mpi4py takes it, of any length."""
    if memory.size <= LONGEST_BYTES:
        return [memory, memory.size, MPI.BYTE]
    starts = range(0, memory.size, LONGEST_BYTES)
    lengths = [min(LONGEST_BYTES, memory.size - start) for start in starts]
    return [memory, 1, MPI.BYTE.Create_hindexed(lengths, list(starts)).Commit()]


def header_of(vector: Flat) -> bytes:
    """Return the header of an array: its bytes, and its description."""
    length = vector.values.nbytes.to_bytes(_LENGTH_BYTES, sys.byteorder)
    return length + description(vector).encode().ljust(_DESCRIPTION_BYTES, b"\0")


class Receive:
    """The two receives of a message: that of its header, and that of its content, posted by `go_on`."""

    def __init__(self, mpi_comm: MPI.Comm, vector: Flat, source: int, tag: int) -> None:
        self._mpi_comm, self._vector, self._from = mpi_comm, vector, (source, tag + 1)
        self.header = np.zeros(_LENGTH_BYTES + _DESCRIPTION_BYTES, np.uint8)
        self.heading = mpi_comm.Irecv(self.header, source, tag)
        self.differs = False
        self.request: Testable | None = None
        self.error: Exception | None = None

    def go_on(self) -> None:
        """Post the receive of the content; the header has come."""
        self.differs = self.header.tobytes() != header_of(self._vector)
        memory = self._vector.values.view(np.uint8)
        if self.differs:  # it is taken all the same, so that a later receive does not find it
            memory = np.empty(int(self.header[:_LENGTH_BYTES].view(np.int64)[0]), np.uint8)
        self.request = self._mpi_comm.Irecv(message(memory), *self._from)


class Inbox:
    """Receives of one rank and tag that wait for their headers, in the order in which they were begun."""

    def __init__(self) -> None:
        self._waiting: deque[Receive] = deque()
        self._beginning, self._going_on = threading.RLock(), threading.Lock()

    def begin(self, mpi_comm: MPI.Comm, vector: Flat, source: int, tag: int) -> Receive:
        """Begin a receive, which its call must `drop` in the end."""
        with self._beginning:
            receive = Receive(mpi_comm, vector, source, tag)
            self._waiting.append(receive)
        return receive

    def begins_with(self, receive: Receive) -> bool:
        """Return True if no receive before this one waits."""
        waiting = self._waiting
        return bool(waiting) and waiting[0] is receive

    def go_on(self) -> None:
        """Let the receives go on whose headers, and those of all receives before them, have come."""
        # another thread, or the frame that a signal handler has interrupted, does so already
        if not self._going_on.acquire(blocking=False):
            return
        try:
            while self._waiting and self._waiting[0].error is None:
                first = self._waiting[0]
                try:
                    if not first.heading.Test():
                        return
                    first.go_on()
                except Exception as error:
                    if is_of_handler(error):
                        raise
                    first.error = error  # raised in its call; until then later receives would take its content
                else:
                    self.drop(first)
        finally:
            self._going_on.release()

    def drop(self, receive: Receive) -> None:
        """Let later receives go on without this one."""
        with suppress(ValueError):  # without a lock, which a forked process may find taken for ever
            self._waiting.remove(receive)


class Heading(Testable):
    """Arrival of the header of a receive."""

    def __init__(self, inbox: Inbox, receive: Receive) -> None:
        self._inbox, self._receive = inbox, receive

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        self._inbox.go_on()
        if self._receive.error is not None:
            raise self._receive.error
        return self._receive.request is not None
