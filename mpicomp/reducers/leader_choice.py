"""Places that one rank chooses, and broadcasts to all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.communicator import LATENCY_BYTES
from collectives.schedules.broadcast import Broadcast
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.memory import Memory
from mpicomp.codecs.top_k import Selector, pack_indices, unpack_indices
from mpicomp.reducers.shared_indices import BRIEF_ELEMENTS


class LeaderChoice:
    """The largest of one rank's, which it tells all others; see `Chooser`.

    It is the payload of a broadcast as well: a part's places go out while those of the next are looked for, and the
    other ranks look at their own vectors in the meantime, whether they are finite.
    """

    receive_buffers = 0

    def __init__(self, comm: Communicator, memory: Memory) -> None:
        parts, dtype = memory.parts, memory.residual.dtype
        self._comm, self._memory, self._parts, self._tag = comm, memory, parts, comm.fixed_tag()
        self.brief = not parts or parts[-1].stop <= BRIEF_ELEMENTS
        shapes = [(part.bits, -(-(part.last - part.first) // 64)) for part in parts]
        self._planes = [np.zeros(shape, np.uint64) for shape in shapes]
        self._messages = [[planes, planes.nbytes, MPI.BYTE] for planes in self._planes]
        self._bytes = sum(planes.nbytes for planes in self._planes)
        self._selectors = {(part.chunk, part.keep): Selector(part.chunk, part.keep, dtype) for part in parts}
        most = max((part.last - part.first for part in parts), default=0)
        self._indices, self._found = np.empty(most, np.uint32), np.empty(most, dtype)
        self._values = self._nothing = self._found[:0]
        self._leads = False
        self.finite = True

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """See `Chooser`."""
        self.finite = True
        if not self._parts:
            return
        comm = self._comm
        leader = call.step % comm.size
        self._values = call.values
        self._leads = comm.rank == leader
        count = len(self._parts)
        way = Broadcast(leader, count, chain=self._bytes >= LATENCY_BYTES)
        yield from comm.execute(call, comm.program(way, count, 1, 1), self, self._tag, call.traffic)

    def end(self) -> None:
        """See `Chooser`."""
        self._values = self._nothing

    def encode(self, piece: int) -> None:
        """See `Payload`: the leader looks for places, the others whether their own numbers are finite."""
        part = self._parts[piece]
        if not self._leads:
            self.finite &= self._memory.is_finite(part, self._values)
            return
        count = part.last - part.first
        indices = self._indices[:count]
        select = self._selectors[part.chunk, part.keep]
        values, residual = self._values[part.elements], self._memory.residual[part.elements]
        self.finite &= select(values, residual, indices, self._found[:count])
        pack_indices(indices, self._planes[piece])
        self._memory.place(part, indices)

    def finish(self, piece: int) -> None:
        """See `Payload`."""
        if not self._leads:
            part = self._parts[piece]
            indices = self._indices[: part.last - part.first]
            unpack_indices(self._planes[piece], indices)
            self._memory.place(part, indices)

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]
