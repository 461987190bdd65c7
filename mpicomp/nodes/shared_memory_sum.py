"""Sums within a node through memory that its ranks share, or read from each other."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from functools import partial

from collectives.annotations import AnyArray, FloatArray, override
from collectives.arrays.elements import PAGE
from collectives.arrays.peer_memory import read_peers
from collectives.arrays.shared_memory import Gather, share_memory
from collectives.execution.call import Steps
from mpicomp.aggregator.call import VectorCall
from mpicomp.kernels import of
from mpicomp.nodes.counted_sum import DONE, FREE, SUMMED, CountedSum, TextChannel
from mpicomp.nodes.direct_sum import DirectSum
from mpicomp.nodes.local_sum import BAD, FINE, LONGEST_COPY_BYTES, LocalSum, MessageSum, SumTerms

PIECE_BYTES = 1 << 18  # copied, or summed, between two looks at other ranks and calls
SLOTS = 2  # pieces of each shard that a rank shares at a time: few, so that they stay in the caches
_SHARED, _ADDED = FREE, FREE + 1  # pieces that a rank has shared, and pieces of its shard that it has added

_log = logging.getLogger("mpicomp")


class SharedMemorySum(CountedSum):
    """Sums read in place from memory that the ranks of a node share.

    A rank copies the shards of the others into its segment, piece by piece, and adds the pieces of its own shard
    meanwhile. The pieces take few places in turn, which stay in the caches. Counters in the segments take the place of
    messages.
    """

    def __init__(self, terms: SumTerms) -> None:
        super().__init__(terms)
        self._terms, self._tag, self._texts = terms, self.local.fixed_tag(), TextChannel(self.local)
        self._piece = PIECE_BYTES // self.spec.compute.itemsize
        self._rounds = -(-max(map(len, self.shards)) // self._piece)
        self._shared: list[AnyArray] = []  # of each rank: pieces [SLOTS, shards, piece]
        self._results: list[AnyArray] = []

    @override
    def opened(self, call: VectorCall) -> Generator[bool, None, LocalSum]:
        gather = partial(self._texts.gather, call)
        try:
            if self._streams and (peers := (yield from read_peers(gather))) is not None:
                memory = yield from share_memory(PAGE, gather)
                return DirectSum(self._terms, memory, peers)
            yield from self._allocate(gather)
        except MemoryError as error:
            _log.warning(
                "%s: the ranks of this node share no memory for a vector of %d elements (%s), and send messages: make "
                "room in /dev/shm, which containers often limit, or pass local='ring'",
                self.local.here, self.spec.n, error,
            )  # fmt: skip
            return MessageSum(self._terms, self._tag)
        finally:
            del self._texts
        return self

    def _allocate(self, gather: Gather) -> Steps:
        compute, stored = self.spec.compute, self.spec.stored
        lengths = [len(shard) for shard in self.shards]
        shape = SLOTS, len(lengths), min(self._piece, max(lengths))
        results = PAGE + -(-math.prod(shape) * compute.itemsize // PAGE) * PAGE
        nbytes = results + max(lengths) * stored.itemsize
        memory = yield from share_memory(nbytes, gather)
        for segment, length in zip(memory.segments, lengths, strict=True):
            pieces = segment[PAGE : PAGE + math.prod(shape) * compute.itemsize]
            self._shared.append(pieces.view(compute).reshape(shape))
            self._results.append(segment[results : results + length * stored.itemsize].view(stored))
        self._map(memory)
        self.result = self._results[self._rank]
        if self.is_mean and stored == compute:
            self.sums = self.result

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
                finite &= self._add(pieces, self.sums[own.start - self.own.start :][: len(own)])
            self._count(_ADDED, turn)
        return (yield from self._agree(call, SUMMED, FINE if finite else BAD)) == FINE

    @override
    def gather(self, call: VectorCall, out: AnyArray, outcome: int) -> Generator[bool, None, int]:
        worst = yield from self._agree(call, DONE, outcome)
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
