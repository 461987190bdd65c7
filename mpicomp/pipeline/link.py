"""Messages between two neighbouring stages: rows of a micro-batch, and whether there are any.

A stage that has failed goes on through its schedule without computing, and refuses what its neighbours wait for. So
no receive waits for ever, every buffer is free when the step ends, and the communicator can be used further.

The first message says what shape the rows have, and is answered when both ends have made room for what they keep. All
that follow must have the same shape; gradients have that of the activations that they belong to, so nothing need be
said of theirs.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.execution.handle import Handle
from mpicomp.pipeline.activations import Coding
from mpicomp.pipeline.errors import PipelineError

HEADER_BYTES = 64  # so that what follows is aligned; one byte is used
MOST_DIMS = 8
_SHAPE = 2 + MOST_DIMS  # sent or refused, dimensions, and their lengths
REFUSABLE = (ValueError, OverflowError, OSError, MemoryError)
"""What coding may raise on one end: the other one hears of it."""

Bytes = NDArray[np.uint8]
Rows = NDArray[np.float32]
Ids = NDArray[np.int64]


class Outgoing:
    """One direction, on the stage that sends.

    Parameters
    ----------
    comm : Communicator
        Of the stages.
    to, tag : int
        The neighbour; `tag` and the next one are used.
    coding : Coding
    tells : bool
        The first message says what shape an example has. Otherwise both ends are told by `row_shape`, and nothing is
        sent, or awaited, while that is None.

    Attributes
    ----------
    row_shape : tuple of int or None
    bytes_sent : int
        All messages, but not what tells shapes.
    """

    def __init__(self, comm: Communicator, to: int, tag: int, coding: Coding, tells: bool = True) -> None:
        self._comm, self._to, self._tag, self._coding, self._tells = comm, to, tag, coding, tells
        self.row_shape: tuple[int, ...] | None = None
        self.bytes_sent = 0
        self._in_flight: deque[tuple[Handle, Bytes]] = deque()
        self._silent = False  # in this step: the neighbour knows no shape, and waits for nothing

    def send(self, rows: Rows | None, ids: Ids) -> Exception | None:
        """Begin to send the rows of a micro-batch, or a refusal in place of None; returns why rows were refused.

        Parameters
        ----------
        rows : float32[examples, ...] or None
            Read before this returns.
        ids : int64[examples]
        """
        error: Exception | None = None
        if self.row_shape is None:
            if self._tells and not self._silent:
                error = self._tell_shape(rows)
        elif rows is not None and rows.shape[1:] != self.row_shape:
            error = PipelineError(
                f"the stage's output has shape {[*rows.shape]}, and before an example's was {[*self.row_shape]}: a "
                "stage must return tensors of one shape per example, so pad its inputs"
            )
            rows = None
        if self.row_shape is None:
            return error
        payload = self._payload(HEADER_BYTES + self._coding.nbytes(ids, self.row_shape))
        if rows is not None:
            try:
                self._coding.encode(rows, ids, payload[HEADER_BYTES:])
            except REFUSABLE as caught:
                error, rows = caught, None
        payload[0] = rows is not None
        self._in_flight.append((self._comm.isend(payload, self._to, self._tag), payload))
        self.bytes_sent += payload.size
        return error

    def finish(self) -> None:
        """Wait until all is sent: the step ends."""
        for handle, _ in self._in_flight:
            handle.wait()
        while len(self._in_flight) > 2:  # whose buffers are kept for the next step
            self._in_flight.popleft()
        self._silent = False

    def forget_shape(self) -> None:
        """Tell the shape anew with the next message."""
        self.row_shape = None

    def _tell_shape(self, rows: Rows | None) -> Exception | None:
        """Agree with the neighbour on a shape, if there are rows and both have room for what they keep."""
        told, answer = np.zeros(_SHAPE, np.int64), np.zeros(1, np.int64)
        error = None if rows is None else _refusal(self._coding, rows.shape[1:])
        if rows is not None and error is None:
            told[:2] = 1, rows.ndim - 1
            told[2 : 1 + rows.ndim] = rows.shape[1:]
        self._comm.send(told, self._to, self._tag + 1)
        self._comm.recv(answer, self._to, self._tag + 1)
        self._silent = not answer[0]
        self.row_shape = rows.shape[1:] if rows is not None and answer[0] else None
        return error

    def _payload(self, nbytes: int) -> Bytes:
        """Memory of a message that has gone, or new one."""
        if self._in_flight and self._in_flight[0][0].poll():
            handle, payload = self._in_flight.popleft()
            handle.wait()
            if payload.size == nbytes:
                return payload
        return np.zeros(nbytes, np.uint8)


class Incoming:
    """One direction, on the stage that receives; parameters are those of `Outgoing`."""

    def __init__(self, comm: Communicator, source: int, tag: int, coding: Coding, tells: bool = True) -> None:
        self._comm, self._source, self._tag, self._coding, self._tells = comm, source, tag, coding, tells
        self.row_shape: tuple[int, ...] | None = None
        self._begun: deque[tuple[Handle, Bytes]] = deque()
        self._free: list[Bytes] = []
        self._silent = False

    def expect(self, ids: Ids) -> bool:
        """Begin to receive a micro-batch, if its size is known; else `take` will do that, and this returns False."""
        if self.row_shape is None:
            return False
        nbytes = HEADER_BYTES + self._coding.nbytes(ids, self.row_shape)
        same = [payload for payload in self._free if payload.size == nbytes]
        payload = same[0] if same else np.empty(nbytes, np.uint8)
        self._free = [one for one in self._free if one is not payload and one.size == nbytes]
        self._begun.append((self._comm.irecv(payload, self._source, self._tag), payload))
        return True

    def take(self, ids: Ids) -> Rows | None:
        """The rows of the micro-batch expected first, in memory of their own; None: the neighbour has none.

        Raises
        ------
        ValueError
            What came cannot be decoded.
        MemoryError, OSError
            There is no room for what is kept of the rows, or it cannot be read.
        """
        if self.row_shape is None and self._tells and not self._silent:
            self._hear_shape()
        if self.row_shape is None:
            return None
        if not self._begun:
            self.expect(ids)
        handle, payload = self._begun.popleft()
        handle.wait()
        self._free.append(payload)
        return self._coding.decode(payload[HEADER_BYTES:], ids, self.row_shape) if payload[0] else None

    def finish(self) -> None:
        """The step ends."""
        self._silent = False

    def forget_shape(self) -> None:
        """The next message tells it anew."""
        self.row_shape = None

    def _hear_shape(self) -> None:
        told = np.zeros(_SHAPE, np.int64)
        self._comm.recv(told, self._source, self._tag + 1)
        row_shape = tuple(int(length) for length in told[2 : 2 + told[1]])
        error = _refusal(self._coding, row_shape) if told[0] else None
        agreed = bool(told[0]) and error is None
        self._comm.send(np.array([agreed], np.int64), self._source, self._tag + 1)
        self._silent, self.row_shape = not agreed, row_shape if agreed else None
        if error is not None:
            raise error


def _refusal(coding: Coding, row_shape: tuple[int, ...]) -> Exception | None:
    """Why there is no room for what is kept of rows of this shape."""
    try:
        coding.prepare(row_shape)
    except REFUSABLE as error:
        return error
    return None
