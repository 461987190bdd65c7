"""Messages between two ranks: they take no part in the order of collectives, and nobody else waits for them.

Before a message goes a short one that says what it is. The receiver posts both receives at once, on a tag each, so a
long message can begin to move as soon as both ranks are there, and each later receive takes the later message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.closing import Closable
from collectives.errors import CollectiveMismatch
from collectives.execution.handle import Call, Handle, Steps
from collectives.execution.staged import staged
from collectives.memory import COPIED, Flat, flat, is_read_only
from collectives.progress.polling import wait
from collectives.users import FIXED_TAGS

LARGEST_TAG = 300
"""MPI promises 32767 tags. Collectives take 32000, and each tag of a message is two."""
LONGEST_BYTES = 1 << 30  # MPI counts in an int: longer messages are of blocks
_FIRST_TAG = 2 * FIXED_TAGS
_SAID_BYTES = 96  # what a message is, in words

Bytes = NDArray[np.uint8]


class PointToPoint(Closable):
    """What a communicator has for two of its ranks."""

    def isend(self, x: Any, to: int, tag: int = 0) -> Handle:
        """Begin to send an array to another rank.

        Parameters
        ----------
        x : array
            NumPy or DLPack, contiguous, on the CPU, of any dtype of `broadcast`. Leave it alone until the handle's
            ``wait()`` returns: that is when the receiver has taken it, or MPI has copied it.
        to : int
            The receiver; this rank itself is allowed.
        tag : int from 0 to 300
            Receives of another tag do not take the message. Messages of one tag arrive in the order of their sends.

        Returns
        -------
        Handle
            Its ``wait()`` returns None, and raises what `irecv` does, but CollectiveMismatch.

        Raises
        ------
        TypeError, ValueError
            An argument cannot be used, on this rank alone: the other one waits for a message that does not come.
        """
        vector, name = self._examined("isend", x, "to", to, tag)
        return self.begin(*self._sending(name, vector, to, tag))

    def irecv(self, out: Any, source: int, tag: int = 0) -> Handle:
        """Begin to receive an array from another rank.

        Parameters
        ----------
        out : array
            Overwritten; of the dtype and shape of the array that was sent.
        source, tag : int
            The sender, and the tag that it gives.

        Returns
        -------
        Handle
            Its ``wait()`` returns `out`.

        Raises
        ------
        TypeError, ValueError
            See `isend`.
        CollectiveMismatch
            By ``wait()``: the sender has sent an array of another dtype or shape. What `out` holds then is undefined,
            the message is lost, and the communicator can be used further. The sender does not learn of it.
        CollectiveTimeout
            By ``wait()``: the other rank has not come within the `arrival_timeout`, or the message has not moved for
            the `timeout`. The communicator can be used no longer.
        PeerFailure
            By ``wait()``: MPI reports that the other rank has failed.
        """
        vector, name = self._examined("irecv", out, "from", source, tag)
        return self.begin(*self._receiving(name, vector, out, source, tag))

    def send(self, x: Any, to: int, tag: int = 0) -> None:
        """Send an array, as `isend` does, and wait for it."""
        vector, name = self._examined("send", x, "to", to, tag)
        with self._span("send", to=to, tag=tag, bytes=vector.values.nbytes):
            self.run(*self._sending(name, vector, to, tag))

    def recv(self, out: Any, source: int, tag: int = 0) -> Any:
        """Overwrite `out` with the array that another rank sends, and return it; raises what `irecv` does."""
        vector, name = self._examined("recv", out, "from", source, tag)
        with self._span("recv", source=source, tag=tag, bytes=vector.values.nbytes):
            return self.run(*self._receiving(name, vector, out, source, tag))

    def _span(self, name: str, **told: Any) -> AbstractContextManager[None]:
        """Record a call, where there is a trace."""
        return nullcontext() if self.trace is None else self.trace.span("call", name, **told)

    def _examined(self, call: str, x: Any, preposition: str, peer: int, tag: int) -> tuple[Flat, str]:
        """The vector of an array, and the call in words."""
        try:
            vector = flat(x, COPIED)
            if index(peer) not in range(self.size):
                raise ValueError(f"there is no rank {peer}")
            if index(tag) not in range(LARGEST_TAG + 1):
                raise ValueError(f"the tag must lie in 0 .. {LARGEST_TAG}, not {tag}")
            if preposition == "from" and is_read_only(vector, x):
                raise ValueError("the array is read-only: pass one that can be written")
        except (TypeError, ValueError, MemoryError) as error:
            raise type(error)(f"{self.here}, {call}: {error}") from None
        return vector, f"{call} of {said(vector)} {preposition} rank {peer} with tag {tag}"

    def _sending(self, name: str, vector: Flat, to: int, tag: int) -> tuple[Call, Steps]:
        call = self._apart_call(name, lambda: f"{self.here}: rank {to} does not receive; {name}")
        copied = None if vector.staging is None else vector.staging.fetch()
        if copied is not None:  # before the next message of this tag can begin
            waiting = f"{self.here}: the device does not come to a copy; {name}"
            wait(copied, self.arrival_timeout, lambda: waiting)
        return call, self._send(call, vector, to, _FIRST_TAG + 2 * tag)

    def _send(self, call: Call, vector: Flat, to: int, tag: int) -> Steps:
        requests = []
        if self._verify:
            requests.append(self.mpi_comm.Isend(_header(vector), to, tag))
        requests.append(self.mpi_comm.Isend(message(vector.values.view(np.uint8)), to, tag + 1))
        call.owners = (vector, *requests)
        for request in requests:
            yield from self.await_request(call, request, call.describe)

    def _receiving(self, name: str, vector: Flat, out: Any, source: int, tag: int) -> tuple[Call, Steps]:
        call = self._apart_call(name, lambda: f"{self.here}: nothing from rank {source}; {name}")
        call.result = out
        steps = self._receive(call, vector, source, _FIRST_TAG + 2 * tag)
        return call, staged(call, steps, None, vector.staging)

    def _receive(self, call: Call, vector: Flat, source: int, tag: int) -> Steps:
        header = np.zeros(_SAID_BYTES, np.uint8)
        telling = self.mpi_comm.Irecv(header, source, tag) if self._verify else None
        request = self.mpi_comm.Irecv(message(vector.values.view(np.uint8)), source, tag + 1)
        call.owners = (vector, header, telling, request)
        theirs = mine = said(vector)
        if telling is not None:
            yield from self.await_request(call, telling, call.describe)
            call.arrival = None  # from now on both ranks are there
            theirs = bytes(header).rstrip(b"\0").decode()
        try:
            yield from self.await_request(call, request, call.describe)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            theirs = f"more than {vector.values.nbytes} bytes" if theirs == mine else theirs
        if theirs != mine:
            raise CollectiveMismatch(
                f"{self.here}: {call.name()}, but rank {source} sends {theirs}: let both pass arrays of one dtype and "
                "shape"
            )

    def _apart_call(self, name: str, describe: Callable[[], str]) -> Call:
        call = Call(self, lambda: name)
        call.is_pairwise, call.describe = True, describe
        call.arrival = 0  # the other rank may have yet to come, however long that takes it
        return call


def said(vector: Flat) -> str:
    """What an array is, in as many characters as travel with it."""
    return f"{vector.dtype}{list(vector.shape)}"[:_SAID_BYTES]


def message(memory: Bytes) -> list[object]:
    """A buffer as mpi4py takes it, of any length."""
    if memory.size <= LONGEST_BYTES:
        return [memory, memory.size, MPI.BYTE]
    starts = range(0, memory.size, LONGEST_BYTES)
    lengths = [min(LONGEST_BYTES, memory.size - start) for start in starts]
    return [memory, 1, MPI.BYTE.Create_hindexed(lengths, list(starts)).Commit()]


def _header(vector: Flat) -> Bytes:
    return np.frombuffer(said(vector).encode().ljust(_SAID_BYTES, b"\0"), np.uint8)
