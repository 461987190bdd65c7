"""Choosers of the places that all ranks send: drawn alike, one rank's largest, or the largest of the exact mean."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from collectives.execution.pipelined import execute
from collectives.memory import add
from collectives.routes import LATENCY_BYTES
from collectives.schedules.broadcast import Broadcast
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.top_k import Selector, pack_indices, unpack_indices
from mpicomp.feedback.memory import Memory, Part
from mpicomp.kernels.streams import Stream, source

BRIEF_ELEMENTS = 1 << 18  # up to here work takes less than keeping account of pieces


class Chooser(Protocol):
    """Where indices come from."""

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """Overwrite the places of the memory with the elements that all ranks send at this step.

        The memory also learns whether all of this rank's values + residual is finite.
        """
        ...

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        return  # a body, without which it would be abstract


class DrawnPlaces(Chooser):
    """One place of each block, drawn alike on all ranks."""

    def __init__(self, memory: Memory, stream: Stream) -> None:
        self._memory, self._schedule = memory, stream.schedule()
        self._source = source(0)  # no rank's: all draw alike

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """See `Chooser`; nothing is awaited."""
        traffic, memory = call.traffic, self._memory
        start = traffic.clock()
        at = np.uint64(call.step & 0xFFFFFFFF)
        memory.begin()
        for run in memory.runs:
            memory.draw_places(run, self._schedule, at, self._source)
            memory.check(run, call.values)
        spent = traffic.clock() - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
        yield from ()


class _Search(threading.local):
    """What a thread needs to look for the largest elements of a part."""

    def __init__(self, parts: Sequence[Part], dtype: np.dtype[Any]) -> None:
        self._selectors = {(part.chunk, part.keep): Selector(part.chunk, part.keep, dtype) for part in parts}
        most = max((part.last - part.first for part in parts), default=0)
        self._indices, self._found = np.empty(most, np.uint32), np.empty(most, dtype)

    def indices(self, part: Part) -> NDArray[np.uint32]:
        """Memory for the places of a part within its chunks."""
        return self._indices[: part.last - part.first]

    def look(self, part: Part, values: NDArray[Any], residual: NDArray[Any] | None, sums: Any = None) -> bool:
        """Overwrite the indices of a part with those of the largest of values + residual; whether all are finite.

        sums : like values, overwritten with the sums; or None.
        """
        indices = self.indices(part)
        selector = self._selectors[part.chunk, part.keep]
        return bool(selector(values, residual, indices, self._found[: indices.size], sums))


class ToldPlaces(Chooser):
    """Those that one rank tells all others, another one at each step.

    It is the payload of a broadcast as well, whose pieces are the memory's parts.
    """

    receive_buffers = 0

    def __init__(self, comm: Communicator, memory: Memory) -> None:
        parts = memory.parts
        self._memory, self._parts = memory, parts
        self._comm, self._tag = comm, comm.fixed_tag()
        self.brief = not parts or parts[-1].stop <= BRIEF_ELEMENTS
        shapes = [(part.bits, -(-(part.last - part.first) // 64)) for part in parts]
        self._planes = [np.zeros(shape, np.uint64) for shape in shapes]
        self._messages = [[planes, planes.nbytes, MPI.BYTE] for planes in self._planes]
        self._bytes = sum(planes.nbytes for planes in self._planes)
        self._leads = False

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """See `Chooser`."""
        self._memory.begin()
        if not self._parts:
            return
        comm = self._comm
        leader = call.step % comm.size
        self._leads = comm.rank == leader
        yield from self._look(call)
        count = len(self._parts)
        way = Broadcast(leader, count, chain=self._bytes >= LATENCY_BYTES)
        yield from execute(call, comm.program(way, count, 1, 1), self, self._tag, call.traffic)
        self._told()

    def _look(self, call: VectorCall) -> Iterator[bool]:
        """Do what is to be done before places are told."""
        raise NotImplementedError

    def _told(self) -> None:
        """Places are told."""

    def encode(self, piece: int) -> None:
        """See `Payload`."""
        raise NotImplementedError

    def finish(self, piece: int) -> None:
        """See `Payload`."""
        raise NotImplementedError

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]

    replacing = outgoing


class LeaderChoice(ToldPlaces):
    """The largest of one rank's.

    A part's places go out while those of the next are looked for, and the other ranks look at their own vectors in the
    meantime, whether they are finite.
    """

    def __init__(self, comm: Communicator, memory: Memory) -> None:
        super().__init__(comm, memory)
        self._search = _Search(memory.parts, memory.dtype)
        self._values = self._nothing = memory.residual[:0]

    def _look(self, call: VectorCall) -> Iterator[bool]:
        self._values = call.values
        yield from ()

    def end(self) -> None:
        """See `Chooser`."""
        self._values = self._nothing

    def encode(self, piece: int) -> None:
        """See `Payload`: the leader looks for places, the others whether their own numbers are finite."""
        part, memory = self._parts[piece], self._memory
        if not self._leads:
            memory.check(part, self._values)
            return
        search, some = self._search, part.elements
        if not search.look(part, self._values[some], memory.residual[some], memory.sums(some)):
            memory.finite = False
        indices = search.indices(part)
        pack_indices(indices, self._planes[piece])
        memory.place(part, indices)

    def finish(self, piece: int) -> None:
        """See `Payload`."""
        if not self._leads:
            part = self._parts[piece]
            indices = self._search.indices(part)
            unpack_indices(self._planes[piece], indices)
            self._memory.place(part, indices)


class TrueChoice(Chooser):
    """The largest of the exact mean."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._search = memory, _Search(memory.parts, memory.dtype)
        self._mean = np.empty_like(memory.residual)

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """See `Chooser`."""
        traffic, memory = call.traffic, self._memory
        clock = traffic.clock
        start = clock()
        add(call.values, memory.residual, self._mean)
        memory.finite = memory.all_finite(self._mean)
        added = clock()
        yield from call.group.dense_steps(call, self._mean, self._mean.dtype.name, True, self._mean, traffic)
        summed = clock()
        for part in memory.parts:
            self._search.look(part, self._mean[part.elements], None)
            memory.place(part, self._search.indices(part))
        spent = clock() - summed + added - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
