"""Messages between two neighbouring stages: tensors of a micro-batch, and whether there are any.

A stage that has failed goes on through its schedule without computing, and sends refusals in place of the messages that
its neighbours wait for. So no receive waits for ever, every buffer is free when the step ends, and the communicator can
be used further.

The first message is announced by its layout, and both ends settle which kept messages they share before either codes
anything. All that follow must have the same layout; gradients have that of the activations that they belong to, so
theirs is not announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.execution.handle import Handle
from mpicomp.pipeline.activations import Coding
from mpicomp.pipeline.layout import ONE, Field, Layout

HEADER_BYTES = 64  # so that what follows is aligned; one byte is used
MOST_DIMS = 8
_SHAPE = 2 + MOST_DIMS  # type of the tensor or a mark, dimensions or length of a text, and their lengths
_REFUSED, _DESCRIBED = 0, -1
_PLAIN = ("", "float32", "float16", "bfloat16")  # by their number
REFUSABLE = (ValueError, OverflowError, OSError, MemoryError)
"""What coding may raise on one end: the other one hears of it."""

Bytes = NDArray[np.uint8]
Arrays = Sequence[NDArray[Any]]
Ids = NDArray[np.int64]


class Link:
    """One direction of a cut, on one end.

    Parameters
    ----------
    comm : Communicator
        Of the stages.
    neighbour, tag : int
        The other end; `tag` and the next one are used.
    codings : callable
        Returns the coding of the coded tensor with a number.
    announced : bool
        The first message is announced. Otherwise both ends are given `layout`, and nothing is sent, or awaited, while
        that is None.

    Attributes
    ----------
    layout : Layout or None
    """

    def __init__(
        self,
        comm: Communicator,
        neighbour: int,
        tag: int,
        codings: Callable[[int], Coding],
        announced: bool = True,
    ) -> None:
        self._comm, self._neighbour, self._tag = comm, neighbour, tag
        self._codings, self._announced = codings, announced
        self.layout: Layout | None = None
        self._codings_of: Layout | None = None  # the layout that the list of codings was last made for
        self._found: list[Coding | None] = []
        self._silent = False  # in this step: the ends have agreed on no layout, and neither waits for the other

    def forget_layout(self) -> None:
        """Have the next message announced again."""
        self.layout = None

    def _parts(self, layout: Layout, ids: Ids) -> list[tuple[Field, Coding | None, slice]]:
        """Return where each tensor is in a payload."""
        found, end = list[tuple[Field, Coding | None, slice]](), HEADER_BYTES
        for field, coding in zip(layout.fields, self._coded(layout), strict=True):
            start = -(-end // HEADER_BYTES) * HEADER_BYTES
            nbytes = ids.size * field.nbytes if coding is None else coding.nbytes(ids, field.row_shape)
            end = start + nbytes
            found.append((field, coding, slice(start, end)))
        return found

    def _coded(self, layout: Layout) -> list[Coding | None]:
        """Return the coding of each tensor; None: it travels as its bytes."""
        if self._codings_of is not layout:
            numbers = iter(range(len(layout.fields)))
            self._found = [self._codings(next(numbers)) if field.coded else None for field in layout.fields]
            self._codings_of = layout
        return self._found

    def _refusal(self, layout: Layout) -> Exception | None:
        """Return why there is no room for messages of tensors like these."""
        try:
            for field, coding in zip(layout.fields, self._coded(layout), strict=True):
                if coding is not None:
                    coding.prepare(field.row_shape)
        except REFUSABLE as error:
            return error
        return None

    def _settle(self, layout: Layout) -> tuple[bool, Exception | None]:
        """Have both ends forget the messages that they do not share; returns whether both could, and why not here."""
        codings = [one for one in self._coded(layout) if one is not None and one.pairing() is not None]
        if not codings:
            return True, None
        failure: Exception | None = None
        try:
            settle(self._comm, self._neighbour, self._tag + 1, codings)
        except REFUSABLE as error:
            failure = error
        done, theirs = np.array([failure is None], np.int64), np.zeros(1, np.int64)
        exchange(self._comm, self._neighbour, self._tag + 1, done, theirs)
        return bool(done[0] and theirs[0]), failure


class Outgoing(Link):
    """One direction, on the stage that sends.

    Attributes
    ----------
    bytes_sent : int
        All messages, but not their announcement.
    """

    def __init__(
        self,
        comm: Communicator,
        neighbour: int,
        tag: int,
        codings: Callable[[int], Coding],
        announced: bool = True,
    ) -> None:
        super().__init__(comm, neighbour, tag, codings, announced)
        self.bytes_sent = 0
        self._in_flight: deque[tuple[Handle, Bytes]] = deque()

    def send(self, message: tuple[Layout, Arrays] | None, ids: Ids) -> Exception | None:
        """Begin to send the tensors of a micro-batch, or a refusal in place of None; returns why they were refused.

        Parameters
        ----------
        message : Layout and arrays, or None
            float32[examples, ...] of tensors that are coded, uint8[examples, bytes] of others. Read before this
            returns.
        ids : int64[examples]
        """
        error: Exception | None = None
        if self.layout is None and self._announced and not self._silent:
            error = self._announce(None if message is None else message[0])
        if self.layout is None:
            return error
        parts = self._parts(self.layout, ids)
        payload = self._payload(parts[-1][2].stop if parts else HEADER_BYTES)
        if message is not None:
            try:
                for (_, coding, place), values in zip(parts, message[1], strict=True):
                    if coding is None:
                        payload[place] = values.reshape(-1)
                    else:
                        coding.encode(values, ids, payload[place])
            except REFUSABLE as caught:
                error, message = caught, None
        payload[0] = message is not None
        self._in_flight.append((self._comm.isend(payload, self._neighbour, self._tag), payload))
        self.bytes_sent += payload.size
        return error

    def finish(self) -> None:
        """Wait until all is sent: the step ends."""
        for handle, _ in self._in_flight:
            handle.wait()
        while len(self._in_flight) > 2:  # whose buffers are kept for the next step
            self._in_flight.popleft()
        self._silent = False

    def _announce(self, layout: Layout | None) -> Exception | None:
        """Agree with the neighbour on a layout, if there is one and both have room for the messages that they keep."""
        told, answer = np.zeros(_SHAPE, np.int64), np.zeros(1, np.int64)
        error = None if layout is None else self._refusal(layout)
        text = b""
        if layout is not None and error is None:
            shape = layout.fields[0].row_shape if layout.fields else ()
            if layout.is_plain and len(shape) <= MOST_DIMS:
                told[:2] = _PLAIN.index(layout.fields[0].dtype), len(shape)
                told[2 : 2 + len(shape)] = shape
            else:
                text = layout.text().encode()
                told[:2] = _DESCRIBED, len(text)
        self._comm.send(told, self._neighbour, self._tag + 1)
        if text:
            self._comm.send(np.frombuffer(text, np.uint8), self._neighbour, self._tag + 1)
        self._comm.recv(answer, self._neighbour, self._tag + 1)
        agreed = bool(answer[0])
        if agreed and layout is not None:
            agreed, error = self._settle(layout)
        self._silent = not agreed
        self.layout = layout if agreed else None
        return error

    def _payload(self, nbytes: int) -> Bytes:
        """Memory of a message that has gone, or new one."""
        if self._in_flight and self._in_flight[0][0].poll():
            handle, payload = self._in_flight.popleft()
            handle.wait()
            if payload.size == nbytes:
                return payload
        return np.zeros(nbytes, np.uint8)


class Incoming(Link):
    """One direction, on the stage that receives."""

    def __init__(
        self,
        comm: Communicator,
        neighbour: int,
        tag: int,
        codings: Callable[[int], Coding],
        announced: bool = True,
    ) -> None:
        super().__init__(comm, neighbour, tag, codings, announced)
        self._begun: deque[tuple[Handle, Bytes, list[tuple[Field, Coding | None, slice]]]] = deque()
        self._free: list[Bytes] = []

    def expect(self, ids: Ids) -> bool:
        """Begin to receive a micro-batch, if its size is known; else `take` will do that, and this returns False."""
        if self.layout is None:
            return False
        parts = self._parts(self.layout, ids)
        nbytes = parts[-1][2].stop if parts else HEADER_BYTES
        same = [payload for payload in self._free if payload.size == nbytes]
        payload = same[0] if same else np.empty(nbytes, np.uint8)
        self._free = [one for one in self._free if one is not payload and one.size == nbytes]
        self._begun.append((self._comm.irecv(payload, self._neighbour, self._tag), payload, parts))
        return True

    def take(self, ids: Ids) -> Arrays | None:
        """Return the tensors of the micro-batch expected first, in memory of their own; None after a refusal.

        Raises
        ------
        ValueError
            A message cannot be decoded.
        MemoryError, OSError
            There is no room for the kept rows, or they cannot be read.
        """
        if self.layout is None and self._announced and not self._silent:
            self._await_announcement()
        if self.layout is None:
            return None
        if not self._begun:
            self.expect(ids)
        handle, payload, parts = self._begun.popleft()
        handle.wait()
        self._free.append(payload)
        if not payload[0]:
            return None
        return [
            payload[place].reshape(ids.size, -1).copy()
            if coding is None
            else coding.decode(payload[place], ids, field.row_shape)
            for field, coding, place in parts
        ]

    def finish(self) -> None:
        """The step ends."""
        self._silent = False

    def _await_announcement(self) -> None:
        told = np.zeros(_SHAPE, np.int64)
        self._comm.recv(told, self._neighbour, self._tag + 1)
        layout: Layout | None = None
        if told[0] == _DESCRIBED:
            text = np.empty(told[1], np.uint8)
            self._comm.recv(text, self._neighbour, self._tag + 1)
            layout = Layout.read(text.tobytes().decode())
        elif told[0] != _REFUSED:
            dtype, shape = _PLAIN[told[0]], tuple(told[2 : 2 + told[1]].tolist())
            layout = Layout(ONE, (Field(dtype, 4 if dtype == "float32" else 2, shape, True),))
        error = None if layout is None else self._refusal(layout)
        agreed = layout is not None and error is None
        self._comm.send(np.array([agreed], np.int64), self._neighbour, self._tag + 1)
        if agreed and layout is not None:
            agreed, error = self._settle(layout)
        self._silent, self.layout = not agreed, layout if agreed else None
        if error is not None:
            raise error


def settle(comm: Communicator, neighbour: int, tag: int, codings: Sequence[Coding]) -> int:
    """Have both ends forget the examples whose messages they do not share; returns how many; both ends call it.

    Raises
    ------
    ValueError, OSError
        The stores cannot be changed.
    """
    mine = [one for one in (coding.pairing() for coding in codings) if one is not None]
    sizes, theirs = (np.array([len(mine), sum(one.size for one in mine)], np.int64), np.zeros(2, np.int64))
    exchange(comm, neighbour, tag, sizes, theirs)
    words = np.concatenate([np.zeros(0, np.uint32), *mine]).view(np.int32)
    arrived = np.empty(int(theirs[1]), np.int32)
    exchange(comm, neighbour, tag, words, arrived)
    if sizes.tolist() != theirs.tolist():  # of two runs: nothing that is kept here has a counterpart
        for coding in codings:
            coding.forget_all()
        return 0
    parts = np.split(arrived.view(np.uint32), np.cumsum([one.size for one in mine])[:-1])
    return sum(coding.settle(*pair) for coding, pair in zip(codings, zip(mine, parts, strict=True), strict=True))


def exchange(comm: Communicator, neighbour: int, tag: int, mine: NDArray[Any], theirs: NDArray[Any]) -> None:
    """Send an array to the other end, and receive its own."""
    receiving, sending = comm.irecv(theirs, neighbour, tag), comm.isend(mine, neighbour, tag)
    receiving.wait()
    sending.wait()
