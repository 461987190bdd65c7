"""ScaleCom: one rank after the other says which elements all ranks send.

    leader = t mod M
    I      = places of the largest |m + g| of the leader, chunk by chunk; broadcast
    v      = mean over ranks of (m + g)[I]              a dense all-reduce of k values: constant in M
    m      <- m + beta (g - (m + g at I, else 0))       beta < 1: a low-pass filter
    result = v at I, 0 elsewhere

As all ranks send the same elements, compressing the mean is the mean of what is compressed, and nothing builds up as
ranks are added. The leader's choice is good for all where the ranks' memories m are alike, which they become.

Departure from the paper: m at I becomes exactly (1 - beta) m, which the published rule gives up to rounding.

Reference: Chen et al., "ScaleCom: scalable sparsified gradient compression for communication-efficient distributed
training", NeurIPS 2020 (arXiv 2104.11125), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.communicator import LATENCY_BYTES
from collectives.schedules.broadcast import Broadcast
from mpicomp.aggregator.base import MessageModel
from mpicomp.codecs.options import MOST_ELEMENTS, chunk, flag, require, whole
from mpicomp.codecs.top_k import Selector, index_bits, pack_indices, unpack_indices
from mpicomp.kernels.cpu.sparse import expand, finite_sum
from mpicomp.reducers.shared_indices import (
    BRIEF_ELEMENTS,
    Part,
    SharedIndices,
    SharedIndicesAggregator,
    shared_wire,
)

Rates = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ScaleCom(SharedIndices):
    """Options of ScaleCom.

    Parameters
    ----------
    rate, beta, warmup_steps
        As in `SharedIndices`. beta: 1, or 0.1 to 0.3 for large batches with scaled learning rates.
    chunk : int, optional
        Elements among which the chunk / rate largest are looked for: a multiple of `rate` (of all `rates`). None: as
        many as the rate, of which one is sent.
    exact : bool
        The largest of the whole vector (segment) instead, ceil(length / rate) of them. Slower, and longer indices.
    rates : tuple of int, or one such tuple per vector, optional
        Instead of `rate`: of each segment. With several vectors under one seed, such as an optimizer's buckets, the
        tuple at `vector_id` is a vector's.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    chunk: int | None = None
    exact: bool = False
    rates: Rates | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        flag(self, "exact")
        flat = [self.rate]
        if self.rates is not None:
            if not isinstance(self.rates, list | tuple) or not self.rates:
                raise ValueError(f"rates must be None or a rate per segment, not {self.rates!r}")
            nested = isinstance(self.rates[0], list | tuple)
            given: Any = self.rates if nested else (self.rates,)
            rows: list[tuple[int, ...]] = []
            for row in given:
                if not isinstance(row, list | tuple):
                    raise ValueError(f"rates must be all numbers or all tuples of them, not {self.rates!r}")
                for rate in row:
                    require(whole(rate, 1, MOST_ELEMENTS), "rates", "integers of 1 to 2^32", rate)
                rows.append(tuple(int(rate) for rate in row))
            object.__setattr__(self, "rates", tuple(rows) if nested else rows[0])
            flat = [rate for one in rows for rate in one]
        if self.exact and self.chunk is not None:
            raise ValueError(f"chunk must be None with exact=True, which knows no chunks, not {self.chunk!r}")
        chunk(self, flat)

    @property
    def uses_tensor_lengths(self) -> bool:
        """See `Algorithm.uses_tensor_lengths`: each has a rate, or all have one."""
        return self.rates is not None

    def rates_of(self, vector_id: int) -> tuple[int, ...]:
        """Of a vector's tensor_lengths; a single one is the whole vector's."""
        if self.rates is None:
            return (self.rate,)
        if isinstance(self.rates[0], int):
            return self.rates
        if not vector_id < len(self.rates):
            raise ValueError(f"rates must have a tuple for each vector, not {len(self.rates)}: there is {vector_id}")
        return self.rates[vector_id]

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> ScaleComAggregator:
        """See `Algorithm.start`; tensor_lengths play a part where there are `rates`."""
        return ScaleComAggregator(self, comm, n, dtype, vector_id, tensor_lengths)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: at `rate`, between warm-up and end."""
        chunk = max(1, n) if self.exact else self.chunk or self.rate
        keep = -(-chunk // self.rate)
        return shared_wire(n, dtype, ranks, piece_bytes, chunk, keep, index_bits(chunk))


class ScaleComAggregator(SharedIndicesAggregator):
    """Residual (the paper's memory) and buffers for one vector."""

    def __init__(
        self,
        options: ScaleCom,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
    ) -> None:
        rates = options.rates_of(vector_id)
        super().__init__(options, comm, n, dtype, vector_id, tensor_lengths, rates, options.chunk, options.exact)
        self._chooser = LeaderChoice(comm, self.parts, self._compute, self._tag)


class LeaderChoice:
    """The largest of one rank's, which it tells all others; see `Chooser`.

    It is the payload of a broadcast as well: a part's places go out while those of the next are looked for, and the
    other ranks look at their own vectors in the meantime, whether they are finite.
    """

    slots = 0

    def __init__(self, comm: Communicator, parts: Sequence[Part], dtype: np.dtype[Any], tag: int) -> None:
        self._comm, self._parts, self._tag = comm, parts, tag
        self.brief = not parts or parts[-1].stop <= BRIEF_ELEMENTS
        shapes = [(part.bits, -(-(part.last - part.first) // 64)) for part in parts]
        self._planes = [np.zeros(shape, np.uint64) for shape in shapes]
        self._messages = [[planes, planes.nbytes, MPI.BYTE] for planes in self._planes]
        self._bytes = sum(planes.nbytes for planes in self._planes)
        self._selectors = {(part.chunk, part.keep): Selector(part.chunk, part.keep, dtype) for part in parts}
        most = max((part.last - part.first for part in parts), default=0)
        self._indices, self._found = np.empty(most, np.uint32), np.empty(most, dtype)
        self._nothing = self._found[:0]
        self._none = np.empty(0, np.int64)
        self._values = self._residual = self._nothing
        self._places = self._none
        self._leads = False
        self._finite = True

    def choose(
        self, step: int, values: NDArray[Any], residual: NDArray[Any], places: NDArray[np.int64], traffic: Traffic
    ) -> bool:
        """See `Chooser`."""
        if not self._parts:
            return True
        comm = self._comm
        leader = step % comm.size
        self._values, self._residual, self._places = values, residual, places
        self._leads, self._finite = comm.rank == leader, True
        count = len(self._parts)
        way = Broadcast(leader, count, chain=self._bytes >= LATENCY_BYTES)
        comm.execute(comm.program(way, count, 1, 1), self, self._tag, traffic)
        self._values = self._residual = self._nothing  # the caller's vectors are his to free
        self._places = self._none
        return self._finite

    def encode(self, piece: int) -> None:
        """See `Payload`: the leader looks for places, the others for what is not finite."""
        part = self._parts[piece]
        values, residual = self._values[part.elements], self._residual[part.elements]
        if not self._leads:
            self._finite &= bool(finite_sum(values, residual))
            return
        count = part.last - part.first
        indices = self._indices[:count]
        select = self._selectors[part.chunk, part.keep]
        self._finite &= select(values, residual, indices, self._found[:count])
        pack_indices(indices, self._planes[piece])
        self._expand(part, indices)

    def finish(self, piece: int) -> None:
        """See `Payload`."""
        if not self._leads:
            part = self._parts[piece]
            indices = self._indices[: part.last - part.first]
            unpack_indices(self._planes[piece], indices)
            self._expand(part, indices)

    def _expand(self, part: Part, indices: NDArray[np.uint32]) -> None:
        expand(indices, part.chunk, part.keep, part.start, part.stop, self._places[part.values])

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]
