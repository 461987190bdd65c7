"""Sums among the ranks of a node: each local rank gets the sum of its shard, and later the results of all shards.

Sums are taken in float32 or float64, in the order of local ranks, so all ways have the same bits.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

import numpy as np
from mpi4py import MPI

from collectives.annotations import AnyArray, Bytes, FloatArray, override
from collectives.arrays.elements import PAGE
from collectives.arrays.shared_memory import SharedMemory, share_memory
from collectives.communicator.nodes import Nodes
from collectives.consistency.descriptions import gather_texts
from collectives.execution.handle import Steps
from collectives.progress.polling import until
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.feedback import nonfinite

TILE = 32_768  # elements that stay in cache while they are added and divided
PIECE_BYTES = 1 << 20  # copied, or summed, between two looks at other calls
LONGEST_MESSAGE_BYTES = 1 << 30
FINE, BAD = 1, 2
"""Outcome of a rank's part of a step; BAD: not a finite number, or an error that all owners of the shard raise."""
_SPACING = 16  # int64 words between the flags of different purposes: they lie in different lines of the cache

_log = logging.getLogger("mpicomp")


class LocalSum(ABC):
    """Both local halves of a step of one vector.

    Parameters
    ----------
    nodes : Nodes
    shards : sequence of range
        Shard of each local rank; empty for those that own none.
    spec : VectorSpec
        Description of the whole vector.
    divisor : float
        Number that sums are divided by.

    Attributes
    ----------
    result : array[len(shard)]
        Memory for the result of this rank's shard, in the type of the vectors; filled between `reduce` and `gather`.
    sums : float32[len(shard)] or float64[len(shard)]
        Sum of this rank's shard, after `reduce`.
    """

    result: AnyArray

    def __init__(self, nodes: Nodes, shards: Sequence[range], spec: VectorSpec, divisor: float) -> None:
        self.local, self.shards, self.spec = nodes.local, tuple(shards), spec
        self._rank, self._size = nodes.local.rank, nodes.local.size
        self.own = self.shards[self._rank]
        self._divisor = spec.compute.type(divisor)
        self.sums: FloatArray = np.empty(len(self.own), spec.compute)

    def opened(self, call: VectorCall) -> Generator[bool, None, LocalSum]:
        """Return the way that the steps take, once its memory is allocated; collective among the ranks of the node."""
        yield from ()
        return self

    @abstractmethod
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        """Write the sum of this rank's shard over the node, divided, to `sums`.

        Returns
        -------
        bool
            The sums of all shards of this node are finite; equal on all of its ranks.
        """

    @abstractmethod
    def gather(self, call: VectorCall, out: AnyArray, outcome: int) -> Generator[bool, None, int]:
        """Copy the results of all shards to `out`, unless a rank's outcome is BAD.

        Returns
        -------
        int
            The worst outcome of the node's ranks; equal on all of them.
        """

    def _add(self, parts: Sequence[FloatArray], start: int, stop: int) -> bool:
        """Write elements of `sums`, counted from the shard's start; returns False if they are not finite."""
        finite = True
        for at in range(start, stop, TILE):
            tile = slice(at, min(at + TILE, stop))
            sums = self.sums[tile]
            with np.errstate(all="ignore"):
                if len(parts) == 1:
                    sums[:] = parts[0][tile]
                else:
                    np.add(parts[0][tile], parts[1][tile], out=sums)
                    for part in parts[2:]:
                        np.add(sums, part[tile], out=sums)
                if self._divisor != 1:
                    np.divide(sums, self._divisor, out=sums)
            finite &= nonfinite.all_finite(sums)
        return finite


