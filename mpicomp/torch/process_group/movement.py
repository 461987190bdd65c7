"""Collectives that move bytes: MPI's own non-blocking ones, and plain messages where counts overflow these."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.execution.handle import Call, Steps
from collectives.progress.polling import until
from mpicomp.torch.process_group.packed import Bytes

MOST = (1 << 31) - 1  # MPI counts, and places, in an int
LARGEST = 1 << 30  # bytes of a message
TOLD = 256  # bytes of what a rank says about sizes that do not fit


class Side(NamedTuple):
    """What a rank sends or receives in a collective.

    Attributes
    ----------
    memory : uint8 array
    sizes : sequence of int, optional
        Bytes for or from each rank, in order; None: all of it for or from every rank that it is for.
    """

    memory: Bytes
    sizes: Sequence[int] | None = None

    def message(self) -> list[object]:
        """As MPI takes it."""
        return [self.memory, self.memory.size if self.sizes is None else self.sizes, MPI.BYTE]

    def parts(self, peers: Sequence[int]) -> Iterator[tuple[int, Bytes]]:
        """Each peer with what is for it or from it."""
        if self.sizes is None:
            yield from ((peer, self.memory) for peer in peers)
        else:
            ends = np.cumsum(self.sizes, dtype=np.int64)
            yield from ((peer, self.memory[ends[peer] - self.sizes[peer] : ends[peer]]) for peer in peers)


class Exchange(NamedTuple):
    """One collective.

    Attributes
    ----------
    name : str
        MPI's, such as ``Iallgatherv``.
    sent, received : Side or None
        None: this rank sends or receives nothing, as it is not the root.
    most : int
        Bytes of the largest side of any rank: the same number on all ranks.
    root : int, optional
    """

    name: str
    sent: Side | None
    received: Side | None
    most: int
    root: int | None = None

    def steps(self, comm: Communicator, call: Call) -> Steps:
        """Carry it out, as part of a call on which the ranks have agreed."""
        yield from comm.turn_of(call)
        if self.most > MOST:
            yield from self._by_messages(comm, call)
            return
        sides = [None if side is None else side.message() for side in (self.sent, self.received)]
        request = getattr(comm.mpi_comm, self.name)(*sides, *([] if self.root is None else [self.root]))
        missing = f"{comm.here}: not all ranks take part in {call.name()}"
        yield from comm.await_request(call, request, lambda: missing)

    def _by_messages(self, comm: Communicator, call: Call) -> Steps:
        """The same by messages between each two ranks, in pieces."""
        ranks = range(comm.size)
        towards_root, from_root = self.name == "Igatherv", self.name == "Iscatterv"
        to = [] if self.sent is None else [self.root or 0] if towards_root else ranks
        by = [] if self.received is None else [self.root or 0] if from_root else ranks
        mpi_comm, tag = comm.mpi_comm, call.tag
        requests: list[MPI.Request] = []
        call.owners = (*call.owners, requests)
        if self.received is not None:
            for peer, part in self.received.parts(by):
                requests += [mpi_comm.Irecv(_message(piece), peer, tag) for piece in _pieces(part)]
        if self.sent is not None:
            for peer, part in self.sent.parts(to):
                requests += [mpi_comm.Isend(_message(piece), peer, tag) for piece in _pieces(part)]
        call.describe = lambda: f"{comm.here}: messages of {call.name()} are missing"
        for request in requests:
            yield from until(request, call)


def _message(piece: Bytes) -> list[object]:
    return [piece, piece.size, MPI.BYTE]


def _pieces(memory: Bytes) -> Iterator[Bytes]:
    return (memory[start : start + LARGEST] for start in range(0, memory.size, LARGEST))


def broadcast(comm: Communicator, call: Call, memory: Bytes, root: int) -> Steps:
    """Overwrite `memory` with the root's, as part of a call on which the ranks have agreed."""
    yield from comm.turn_of(call)
    for piece in _pieces(memory):
        request = comm.mpi_comm.Ibcast(_message(piece), root)
        yield from comm.await_request(call, request, lambda: f"{comm.here}: nothing from rank {root} to be broadcast")


def barrier(comm: Communicator, call: Call) -> Steps:
    """Wait for all ranks, as part of a call on which they have agreed."""
    yield from comm.turn_of(call)
    request = comm.mpi_comm.Ibarrier()
    yield from comm.await_request(call, request, lambda: f"{comm.here}: not all ranks reach {call.name()}")


def agree_on_sizes(
    comm: Communicator, call: Call, sent: Sequence[int], received: Sequence[int]
) -> Generator[bool, None, int]:
    """Compare what every rank sends with what is awaited of it, before an all-to-all of uneven parts.

    Returns
    -------
    int
        Bytes of the largest side of any rank.

    Raises
    ------
    CollectiveMismatch
        On every rank, naming who awaits what of whom.
    """
    yield from comm.turn_of(call)
    mpi_comm, missing = comm.mpi_comm, f"{comm.here}: sizes of {call.name()} are missing"
    coming = np.empty(comm.size, np.int64)
    yield from comm.await_request(call, mpi_comm.Ialltoall(np.array(sent, np.int64), coming), lambda: missing)
    wrong = np.flatnonzero(coming != np.array(received, np.int64))
    mine = np.array([wrong.size, max(sum(sent), sum(received))], np.int64)
    most = np.empty_like(mine)
    yield from comm.await_request(call, mpi_comm.Iallreduce(mine, most, MPI.MAX), lambda: missing)
    if most[0]:
        text = "".join(
            f"rank {comm.rank} awaits {received[peer]} bytes of rank {peer}, which sends {coming[peer]}; "
            for peer in wrong[:1]
        )
        told = np.zeros((comm.size, TOLD), np.uint8)
        line = np.frombuffer(text.encode()[:TOLD].ljust(TOLD, b"\0"), np.uint8)
        yield from comm.await_request(call, mpi_comm.Iallgather(line, told), lambda: missing)
        said = "".join(bytes(row).rstrip(b"\0").decode() for row in told)
        raise CollectiveMismatch(f"the ranks differ in the sizes of {call.name()}: {said}make the split sizes match")
    return int(most[1])
