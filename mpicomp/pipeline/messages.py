"""Messages between two neighbouring stages: the tensors of a micro-batch, or a refusal.

A stage that has failed goes on through its schedule without computing, and sends refusals in place of the messages that
its neighbours wait for. So every receive ends, every buffer is free when the step ends, and the communicator can be
used further.

The first message is announced by its layout, and both ends settle which kept messages they share before either codes a
message. All later ones must have the same layout; gradients have that of the activations that they belong to, so theirs
is not announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from collectives import Communicator
from collectives.annotations import AnyArray, Bytes
from collectives.execution.handle import Handle
from mpicomp.pipeline.agreement import exchange
from mpicomp.pipeline.coding import Coding
from mpicomp.pipeline.message_layout import PLAIN_NUMBERS, MessageLayout, TensorField
from mpicomp.pipeline.store_rows import Ids
from mpicomp.pipeline.tensors import Arrays

HEADER_BYTES = 64  # one byte is used; the others align the tensors
_REFUSED, _DESCRIBED = 0, -1
REFUSABLE = (ValueError, OverflowError, OSError, MemoryError)
"""Errors of coding on one end, of which the other one receives a refusal."""

_Part = tuple[TensorField, Coding | None, slice]


@dataclass(eq=False)
class _Link:
    """One direction of a cut, on one end."""

    comm: Communicator
    neighbour: int
    tag: int  # and the next one
    codings: Callable[[int], Coding]  # coding of the coded tensor with a number
    # The first message is announced. Otherwise both ends are given `layout`, and exchange no message before that.
    announced: bool = True
    layout: MessageLayout | None = field(default=None, init=False)
    # In this step: the ends have agreed on no layout, and neither waits for the other.
    _silent: bool = field(default=False, init=False)
    _codings_of: MessageLayout | None = field(default=None, init=False)  # the layout that `_found` was made for
    _found: list[Coding | None] = field(default_factory=list, init=False)

    def forget_layout(self) -> None:
        """Have the next message announced again."""
        self.layout = None

    def _parts(self, layout: MessageLayout, ids: Ids) -> tuple[list[_Part], int]:
        """Return the place of each tensor in a payload, and the size of the payload."""
        found, end = list[_Part](), HEADER_BYTES
        for tensor, coding in zip(layout.fields, self._find_codings(layout), strict=True):
            start = -(-end // HEADER_BYTES) * HEADER_BYTES
            end = start + (ids.size * tensor.nbytes if coding is None else coding.nbytes(ids, tensor.row_shape))
            found.append((tensor, coding, slice(start, end)))
        return found, end

    def _find_codings(self, layout: MessageLayout) -> list[Coding | None]:
        """Return the coding of each tensor; None: it travels as its bytes."""
        if self._codings_of is not layout:
            numbers = iter(range(len(layout.fields)))
            self._found = [self.codings(next(numbers)) if tensor.coded else None for tensor in layout.fields]
            self._codings_of = layout
        return self._found

    def _refusal(self, layout: MessageLayout) -> Exception | None:
        """Return why there is no room for messages of tensors like these."""
        try:
            for tensor, coding in zip(layout.fields, self._find_codings(layout), strict=True):
                if coding is not None:
                    coding.prepare(tensor.row_shape)
        except REFUSABLE as error:
            return error
        return None

    def _adopt(self, layout: MessageLayout | None, agreed: bool) -> Exception | None:
        """Take a layout over if both ends can, and settle the messages that they share; returns the failure here."""
        error: Exception | None = None
        if agreed and layout is not None:
            agreed, error = self._settle(layout)
        self._silent, self.layout = not agreed, layout if agreed else None
        return error

    def _settle(self, layout: MessageLayout) -> tuple[bool, Exception | None]:
        """Have both ends forget the messages that they do not share; returns whether both could, and why not here."""
        codings = [one for one in self._find_codings(layout) if one is not None and one.pairing() is not None]
        if not codings:
            return True, None
        failure: Exception | None = None
        try:
            settle(self.comm, self.neighbour, self.tag + 1, codings)
        except REFUSABLE as error:
            failure = error
        done = np.array([failure is None], np.int64)
        theirs = exchange(self.comm, self.neighbour, self.tag + 1, done, np.zeros(1, np.int64))
        return bool(done[0] and theirs[0]), failure


@dataclass(eq=False)
class Outgoing(_Link):
    """One direction, on the stage that sends."""

    bytes_sent: int = field(default=0, init=False)  # of all messages, but not of their announcement
    _in_flight: deque[tuple[Handle, Bytes]] = field(default_factory=deque, init=False)

    def send(self, message: tuple[MessageLayout, Arrays] | None, ids: Ids) -> Exception | None:
        """Begin to send the tensors of a micro-batch, or a refusal in place of None; return why they were refused."""
        # arrays are float32[examples, ...] where coded, else uint8[examples, bytes]; read before this returns
        error: Exception | None = None
        if self.layout is None and self.announced and not self._silent:
            error = self._announce(None if message is None else message[0])
        if self.layout is None:
            return error
        parts, nbytes = self._parts(self.layout, ids)
        payload = self._payload(nbytes)
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
        self._in_flight.append((self.comm.isend(payload, self.neighbour, self.tag), payload))
        self.bytes_sent += payload.size
        return error

    def finish(self) -> None:
        """Wait until all is sent: the step ends."""
        for handle, _ in self._in_flight:
            handle.wait()
        while len(self._in_flight) > 2:  # whose buffers are kept for the next step
            self._in_flight.popleft()
        self._silent = False

    def _announce(self, layout: MessageLayout | None) -> Exception | None:
        """Agree with the neighbour on a layout, if there is one and both have room for the messages that they keep."""
        announcement, answer = np.zeros(PLAIN_NUMBERS, np.int64), np.zeros(1, np.int64)
        error = None if layout is None else self._refusal(layout)
        text = b""
        if layout is not None and error is None:
            numbers = layout.numbers()
            if numbers is None:
                text = layout.text().encode()
                numbers = [_DESCRIBED, len(text)]
            announcement[: len(numbers)] = numbers
        self.comm.send(announcement, self.neighbour, self.tag + 1)
        if text:
            self.comm.send(np.frombuffer(text, np.uint8), self.neighbour, self.tag + 1)
        self.comm.recv(answer, self.neighbour, self.tag + 1)
        return self._adopt(layout, bool(answer[0])) or error

    def _payload(self, nbytes: int) -> Bytes:
        """Return the memory of a message that has gone, or new memory."""
        if self._in_flight and self._in_flight[0][0].poll():
            handle, payload = self._in_flight.popleft()
            handle.wait()
            if payload.size == nbytes:
                return payload
        return np.zeros(nbytes, np.uint8)


@dataclass(eq=False)
class Incoming(_Link):
    """One direction, on the stage that receives."""

    _begun: deque[tuple[Handle, Bytes, list[_Part]]] = field(default_factory=deque, init=False)
    _free: list[Bytes] = field(default_factory=list, init=False)

    def expect(self, ids: Ids) -> bool:
        """Begin to receive a micro-batch, if its size is known; else `take` will do that, and this returns False."""
        if self.layout is None:
            return False
        parts, nbytes = self._parts(self.layout, ids)
        same = [payload for payload in self._free if payload.size == nbytes]
        payload = same[0] if same else np.empty(nbytes, np.uint8)
        self._free = [one for one in self._free if one is not payload and one.size == nbytes]
        self._begun.append((self.comm.irecv(payload, self.neighbour, self.tag), payload, parts))
        return True

    def take(self, ids: Ids) -> Arrays | None:
        """Return the tensors of the micro-batch expected first, in memory of their own; None after a refusal."""
        if self.layout is None and self.announced and not self._silent:
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
        # decoding raises ValueError for damage, MemoryError or OSError where kept rows find no room or cannot be read
        return [
            payload[place].reshape(ids.size, -1).copy()
            if coding is None
            else coding.decode(payload[place], ids, tensor.row_shape)
            for tensor, coding, place in parts
        ]

    def finish(self) -> None:
        """End the step."""
        self._silent = False

    def _await_announcement(self) -> None:
        announcement = np.zeros(PLAIN_NUMBERS, np.int64)
        self.comm.recv(announcement, self.neighbour, self.tag + 1)
        layout: MessageLayout | None = None
        error: Exception | None = None
        try:
            if announcement[0] == _DESCRIBED:
                text = np.empty(announcement[1], np.uint8)
                self.comm.recv(text, self.neighbour, self.tag + 1)
                layout = MessageLayout.from_text(text.tobytes())
            elif announcement[0] != _REFUSED:
                layout = MessageLayout.from_numbers(announcement.tolist())
        except ValueError as damage:  # the neighbour waits for an answer
            error = damage
        if layout is not None:
            error = self._refusal(layout)
        agreed = layout is not None and error is None
        self.comm.send(np.array([agreed], np.int64), self.neighbour, self.tag + 1)
        error = self._adopt(layout, agreed) or error
        if error is not None:
            raise error


def settle(comm: Communicator, neighbour: int, tag: int, codings: Sequence[Coding]) -> int:
    """Have both ends forget the examples whose messages they do not share; return their number. Both ends call it."""
    mine = [one for one in (coding.pairing() for coding in codings) if one is not None]
    sizes = np.array([len(mine), sum(one.size for one in mine)], np.int64)
    theirs: AnyArray = exchange(comm, neighbour, tag, sizes, np.zeros(2, np.int64))
    words = np.concatenate([np.zeros(0, np.uint32), *mine]).view(np.int32)
    arrived = exchange(comm, neighbour, tag, words, np.empty(int(theirs[1]), np.int32)).view(np.uint32)
    if sizes.tolist() != theirs.tolist():  # of two runs: no message that is kept here has a counterpart
        for coding in codings:
            coding.forget_all()
        return 0
    parts = np.split(arrived, np.cumsum([one.size for one in mine])[:-1])
    return sum(coding.settle(*pair) for coding, pair in zip(codings, zip(mine, parts, strict=True), strict=True))
