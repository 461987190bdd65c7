"""Messages between two ranks. They take no part in the order of collectives, nor in the agreement on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.communicator.point_to_point import message
from collectives.execution.handle import Call, Steps
from mpicomp.torch.process_group.packed import Packed

Comes = Callable[[], bool]
"""Whether it is a message's turn."""


class Messages:
    """The messages of one process group.

    A receive looks at the length of its message before it takes it, as MPI writes past the end of what is too short.
    So receives must not overtake each other here: MPI keeps the order of messages, and the earlier receive takes the
    earlier one.

    Parameters
    ----------
    mpi_comm : MPI.Comm
        For these messages alone.
    """

    def __init__(self, mpi_comm: MPI.Comm) -> None:
        self._comm = mpi_comm
        mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._largest_tag = int(mpi_comm.Get_attr(MPI.TAG_UB) or 0)
        self._receives: dict[int, list[Call]] = defaultdict(list)  # by tag, those that have no message yet
        self._sends: dict[tuple[int | None, int], list[Call]] = defaultdict(list)  # by rank and tag, those yet to begin
        self._sources: dict[Call, int | None] = {}

    @contextmanager
    def turn(self, call: Call, to: int | None, tag: int) -> Iterator[Comes]:
        """Tell, from the beginning of a send, when those before it to the same rank with the same tag are under way."""
        waiting = self._sends[to, tag]
        waiting.append(call)
        try:
            yield lambda: waiting[0] is call
        finally:
            waiting.remove(call)
            if not waiting:
                del self._sends[to, tag]

    def require(self, peer: int | None, tag: int) -> None:
        """Raise ValueError unless there is such a rank, and such a tag."""
        if peer is not None and not 0 <= peer < self._comm.size:
            raise ValueError(f"there is no rank {peer} in this group of {self._comm.size}")
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"the tag {tag} does not lie in 0 .. {self._largest_tag}, which MPI allows")

    def send(self, comm: Communicator, call: Call, packed: Packed, to: int, tag: int) -> Steps:
        """Send tensors, as a call of `comm`."""
        request = self._comm.Isend(message(packed.bytes), to, tag)
        missing = f"{comm.here}: rank {to} does not receive what {call.name()} sends"
        yield from comm.await_request(call, request, lambda: missing)

    def receive(self, comm: Communicator, call: Call, packed: Packed, source: int | None, tag: int) -> Steps:
        """Overwrite tensors with those that a rank sends, or any rank; the call's result is the rank.

        Raises
        ------
        CollectiveMismatch
            The message has another length. The sender does not learn of it.
        """
        whom = "any rank" if source is None else f"rank {source}"
        call.describe = lambda: f"{comm.here}: nothing from {whom} for {call.name()}"
        waiting, status = self._receives[tag], MPI.Status()
        waiting.append(call)
        self._sources[call] = source
        try:
            arrived = None
            while arrived is None:
                if self._may_look(call, waiting):
                    arrived = self._comm.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
                if arrived is None:
                    yield False
        finally:
            waiting.remove(call)
            del self._sources[call]
            if not waiting:  # a program may use each tag once
                del self._receives[tag]
        call.moved()
        call.result, nbytes = status.source, status.Get_elements(MPI.BYTE)
        fits = nbytes == packed.bytes.size
        landing = packed.bytes if fits else np.empty(nbytes, np.uint8)
        request = arrived.Irecv(message(landing))
        call.owners = (*call.owners, landing)
        yield from comm.await_request(call, request, lambda: f"{comm.here}: the message for {call.name()} does not end")
        if not fits:
            raise CollectiveMismatch(
                f"{comm.here}: {call.name()} takes {packed.bytes.size} bytes, and rank {call.result} sends {nbytes}: "
                "send and receive tensors of one size"
            )

    def _may_look(self, call: Call, waiting: list[Call]) -> bool:
        """Whether no earlier receive of this tag could take the same message."""
        source = self._sources[call]
        for other in waiting:
            if other is call:
                return True
            if source is None or self._sources[other] in (None, source):
                return False
        return True
