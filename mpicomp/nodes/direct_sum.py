"""Sums within a node whose ranks read each other's vectors and results in place."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property

import numpy as np

from collectives import PeerFailure
from collectives.annotations import AnyArray, FloatArray, override
from collectives.arrays.elements import aligned_empty
from collectives.arrays.peer_memory import PeerMemory
from collectives.arrays.shared_memory import SharedMemory
from collectives.execution.call import Steps
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.feedback.packed_signs import PackedSigns, SignUnpacker
from mpicomp.nodes.counted_sum import DONE, FREE, SUMMED, CountedSum
from mpicomp.nodes.local_sum import BAD, FINE, LONGEST_COPY_BYTES, SumTerms
from mpicomp.nodes.shards import tensor_parts

PIECE_BYTES = 1 << 18  # read from another rank before they are added: they stay in the cache of a core
# counters of a rank: steps whose vector it has shared, and steps in which it has read all results
_SHARED, _READ = FREE, FREE + 1
# addresses of a rank's vector, of its shard's result, and of that result's bits and scales; 0: it is not packed
_VALUES, _RESULT, _BITS, _POSITIVE, _NEGATIVE = range(FREE + 2, FREE + 7)


class DirectSum(CountedSum):
    """Sums read in place from the vectors of the node's ranks.

    The result of the shard is written to the caller's array, from where the other ranks copy it. Where it is packed,
    they copy its bits.

    Parameters
    ----------
    terms : SumTerms
    memory : SharedMemory
        A page for each rank.
    peers : sequence of PeerMemory
        Of each rank.
    """

    reads_pieces = True

    def __init__(self, terms: SumTerms, memory: SharedMemory, peers: Sequence[PeerMemory]) -> None:
        super().__init__(terms)
        self._map(memory)
        compute = self.spec.compute
        self._peers, self._piece = peers, PIECE_BYTES // compute.itemsize
        self._landing = aligned_empty(self._size * self._piece, compute).reshape(-1, self._piece)
        self._summed = aligned_empty(0, compute)  # of the longest piece that was read
        self._owned = self.sums
        self.end()

    @override
    def begin(self, out: AnyArray, values: FloatArray) -> None:
        part = out[self.own.start : self.own.stop]
        # a vector that shares memory with the result is read until the step is sure to succeed
        self.result = aligned_empty(len(part), part.dtype) if np.may_share_memory(values, out) else part
        if self.is_mean and not self.spec.is_narrow:
            self.sums = self.result

    @override
    def end(self) -> None:
        self._values = self.result = np.empty(0, self.spec.compute)
        self.sums, self.packed = self._owned, None

    @override
    def share(self, call: VectorCall, values: FloatArray) -> Steps:
        self._turn += 1
        self._report(SUMMED, FINE)  # for ranks that sum their whole shard now, as their feedback was loaded separately
        yield from self._publish(call, values)

    def _publish(self, call: VectorCall, values: FloatArray) -> Steps:
        """Let the other ranks read this rank's vector, and wait until theirs can be read."""
        self._values = values
        self._counters[self._rank][_VALUES] = values.ctypes.data
        self._count(_SHARED, self._turn)
        yield from self._await(call, _SHARED, self._turn)

    @override
    def read(self, elements: range) -> FloatArray:
        if len(self._summed) < len(elements):
            self._summed = aligned_empty(len(elements), self.spec.compute)
        total = self._summed[: len(elements)]
        for start in range(0, len(elements), self._piece):
            cut = elements[start : start + self._piece]
            self._sum(cut, total[start : start + len(cut)], streaming=False)
        return total

    def _sum(self, elements: range, total: FloatArray, streaming: bool) -> bool:
        """Write the sum of a part of the shard, of at most a piece, to `total`; returns False if it is not finite."""
        at, length = self.own.start + elements.start, len(elements)
        parts: list[FloatArray] = []
        for rank, landing in enumerate(self._landing):
            if rank == self._rank:
                parts.append(self._values[at : at + length])
            else:
                parts.append(landing[:length])
                self._fetch(rank, int(self._counters[rank][_VALUES]) + at * total.itemsize, parts[-1])
        return self._add(parts, total, streaming=streaming)

    def _fetch(self, rank: int, address: int, target: AnyArray) -> None:
        try:
            self._peers[rank].read(address, target)
        except OSError as error:
            other = self._members[rank]
            raise PeerFailure(f"{self.local.here}: no memory of rank {other} can be read: {error.strerror}") from error

    @override
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        self._turn += 1
        yield from self._publish(call, values)
        finite, own = True, range(len(self.own))
        for start in range(0, len(own), self._piece):
            cut = own[start : start + self._piece]
            finite &= self._sum(cut, self.sums[cut.start : cut.stop], streaming=self._streams)
            yield True
        return (yield from self._agree(call, SUMMED, FINE if finite else BAD)) == FINE

    @override
    def gather(self, call: VectorCall, out: AnyArray, outcome: int) -> Generator[bool, None, int]:
        mine, packed = self._counters[self._rank], self.packed
        mine[_RESULT], mine[_BITS] = self.result.ctypes.data, 0
        if packed is not None:
            mine[_BITS : _NEGATIVE + 1] = [one.ctypes.data for one in packed]
        worst = yield from self._agree(call, DONE, outcome)
        if worst == BAD:
            return worst
        if not np.may_share_memory(self.result, out):
            out[self.own.start : self.own.stop] = self.result
        for rank, shard in enumerate(self.shards):
            if shard and rank != self._rank:
                target = out[shard.start : shard.stop]
                yield from (self._unpack if self._counters[rank][_BITS] else self._copy)(rank, target)
        self._count(_READ, self._turn)
        yield from self._await(call, _READ, self._turn)
        return worst

    def _copy(self, rank: int, target: AnyArray) -> Steps:
        address, piece = int(self._counters[rank][_RESULT]), LONGEST_COPY_BYTES // target.itemsize
        for start in range(0, len(target), piece):
            self._fetch(rank, address + start * target.itemsize, target[start : start + piece])
            yield True

    def _unpack(self, rank: int, target: AnyArray) -> Steps:
        unpacker, words = self._unpackers[rank], UNSIGNED[target.itemsize]
        scales = np.empty((2, unpacker.tensors), words)
        signs = PackedSigns(np.empty(-(-len(target) // 64), np.uint64), *scales)
        for kind, part in zip((_BITS, _POSITIVE, _NEGATIVE), signs, strict=True):
            self._fetch(rank, int(self._counters[rank][kind]), part)
        streams = self._streams and target.ctypes.data % 32 == 0
        yield from unpacker.write(signs, target.view(words), streams)

    @cached_property
    def _unpackers(self) -> list[SignUnpacker]:
        spec, found = self.spec, list[SignUnpacker]()
        for shard in self.shards:
            lengths = None if spec.tensor_lengths is None else [count for _, count in tensor_parts(spec, shard)]
            found.append(SignUnpacker(lengths, len(shard)))
        return found
