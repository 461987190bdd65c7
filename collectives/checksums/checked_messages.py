"""Checksums of messages: no byte is used before the checksum of its message has been compared.

A second message of 16 bytes with the same tag follows each message. It has the checksum (64 bits of XXH3) and the
length. MPI delivers messages of one sender and tag in order, so that both receives can be posted at once, and the
payload is neither copied nor cut. The sender computes the checksum while its message travels, and a receive is over
once both messages are there and agree. The other ways cost more: a checksum within the payload's message needs a copy
or a derived datatype, for which Open MPI leaves its fastest path; a checksum of all messages of a call, compared at its
end, finds the damage after sums and residuals have used it, and needs one more exchange of all ranks.

The messages that compare calls have room for a checksum of their own (`collectives.consistency.recursive_doubling`),
and so have the arguments by which ranks make a communicator (`collectives.nodes.layout`). Ranks that regroup or admit
others exchange all they do through a `CheckedComm`: see `GroupOptions.checked`. mpicomp help fuzzing lists the messages
that are not checked.
"""

# ruff: noqa: N802 - named as in mpi4py, and doing the same

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import transports
from collectives.annotations import AnyArray, Bytes, Testable, override
from collectives.checksum import digest
from collectives.errors import DamagedMessage
from collectives.transports import Wrapper

_SEALED = np.dtype(np.uint64)
_UNKNOWN = 0xFFFF_FFFF_FFFF_FFFF  # length of a message that this process cannot read


def validate_checksums(given: object, topology: object) -> bool:
    """Return the argument of `Communicator`.

    Raises
    ------
    TypeError, ValueError
        It is no bool, or sums by MPI are to be checked.
    """
    if given is True and topology == "mpi":
        raise ValueError(
            "checksums=True cannot check the messages of topology='mpi', which MPI makes itself: choose another "
            "topology, or leave out checksums"
        )
    if not isinstance(given, bool):
        raise TypeError(f"checksums must be True or False, not {given!r}")
    return given


