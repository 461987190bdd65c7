"""Sums among the ranks of a node: each local rank gets the sum of its shard, and later the results of all shards.

Sums are taken in float32 or float64, in the order of local ranks, so all ways have the same bits.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives import Traffic
from collectives.annotations import AnyArray, Bytes, FloatArray, override
from collectives.arrays.elements import PAGE, aligned_empty, narrow
from collectives.arrays.shared_memory import SharedMemory, share_memory
from collectives.communicator.nodes import Nodes
from collectives.execution.handle import Steps
from collectives.progress.polling import until
from collectives.quoting import list_ranks
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.feedback import nonfinite
from mpicomp.kernels import of

TILE = 32_768  # elements that stay in cache while several vectors are added
PIECE_BYTES = 1 << 18  # copied, or summed, between two looks at other ranks and calls
LONGEST_COPY_BYTES = 1 << 20  # between two looks at other calls
SLOTS = 2  # pieces of each shard that a rank shares at a time: few, so that they stay in the caches
STREAMING_ELEMENTS = 1 << 18  # of a vector that is longer than the caches of a core
LONGEST_MESSAGE_BYTES = 1 << 30
TEXT_BYTES = 1 << 12  # name of a file, or the reason why there is none
FINE, BAD = 1, 2
"""Outcome of a rank's part of a step; BAD: not a finite number, or an error that all owners of the shard raise."""
_SPACING = 16  # int64 words between two counters, which then lie in different lines of the cache
# Counters of a rank: pieces that it has shared, pieces of its shard that it has added, steps whose sums or results are
# complete. The outcomes of the last two lie `_OUTCOMES` behind them.
_SHARED, _ADDED, _SUMMED, _DONE, _OUTCOMES = range(5)

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
        Sum of this rank's shard, after `reduce`; of a single node maybe the memory of `result`.
    is_mean : bool
        There is a single node, whose sums are the result.
    """

    result: AnyArray

    def __init__(self, nodes: Nodes, shards: Sequence[range], spec: VectorSpec, divisor: float) -> None:
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
        self._add([shard], 0)
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
        if self.spec.sixteen_bit:
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

    def _add(self, parts: Sequence[FloatArray], start: int) -> bool:
        """Write a sum of the shard, divided, to `sums` from `start` on; returns False if it is not finite."""
        add, divisor, length = of("cpu").node_sum.add, self._divisor, len(parts[0])
        total = self.sums[start : start + length]
        if len(parts) == 1:
            np.divide(parts[0], divisor, out=total)
            return nonfinite.all_finite(total)
        if len(parts) == 2:
            return bool(add(*parts, divisor, self._streams and total.ctypes.data % 32 == 0, total))
        finite = True
        for at in range(0, length, TILE):
            tile = slice(at, at + TILE)
            sums = total[tile]
            add(parts[0][tile], parts[1][tile], None, False, sums)
            for part in parts[2:-1]:
                add(sums, part[tile], None, False, sums)
            finite &= bool(add(sums, parts[-1][tile], divisor, False, sums))
        return finite


class SharedMemorySum(LocalSum):
    """Sums read in place from memory that the ranks of a node share.

    A rank copies the shards of the others into its segment, piece by piece, and adds the pieces of its own shard
    meanwhile. The pieces take few places in turn, which stay in the caches. Counters in the segments take the place of
    messages.
    """

    def __init__(self, nodes: Nodes, shards: Sequence[range], spec: VectorSpec, divisor: float) -> None:
        super().__init__(nodes, shards, spec, divisor)
        self._nodes = nodes
        # taken now: later some ranks may have started another method, and others not
        self._tag, self._channel = nodes.local.fixed_tag(), SideChannel(nodes.local, 0, TEXT_BYTES)
        self._piece = PIECE_BYTES // spec.compute.itemsize
        self._rounds = -(-max(map(len, self.shards)) // self._piece)
        self._memory: SharedMemory | None = None
        self._shared: list[AnyArray] = []  # of each rank: pieces [SLOTS, shards, piece]
        self._results: list[AnyArray] = []
        self._counters: list[AnyArray] = []
        self._turn = 0

    @override
    def opened(self, call: VectorCall) -> Generator[bool, None, LocalSum]:
        try:
            yield from self._allocate(call)
        except MemoryError as error:
            _log.warning(
                "%s: the ranks of this node share no memory for a vector of %d elements (%s), and send messages: make "
                "room in /dev/shm, which containers often limit, or pass local='ring'",
                self.local.here, self.spec.n, error,
            )  # fmt: skip
            return MessageSum(self._nodes, self.shards, self.spec, float(self._divisor), self._tag)
        finally:
            del self._channel
        return self

    def _allocate(self, call: VectorCall) -> Steps:
        compute, stored = self.spec.compute, self.spec.stored
        lengths = [len(shard) for shard in self.shards]
        shape = SLOTS, len(lengths), min(self._piece, max(lengths))
        results = PAGE + -(-math.prod(shape) * compute.itemsize // PAGE) * PAGE
        nbytes = results + max(lengths) * stored.itemsize
        memory = yield from share_memory(nbytes, partial(self._gather, call))
        for segment, length in zip(memory.segments, lengths, strict=True):
            self._counters.append(segment[:PAGE].view(np.int64)[::_SPACING])
            pieces = segment[PAGE : PAGE + math.prod(shape) * compute.itemsize]
            self._shared.append(pieces.view(compute).reshape(shape))
            self._results.append(segment[results : results + length * stored.itemsize].view(stored))
        self._memory, self.result = memory, self._results[self._rank]
        if self.is_mean and stored == compute:
            self.sums = self.result

    def _gather(self, call: VectorCall, text: str) -> Generator[bool, None, list[str]]:
        """Return the texts of the node's ranks."""
        tail, written = self._channel.tail, text.encode()[:TEXT_BYTES]
        tail[: len(written)] = np.frombuffer(written, np.uint8)
        tail[len(written) :] = 0
        yield from self._channel.swap(call, Traffic())
        return [bytes(one).rstrip(b"\0").decode(errors="replace") for one in self._channel.tails]

    def _count(self, kind: int, count: int) -> None:
        """Set a counter of this rank, behind all that it has read and written before."""
        assert self._memory is not None
        self._memory.fence()
        self._counters[self._rank][kind] = count

    def _await(self, call: VectorCall, kind: int, count: int) -> Steps:
        """Wait until this counter of all ranks has come so far."""
        assert self._memory is not None
        counters = self._counters
        if any(one[kind] < count for one in counters):
            call.describe = partial(self._describe_behind, kind, count)
            while any(one[kind] < count for one in counters):
                yield False
            if call.idle_turns:
                call.moved()
        self._memory.fence()

    def _describe_behind(self, kind: int, count: int) -> str:
        members, counters = self._nodes.layout.members, self._counters
        behind = list_ranks([rank for rank, one in zip(members, counters, strict=True) if one[kind] < count])
        return f"{self.local.here}: {behind} did not come to this step"

    @override
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        piece, mine, copy = self._piece, self._shared[self._rank], of("cpu").node_sum.copy
        first = self._turn * self._rounds
        self._turn += 1
        finite = True
        for number in range(self._rounds):
            slot, turn = number % SLOTS, first + number + 1
            yield from self._await(call, _ADDED, turn - SLOTS)
            parts = [shard[number * piece : (number + 1) * piece] for shard in self.shards]
            for rank, part in enumerate(parts):
                if part and rank != self._rank:
                    copy(values[part.start : part.stop], False, mine[slot, rank, : len(part)])
            self._count(_SHARED, turn)
            yield True
            yield from self._await(call, _SHARED, turn)
            if own := parts[self._rank]:
                pieces = [one[slot, self._rank, : len(own)] for one in self._shared]
                pieces[self._rank] = values[own.start : own.stop]
                finite &= self._add(pieces, own.start - self.own.start)
            self._count(_ADDED, turn)
        return (yield from self._agree(call, _SUMMED, FINE if finite else BAD)) == FINE

    @override
    def _begin(self, call: VectorCall, outcome: int) -> Generator[bool, None, int]:
        self._turn += 1
        return (yield from self._agree(call, _SUMMED, outcome))

    def _agree(self, call: VectorCall, kind: int, outcome: int) -> Generator[bool, None, int]:
        """Return the worst outcome of the node's ranks."""
        self._counters[self._rank][kind + _OUTCOMES] = outcome
        self._count(kind, self._turn)
        yield from self._await(call, kind, self._turn)
        return max(int(one[kind + _OUTCOMES]) for one in self._counters)

    @override
    def gather(self, call: VectorCall, out: AnyArray, outcome: int) -> Generator[bool, None, int]:
        worst = yield from self._agree(call, _DONE, outcome)
        if worst == BAD:
            return worst
        copy, piece = of("cpu").node_sum.copy, LONGEST_COPY_BYTES // out.itemsize
        for shard, result in zip(self.shards, self._results, strict=True):
            for part in (shard[at : at + piece] for at in range(0, len(shard), piece)):
                source, target = result[part.start - shard.start :][: len(part)], out[part.start : part.stop]
                if out.itemsize == 2:
                    target[:] = source
                else:
                    copy(source, self._streams and target.ctypes.data % 32 == 0, target)
                yield True
        return worst


