"""Choosers of the places that all ranks send: random ones, one rank's largest, or the largest of the exact mean."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.annotations import Array, override
from collectives.execution.payload import MessageMemory, Payload
from collectives.execution.pipelined import execute
from collectives.group.routes import LATENCY_BYTES
from collectives.progress.polling import done
from collectives.schedules.broadcast import Broadcast
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.top_k import Selector, pack_indices, unpack_indices
from mpicomp.feedback.chunk_parts import Part
from mpicomp.feedback.memory import Memory
from mpicomp.kernels.streams import Stream, source
from mpicomp.reducers.full_precision_mean import mean_in

BRIEF_ELEMENTS = 1 << 18  # up to here work takes less time than accounting for pieces


class Chooser(Protocol):
    """Source of the indices that all ranks send."""

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """Overwrite the places of the memory with the elements that all ranks send at this step.

        The memory's flag `finite` is cleared unless all of this rank's values + residual are finite.
        """
        ...

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        return  # a body, without which it would be abstract


class DrawnPlaces(Chooser):
    """Chooser of one random place in each block, the same on all ranks."""

    def __init__(self, memory: Memory, stream: Stream) -> None:
        self._memory, self._schedule = memory, stream.schedule()
        self._source = source(0)  # independent of the rank, so that all ranks draw the same places

    @override
    def choose(self, call: VectorCall) -> Iterator[bool]:
        traffic, memory = call.traffic, self._memory
        start = traffic.clock()
        at = np.uint64(call.step & 0xFFFFFFFF)
        for run in memory.runs:
            memory.draw_places(run, self._schedule, at, self._source)
            memory.check(memory.vector, run.elements)
        spent = traffic.clock() - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
        yield from ()


class _Search(threading.local):
    """Memory of a thread in which it finds the largest elements of a part."""

    def __init__(self, parts: Sequence[Part], dtype: np.dtype[Any]) -> None:
        self._selectors = {(part.chunk, part.keep): Selector(part.chunk, part.keep, dtype) for part in parts}
        most = max((part.last - part.first for part in parts), default=0)
        self._indices, self._found = np.empty(most, np.uint32), np.empty(most, dtype)

    def indices(self, part: Part) -> Array:
        """Return the memory for the places of a part within its chunks."""
        return self._indices[: part.last - part.first]

    def look(self, part: Part, values: Array, residual: Array | None, sums: Array = None) -> bool:
        """Overwrite the indices of a part with those of the largest values + residual. Returns True if all are finite.

        sums : array like values, which is overwritten with the sums; or None.
        """
        indices = self.indices(part)
        selector = self._selectors[part.chunk, part.keep]
        return bool(selector(values, residual, indices, self._found[: indices.size], sums))


class LeaderChoice(Chooser, Payload):
    """Chooser of the largest elements of the leader, which sends their places to all others; ranks lead in turn.

    It is also the payload of a broadcast whose pieces are the memory's parts. On the host the leader sends the places
    of a part while it searches the next one; meanwhile the other ranks check that their own vectors are finite. A
    device searches the whole vector at once, and the host packs and unpacks indices.
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
        self._search = _Search(parts if memory.space.is_host else (), memory.dtype)
        self._values: Array = None

    @override
    def choose(self, call: VectorCall) -> Iterator[bool]:
        memory, comm = self._memory, self._comm
        if not self._parts:
            return
        leader = call.step % comm.size
        self._leads, self._values = comm.rank == leader, memory.vector
        if not memory.space.is_host:
            if self._leads:
                memory.find(memory.vector, with_residual=True)
                yield from done(call, memory.fetch_indices())
            else:
                memory.check(memory.vector)
        count = len(self._parts)
        way = Broadcast(leader, count, chain=self._bytes >= LATENCY_BYTES)
        yield from execute(call, comm.routes.program(way, count, 1, 1), self, self._tag, call.traffic)
        if not memory.space.is_host and not self._leads:
            memory.place_all()

    @override
    def end(self) -> None:
        self._values = None

    @override
    def encode(self, piece: int) -> None:
        part, memory = self._parts[piece], self._memory
        if not memory.space.is_host:
            if self._leads:
                pack_indices(memory.indices[part.values], self._planes[piece])
        elif self._leads:
            search, some, residual = self._search, part.elements, memory.residual
            finite = search.look(part, self._values[some], residual[some], memory.sums(some))  # type: ignore[index]
            memory.finite.clear_unless(finite)
            indices = search.indices(part)
            pack_indices(indices, self._planes[piece])
            memory.place(part, indices)
        else:
            memory.check(self._values, part.elements)

    @override
    def finish(self, piece: int) -> None:
        if self._leads:
            return
        part, memory = self._parts[piece], self._memory
        if memory.space.is_host:
            indices = self._search.indices(part)
            unpack_indices(self._planes[piece], indices)
            memory.place(part, indices)
        else:
            unpack_indices(self._planes[piece], memory.indices[part.values])

    @override
    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        return self._messages[piece]

    replacing = outgoing


class TrueChoice(Chooser):
    """Chooser of the largest elements of the exact mean."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._search = memory, _Search(memory.parts if memory.space.is_host else (), memory.dtype)
        space, n, dtype = memory.space, len(memory.residual), memory.dtype.name  # type: ignore[arg-type]
        self._mean = space.zeros(n, dtype)
        self._exact = mean_in(space, n, dtype)

    @override
    def choose(self, call: VectorCall) -> Iterator[bool]:
        traffic, memory, mean = call.traffic, self._memory, self._mean
        clock = traffic.clock
        start = clock()
        memory.add(memory.vector, mean)
        memory.check_alone(mean)
        added = clock()
        yield from self._exact.steps(call, mean, mean)
        summed = clock()
        if memory.space.is_host:
            for part in memory.parts:
                self._search.look(part, mean[part.elements], None)
                memory.place(part, self._search.indices(part))
        else:
            memory.find(mean, with_residual=False)
        spent = clock() - summed + added - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