class CheckedComm(Wrapper):
    """Transport whose messages have checksums."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self._here = f"rank {comm.rank} of {comm.size}"

    # Messages --------------------------------------------------------------------------------------------------------

    def Isend(self, buffer: Any, dest: int, tag: int) -> Testable:
        """Send a message, and its checksum."""
        return _started(CheckedSend(*_pair(partial(partial, self._comm.Isend), buffer, dest, tag)))

    def Send_init(self, buffer: Any, dest: int, tag: int) -> CheckedSend:
        """Make a persistent send."""
        return CheckedSend(*_pair(self._comm.Send_init, buffer, dest, tag))

    def Irecv(self, buffer: Any, source: int, tag: int) -> Testable:
        """Receive a message, and its checksum."""
        pair = _pair(partial(partial, self._comm.Irecv), buffer, source, tag)
        return _started(CheckedReceive(*pair, self._here, source))

    def Recv_init(self, buffer: Any, source: int, tag: int) -> CheckedReceive:
        """Make a persistent receive."""
        return CheckedReceive(*_pair(self._comm.Recv_init, buffer, source, tag), self._here, source)

    # Collectives of MPI ----------------------------------------------------------------------------------------------

    def Ibcast(self, buffer: Any, root: int) -> Testable:
        """Send the root's buffer to all ranks, and its checksum."""
        memory, seal = memory_of(buffer), np.empty(2, _SEALED)
        request = self._comm.Ibcast(buffer, root)
        if self.rank == root:
            seal_message(memory, seal)
        seals = self._comm.Ibcast(seal, root)

        def compare() -> None:
            compare_seal(memory, seal, self._here, root)

        return CheckedCollective(request, seals, compare)

    def Iallgather(self, source: Any, landing: Any) -> Testable:
        """Gather the buffers of all ranks, and their checksums."""
        memory = memory_of(landing)
        counts = np.full(self.size, 0 if memory is None else memory.size // self.size)
        return self._gathered(self._comm.Iallgather(source, landing), source, memory, counts)

    def Iallgatherv(self, source: Any, landing: Any) -> Testable:
        """Gather buffers of different lengths, and their checksums."""
        counts = np.asarray(landing[1]) * transports.itemsize_of(landing)
        return self._gathered(self._comm.Iallgatherv(source, landing), source, memory_of(landing), counts)

    def _gathered(self, request: Any, source: Any, landing: Bytes | None, counts: AnyArray) -> Testable:
        mine, seals = np.empty(2, _SEALED), np.empty((self.size, 2), _SEALED)
        seal_message(memory_of(source), mine)

        def compare() -> None:
            end = 0
            for rank, nbytes in enumerate(counts.tolist()):
                start, end = end, end + nbytes
                if landing is not None:
                    compare_seal(landing[start:end], seals[rank], self._here, rank)

        return CheckedCollective(request, self._comm.Iallgather(mine, seals), compare)


def with_checksums(comm: Any, checks: bool) -> Any:
    """Return a transport whose messages have checksums if that is wanted, and if there is another rank."""
    return CheckedComm(comm) if checks and comm.size > 1 else comm


def _pair(make: Callable[..., Any], buffer: Any, peer: int, tag: int) -> tuple[Any, Any, Bytes | None, AnyArray]:
    """Return the requests of a message and of its seal, and the memory of both.

    `make` makes a request: a persistent one, or a function that starts one.
    """
    seal = np.empty(2, _SEALED)
    return make(buffer, peer, tag), make(seal, peer, tag), memory_of(buffer), seal


class CheckedSend(Testable):
    """Send of a message and its seal. They are persistent requests, or functions that start a request."""

    __slots__ = ("_memory", "_message", "_requests", "_seal", "_sealed")

    def __init__(self, message: Any, sealed: Any, memory: Bytes | None, seal: AnyArray) -> None:
        self._message, self._sealed, self._memory, self._seal = message, sealed, memory, seal
        self._requests: list[Any] = []

    def Start(self) -> None:
        """Send the message, and compute its checksum meanwhile."""
        message = _start(self._message)
        seal_message(self._memory, self._seal)
        self._requests = [_start(self._sealed), message]

    @override
    def Test(self) -> bool:
        return _are_over(self._requests)

    def Free(self) -> None:
        """Free the persistent requests."""
        self._message.Free()
        self._sealed.Free()


class CheckedReceive(CheckedSend):
    """Receive that is over once the message has the checksum of its seal; the other parameters as of `CheckedSend`."""

    __slots__ = ("_error", "_here", "_source")

    def __init__(self, message: Any, sealed: Any, memory: Bytes | None, seal: AnyArray, here: str, source: int) -> None:
        super().__init__(message, sealed, memory, seal)
        self._here, self._source = here, source
        self._error: MPI.Exception | None = None

    @override
    def Start(self) -> None:
        """Start to receive the message and its seal."""
        message = _start(self._message)
        self._requests = [_start(self._sealed), message]

    @override
    def Test(self) -> bool:
        requests = self._requests
        if not requests:
            return True
        try:
            while requests and requests[-1].Test():
                requests.pop()
        except MPI.Exception as error:
            # The seal of a message that was too long must not be taken for that of the next message.
            if len(requests) < 2 or error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            self._error = error
            requests.pop()
        if requests:
            return False
        if self._error is not None:
            truncated, self._error = self._error, None
            raise truncated
        compare_seal(self._memory, self._seal, self._here, self._source)
        return True


class CheckedCollective(Testable):
    """Collective of MPI, and a second one that moves checksums; `compare` compares them once both are over."""

    __slots__ = ("_compare", "_requests")

    def __init__(self, request: Any, seals: Any, compare: Callable[[], None]) -> None:
        self._requests, self._compare = [seals, request], compare

    @override
    def Test(self) -> bool:
        if self._requests and _are_over(self._requests):
            self._compare()
        return not self._requests


def seal_message(memory: Bytes | None, seal: AnyArray) -> None:
    """Store the checksum and the length of a message."""
    seal[0], seal[1] = (0, _UNKNOWN) if memory is None else (digest(memory), memory.size)


def compare_seal(memory: Bytes | None, seal: AnyArray, here: str, sender: int) -> None:
    """Raise `DamagedMessage` unless the message in `memory` is the one that was sent."""
    theirs, nbytes = seal.tolist()
    if nbytes == _UNKNOWN or memory is None:
        return
    if nbytes > memory.size or theirs != digest(memory[:nbytes]):
        raise DamagedMessage.of(here, sender, min(nbytes, memory.size))


def memory_of(buffer: Any) -> Bytes | None:
    """Return the bytes of a buffer as mpi4py takes it; None if this process cannot read them."""
    memory = buffer if isinstance(buffer, np.ndarray) else buffer[0]
    return transports.memory_of(buffer) if isinstance(memory, np.ndarray) else None


def _are_over(requests: list[Any]) -> bool:
    """Test requests from the last one on, which is the message, and drop those that are over; True if none is left."""
    while requests and requests[-1].Test():
        requests.pop()
    return not requests


def _start(request: Any) -> Any:
    """Start a persistent request, or the one that a function returns."""
    if callable(request):
        return request()
    request.Start()
    return request


def _started(request: CheckedSend | CheckedReceive) -> Testable:
    request.Start()
    return request
