"""Sums among the ranks of a node: each local rank gets the sum of its shard, and later the results of all shards.

Sums are taken in float32 or float64, in the order of local ranks, so all ways have the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from collectives.annotations import AnyArray, Bytes, FloatArray, override
from collectives.arrays.elements import aligned_empty, narrow
from collectives.communicator.inbox import message
from collectives.communicator.nodes import Nodes
from collectives.execution.call import Steps
from collectives.progress.polling import until
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.feedback import nonfinite
from mpicomp.feedback.packed_signs import PackedSigns
from mpicomp.kernels import of

TILE = 32_768  # elements that stay in cache while several vectors are added
LONGEST_COPY_BYTES = 1 << 20  # between two looks at other calls
STREAMING_ELEMENTS = 1 << 18  # of a vector that is longer than the caches of a core
LONGEST_MESSAGE_BYTES = 1 << 30
FINE, BAD = 1, 2
"""Outcome of a rank's part of a step; BAD: not a finite number, or an error that all owners of the shard raise."""


class SumTerms(NamedTuple):
    """Arguments that all ways to sum a vector within nodes take.

    Parameters
    ----------
    nodes : Nodes
    shards : sequence of range
        Shard of each local rank; empty for those that own none.
    spec : VectorSpec
        Description of the whole vector.
    divisor : float
        Number that sums are divided by.
    """

    nodes: Nodes
    shards: Sequence[range]
    spec: VectorSpec
    divisor: float