class SharedMemorySum(LocalSum):
    """Sums read in place from memory that the ranks of a node share.

    A rank copies the shards of the others into its segment, piece by piece, and adds those of its own shard meanwhile.
    Flags in the segments count the pieces, so no messages are sent. A step begins to overwrite a segment only once all
    ranks have begun it, and have therefore read the results of the step before.
    """

    def __init__(self, nodes: Nodes, shards: Sequence[range], spec: VectorSpec, divisor: float) -> None:
        super().__init__(nodes, shards, spec, divisor)
        self._nodes = nodes
        itemsize = spec.compute.itemsize
        self._piece = max(1, PIECE_BYTES // itemsize)
        self._rounds = -(-max(map(len, self.shards)) // self._piece)
        self._memory: SharedMemory | None = None
        self._inputs: list[FloatArray] = []
        self._results: list[AnyArray] = []
        self._posted: list[AnyArray] = []  # of each rank: counters of pieces, sums and results
        self._turn = 0

    @override
    def opened(self, call: VectorCall) -> Generator[bool, None, LocalSum]:
        yield from call.turn()  # the ranks allocate in one order, and none of them waits for an earlier call
        try:
            self._allocate()
        except MemoryError as error:
            _log.warning(
                "%s: the ranks of this node share no memory for a vector of %d elements (%s), and send messages: make "
                "room in /dev/shm, which containers often limit, or pass local='ring'",
                self.local.here, self.spec.n, error,
            )  # fmt: skip
            return MessageSum(self._nodes, self.shards, self.spec, float(self._divisor))
        return self

    def _allocate(self) -> None:
        inputs, results = self.spec.n * self.spec.compute.itemsize, [len(one) for one in self.shards]
        results_bytes = max(results) * self.spec.stored.itemsize
        start = PAGE + -(-inputs // PAGE) * PAGE
        comm, timeout = self.local.mpi_comm, self.local.timeout
        memory = share_memory(start + results_bytes, lambda text: gather_texts(comm, text, timeout))
        for segment, length in zip(memory.segments, results, strict=True):
            self._posted.append(segment[:PAGE].view(np.int64)[::_SPACING])
            self._inputs.append(segment[PAGE : PAGE + inputs].view(self.spec.compute))
            stop = start + length * self.spec.stored.itemsize
            self._results.append(segment[start:stop].view(self.spec.stored))
        self._memory, self.result = memory, self._results[self._rank]

    def _post(self, kind: int, count: int) -> None:
        """Show the other ranks a counter, behind all that was written before."""
        assert self._memory is not None
        self._memory.fence()
        self._posted[self._rank][kind] = count

    def _await(self, call: VectorCall, kind: int, count: int) -> Steps:
        """Wait until the counters of all ranks have come so far."""
        assert self._memory is not None
        posted = self._posted
        call.describe = lambda: (
            f"{self.local.here}: "
            f"{', '.join(str(r) for r, one in enumerate(posted) if one[kind] < count)} of them "
            "did not come to this step"
        )
        while any(one[kind] < count for one in posted):
            yield False
        if call.idle_turns:
            call.moved()
        self._memory.fence()

    @override
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        own, mine, piece = self.own, self._inputs[self._rank], self._piece
        parts = [one[own.start : own.stop] for one in self._inputs]
        parts[self._rank] = values[own.start : own.stop]
        others = [one for rank, one in enumerate(self.shards) if rank != self._rank]
        first = self._turn * (self._rounds + 1)
        self._turn += 1
        finite = True
        for number in range(self._rounds):
            for shard in others:
                part = slice(shard.start + number * piece, min(shard.start + (number + 1) * piece, shard.stop))
                if part.start < part.stop:
                    mine[part] = values[part]
            self._post(0, first + number + 1)
            yield True
            yield from self._await(call, 0, first + number + 1)
            finite &= self._add(parts, number * piece, min((number + 1) * piece, len(own)))
        return (yield from self._agree(call, 1, FINE if finite else BAD)) == FINE

    def _agree(self, call: VectorCall, kind: int, outcome: int) -> Generator[bool, None, int]:
        """Return the worst outcome of the node's ranks."""
        self._posted[self._rank][kind + 2] = outcome
        self._post(kind, self._turn)
        yield from self._await(call, kind, self._turn)
        return max(int(one[kind + 2]) for one in self._posted)

    @override
    def gather(self, call: VectorCall, out: AnyArray, outcome: int) -> Generator[bool, None, int]:
        worst = yield from self._agree(call, 2, outcome)
        if worst == BAD:
            return worst
        piece = max(1, PIECE_BYTES // out.itemsize)
        for shard, result in zip(self.shards, self._results, strict=True):
            for start in range(0, len(shard), piece):
                part = result[start : start + piece]
                out[shard.start + start : shard.start + start + len(part)] = part
                yield True
        return worst


class MessageSum(LocalSum):
    """Sums by messages round the ring of local ranks: each shard travels straight to its owner, in rotating turns.

    Every rank sends (L - 1)/L of the vector each way, as in a ring all-reduce of L ranks.
    """

    def __init__(self, nodes: Nodes, shards: Sequence[range], spec: VectorSpec, divisor: float) -> None:
        super().__init__(nodes, shards, spec, divisor)
        self._tag = nodes.local.fixed_tag()
        self.result = np.empty(len(self.own), spec.stored)
        self._landing = [np.empty(len(self.own) * (rank != self._rank), spec.compute) for rank in range(self._size)]
        self._peers = [
            ((self._rank + turn) % self._size, (self._rank - turn) % self._size) for turn in range(1, self._size)
        ]

    @override
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        own = self.own
        for to, source in self._peers:
            shard = self.shards[to]
            yield from self._swap(call, to, values[shard.start : shard.stop], source, self._landing[source])
        parts = [*self._landing]
        parts[self._rank] = values[own.start : own.stop]
        finite, step = True, max(1, PIECE_BYTES // self.sums.itemsize)
        for start in range(0, len(own), step):
            finite &= self._add(parts, start, min(start + step, len(own)))
            yield True
        return (yield from self._agree(call, FINE if finite else BAD)) == FINE

    @override
    def gather(self, call: VectorCall, out: AnyArray, outcome: int) -> Generator[bool, None, int]:
        worst = yield from self._agree(call, outcome)
        if worst == BAD:
            return worst
        out[self.own.start : self.own.stop] = self.result
        for to, source in self._peers:
            shard = self.shards[source]
            yield from self._swap(call, to, self.result, source, out[shard.start : shard.stop])
        return worst

    def _agree(self, call: VectorCall, outcome: int) -> Generator[bool, None, int]:
        outcomes = np.full(self._size, outcome, np.int64)
        for to, source in self._peers:
            yield from self._swap(call, to, outcomes[self._rank :][:1], source, outcomes[source:][:1])
        return int(outcomes.max())

    def _swap(self, call: VectorCall, to: int, leaving: AnyArray, source: int, landing: AnyArray) -> Steps:
        """Send an array to a local rank, and receive one from another."""
        comm, tag = self.local.mpi_comm, self._tag
        sent, received = leaving.view(np.uint8), landing.view(np.uint8)
        requests = [
            *(comm.Irecv(_message(one), source, tag) for one in _messages(received)),
            *(comm.Isend(_message(one), to, tag) for one in _messages(sent)),
        ]
        call.owners = (*call.owners, *requests)
        call.describe = lambda: f"{self.local.here}: nothing from number {source} of them, or it receives nothing"
        for request in requests:
            yield from until(request, call)
        call.traffic.bytes_sent += sent.nbytes
        call.traffic.messages += len(_messages(sent))


def _messages(memory: Bytes) -> list[Bytes]:
    return [memory[at : at + LONGEST_MESSAGE_BYTES] for at in range(0, memory.nbytes, LONGEST_MESSAGE_BYTES)]


def _message(memory: Bytes) -> list[object]:
    return [memory, memory.nbytes, MPI.BYTE]