class AgreeingSum(LocalSum):
    """Base of sums whose ranks agree by messages on the outcome of their parts."""

    def __init__(
        self, nodes: Nodes, shards: Sequence[range], spec: VectorSpec, divisor: float, tag: int | None = None
    ) -> None:
        super().__init__(nodes, shards, spec, divisor)
        self._tag, self._members = nodes.local.fixed_tag() if tag is None else tag, nodes.layout.members
        self._peers = [
            ((self._rank + turn) % self._size, (self._rank - turn) % self._size) for turn in range(1, self._size)
        ]

    @override
    def _begin(self, call: VectorCall, outcome: int) -> Generator[bool, None, int]:
        return (yield from self._agree(call, outcome))

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
            *(comm.Irecv(_message(one), source, tag) for one in _messages(received)),
            *(comm.Isend(_message(one), to, tag) for one in _messages(sent)),
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

    def __init__(
        self, nodes: Nodes, shards: Sequence[range], spec: VectorSpec, divisor: float, tag: int | None = None
    ) -> None:
        super().__init__(nodes, shards, spec, divisor, tag)
        self.result = np.empty(len(self.own), spec.stored)
        self._landing = [np.empty(len(self.own) * (rank != self._rank), spec.compute) for rank in range(self._size)]

    @override
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        own = self.own
        for to, source in self._peers:
            shard = self.shards[to]
            yield from self._swap(call, to, values[shard.start : shard.stop], source, self._landing[source])
        parts = [*self._landing]
        parts[self._rank] = values[own.start : own.stop]
        finite, step = True, LONGEST_COPY_BYTES // self.sums.itemsize
        for start in range(0, len(own), step):
            finite &= self._add([part[start : start + step] for part in parts], start)
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


def _messages(memory: Bytes) -> list[Bytes]:
    return [memory[at : at + LONGEST_MESSAGE_BYTES] for at in range(0, memory.nbytes, LONGEST_MESSAGE_BYTES)]


def _message(memory: Bytes) -> list[object]:
    return [memory, memory.nbytes, MPI.BYTE]