class LocalSum(ABC):
    """Both local halves of a step of one vector.

    Parameters
    ----------
    terms : SumTerms

    Attributes
    ----------
    result : array[len(shard)]
        Memory for the result of this rank's shard, in the type of the vectors; filled between `reduce` and `gather`.
    sums : float32[len(shard)] or float64[len(shard)]
        Sum of this rank's shard, after `reduce`; of a single node maybe the memory of `result`.
    is_mean : bool
        There is a single node, whose sums are the result.
    """

    result: AnyArray
    reads_pieces: ClassVar[bool] = False
    """Flag: `share` and `read` may take the place of `reduce`."""
    packed: PackedSigns | None = None
    """The result of the shard where it was left packed, which only sums with `reads_pieces` accept."""

    def __init__(self, terms: SumTerms) -> None:
        nodes, shards, spec, divisor = terms
        self.is_mean = len(nodes.sizes) == 1
        self._streams = spec.n >= STREAMING_ELEMENTS
        self.local, self.shards, self.spec = nodes.local, tuple(shards), spec
        self._rank, self._size = nodes.local.rank, nodes.local.size
        self.own = self.shards[self._rank]
        self._divisor = spec.compute.type(divisor)
        self.sums: FloatArray = aligned_empty(len(self.own), spec.compute)

    def opened(self, call: VectorCall) -> Generator[bool, None, LocalSum]:
        """Return the way that the steps take, once its memory is allocated; collective among the ranks of the node."""
        yield from ()
        return self

    def begin(self, out: AnyArray, values: FloatArray) -> None:
        """Begin a step of a vector, whose result is written to `out`."""
        return

    def end(self) -> None:
        """End a step: no reference to the caller's arrays is left."""
        return

    def share(self, call: VectorCall, values: FloatArray) -> Steps:
        """Have all ranks of the node share their vectors; then `read` returns sums until `gather`."""
        raise NotImplementedError

    def read(self, elements: range) -> FloatArray:
        """Return the sum of a piece of the shard, divided, in memory that the next call overwrites."""
        raise NotImplementedError

    @abstractmethod
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        """Write the sum of this rank's shard over the node, divided, to `sums`.

        Returns
        -------
        bool
            The sums of all shards of this node are finite; equal on all of its ranks.
        """

    def take(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        """Like `reduce`, for vectors that are equal on all ranks of the node: no values travel."""
        shard = values[self.own.start : self.own.stop]
        outcome = FINE if nonfinite.all_finite(shard) else BAD
        # before the sums are written, which other ranks may still read as the last result
        worst = yield from self._begin(call, outcome)
        self._add([shard], self.sums)
        return worst == FINE

    def spoil(self) -> None:
        """Overwrite a sum with NaN."""
        self.sums[:1] = np.nan

    def clear(self) -> None:
        """Overwrite the result with zeros."""
        self.result.fill(0)

    def keep(self, call: VectorCall, sums: FloatArray) -> Generator[bool, None, bool]:
        """Round sums to the result, of a single node; returns False if they are not finite with pending errors."""
        yield from ()
        if self.spec.is_narrow:
            narrow(sums, self.spec.dtype, self.result)
            return nonfinite.all_finite_result(self.result, self.spec.dtype)
        if sums is not self.result:
            self.result[:] = sums
        return sums is self.sums or nonfinite.all_finite(sums)

    def all_finite(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        """Return True if a vector holds neither NaN nor infinity."""
        yield from ()
        return nonfinite.all_finite(values)

    @abstractmethod
    def _begin(self, call: VectorCall, outcome: int) -> Generator[bool, None, int]:
        """Begin a step without sums, and return the worst outcome of the node's ranks, which have all come to it."""

    @abstractmethod
    def gather(self, call: VectorCall, out: AnyArray, outcome: int) -> Generator[bool, None, int]:
        """Copy the results of all shards to `out`, unless a rank's outcome is BAD.

        Returns
        -------
        int
            The worst outcome of the node's ranks; equal on all of them.
        """

    def _add(self, parts: Sequence[FloatArray], total: FloatArray, *, streaming: bool | None = None) -> bool:
        """Write the sum of parts, divided, to `total`; returns False if it is not finite. None: past caches if long."""
        add, divisor, length = of("cpu").node_sum.add, self._divisor, len(parts[0])
        if len(parts) == 1:
            np.divide(parts[0], divisor, out=total)
            return nonfinite.all_finite(total)
        if len(parts) == 2:
            streams = self._streams if streaming is None else streaming
            return bool(add(*parts, divisor, streams and total.ctypes.data % 32 == 0, total))
        finite = True
        for at in range(0, length, TILE):
            tile = slice(at, at + TILE)
            sums = total[tile]
            add(parts[0][tile], parts[1][tile], None, False, sums)
            for part in parts[2:-1]:
                add(sums, part[tile], None, False, sums)
            finite &= bool(add(sums, parts[-1][tile], divisor, False, sums))
        return finite


class AgreeingSum(LocalSum):
    """Base of sums whose ranks agree by messages on the outcome of their parts."""

    def __init__(self, terms: SumTerms, tag: int | None = None) -> None:
        super().__init__(terms)
        self._tag = self.local.fixed_tag() if tag is None else tag
        self._members, rank, size = terms.nodes.layout.members, self._rank, self._size
        self._peers = [((rank + turn) % size, (rank - turn) % size) for turn in range(1, size)]

    @override
    def _begin(self, call: VectorCall, outcome: int) -> Generator[bool, None, int]:
        return (yield from self._agree(call, outcome))

    @override
    def gather(self, call: VectorCall, out: AnyArray, outcome: int) -> Generator[bool, None, int]:
        worst = yield from self._agree(call, outcome)
        if worst != BAD:
            yield from self._spread(call, out)
        return worst

    @abstractmethod
    def _spread(self, call: VectorCall, out: AnyArray) -> Steps:
        """Copy the results of all shards to `out`."""

    def _add_shards(self, call: VectorCall, parts: Sequence[FloatArray]) -> Generator[bool, None, bool]:
        """Write the sum of all parts of this rank's shard; returns whether the sums of all shards are finite."""
        finite, step = True, LONGEST_COPY_BYTES // self.sums.itemsize
        for start in range(0, len(self.own), step):
            cut = slice(start, start + step)
            finite &= self._add([part[cut] for part in parts], self.sums[cut])
            yield True
        return (yield from self._agree(call, FINE if finite else BAD)) == FINE

    def _agree(self, call: VectorCall, outcome: int) -> Generator[bool, None, int]:
        """Return the worst outcome of the node's ranks."""
        outcomes = np.full(self._size, outcome, np.int64)
        for to, source in self._peers:
            yield from self._swap(call, to, outcomes[self._rank :][:1], source, outcomes[source:][:1])
        return int(outcomes.max())

    def _swap(self, call: VectorCall, to: int, leaving: AnyArray, source: int, landing: AnyArray) -> Steps:
        """Send an array to a local rank, and receive one from another."""
        comm, tag = self.local.mpi_comm, self._tag
        sent, received = leaving.view(np.uint8), landing.view(np.uint8)
        requests = [
            *(comm.Irecv(message(one), source, tag) for one in _messages(received)),
            *(comm.Isend(message(one), to, tag) for one in _messages(sent)),
        ]
        call.owners = (*call.owners, *requests)
        sender, receiver = self._members[source], self._members[to]
        call.describe = lambda: f"{self.local.here}: nothing from rank {sender}, or rank {receiver} does not receive"
        for request in requests:
            yield from until(request, call)
        call.traffic.bytes_sent += sent.nbytes
        call.traffic.messages += len(_messages(sent))


class MessageSum(AgreeingSum):
    """Sums by messages round the ring of local ranks: each shard travels straight to its owner, in rotating turns.

    Every rank sends (L - 1)/L of the vector each way, as in a ring all-reduce of L ranks.
    """

    def __init__(self, terms: SumTerms, tag: int | None = None) -> None:
        super().__init__(terms, tag)
        own, compute = len(self.own), self.spec.compute
        self.result = np.empty(own, self.spec.stored)
        self._landing = [np.empty(own * (rank != self._rank), compute) for rank in range(self._size)]

    @override
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        for to, source in self._peers:
            shard = self.shards[to]
            yield from self._swap(call, to, values[shard.start : shard.stop], source, self._landing[source])
        parts = [*self._landing]
        parts[self._rank] = values[self.own.start : self.own.stop]
        return (yield from self._add_shards(call, parts))

    @override
    def _spread(self, call: VectorCall, out: AnyArray) -> Steps:
        out[self.own.start : self.own.stop] = self.result
        for to, source in self._peers:
            shard = self.shards[source]
            yield from self._swap(call, to, self.result, source, out[shard.start : shard.stop])


def _messages(memory: Bytes) -> list[Bytes]:
    return [memory[at : at + LONGEST_MESSAGE_BYTES] for at in range(0, memory.nbytes, LONGEST_MESSAGE_BYTES)]
