"""Base of methods whose ranks all send the same few elements, which are summed like a short dense vector.

    I      = places, the same on all ranks
    v      = mean over ranks of (m + g)[I]       a dense all-reduce of len(I) values
    result = v at I, 0 elsewhere

m is the residual ("memory", `mpicomp.feedback.memory`), g this rank's vector. A `Chooser` of the method finds I.

While the values travel, the next residual is computed and the result filled with zeros. The next residual becomes the
current one once the step has succeeded.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from collectives import Communicator
from collectives.annotations import FloatArray, override
from collectives.arrays import named
from collectives.arrays.elements import SIXTEEN_BIT, aligned_empty
from collectives.dense.allreduce import RECEIVE_BUFFERS
from collectives.dense.host_sum import DensePayload, itemsize_in_messages
from collectives.execution.pipelined import execute
from collectives.execution.workers import PieceWork, in_parts
from collectives.progress.polling import done
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, VectorSpec
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.options import MOST_ELEMENTS, integer, number
from mpicomp.codecs.top_k import kept
from mpicomp.feedback.base import bad_ranks
from mpicomp.feedback.memory import Memory, lay_out
from mpicomp.feedback.scale_groups import padded_lengths
from mpicomp.reducers.choosers import BRIEF_ELEMENTS, Chooser
from mpicomp.reducers.full_precision_mean import FullPrecisionMean, staged
from mpicomp.step import StepDriver

_GOOD, _LARGE, _OVERFLOWED, _BAD = range(4)  # a rank's report about its numbers


@dataclass(frozen=True)
class SharedIndices(Algorithm):
    """Options that methods with shared indices have in common.

    Parameters
    ----------
    rate : int
        Number of the vector's elements per element that is sent.
    beta : float
        Fraction of this step's unsent part that goes into the residual, in (0, 1]; below 1 it is a low-pass filter.
    warmup_steps : int
        Number of steps at the beginning that are dense and leave no residual.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    rate: int = 100
    beta: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        integer(self, "rate", 1, MOST_ELEMENTS)
        number(self, "beta", "above 0 and at most 1", lambda beta: 0 < beta <= 1)
        integer(self, "warmup_steps", 0)

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return True


def shared_model(n: int, dtype: str, ranks: int, piece_bytes: int, chunk: int, keep: int, bits: int) -> MessageModel:
    """Return the message model of such a method.

    An index of `bits` goes once to every rank; its bits are spread over both phases.
    """
    summing = 8 if dtype == "float64" else 4
    complete = 2 if dtype in SIXTEEN_BIT else summing
    spread = bits * ranks / (16 * (ranks - 1)) if ranks > 1 else 0.0

    def nbytes(elements: int, weight: int) -> int:
        found = kept(elements, chunk, keep)
        return (complete if weight == ranks else summing) * found + math.ceil(spread * found)

    alignment = math.lcm(chunk, 64)
    return MessageModel(nbytes, max(1, piece_bytes * chunk // (keep * summing) // alignment) * alignment, alignment)


def make_memory(
    options: SharedIndices,
    comm: Communicator,
    spec: VectorSpec,
    rates: Sequence[int],
    block: int | None,
    exact: bool = False,
) -> Memory:
    """Return the residual of a vector, cut into parts.

    rates : rate of each tensor, or a single rate of the whole vector. block, exact : as in `lay_out`.

    Raises
    ------
    ValueError
        There are not as many rates as tensors.
    """
    lengths = [spec.n] if len(rates) == 1 else padded_lengths(spec.tensor_lengths, spec.n)[1].tolist()
    if len(rates) != len(lengths):
        raise ValueError(f"vector {spec.vector_id} has {len(lengths)} tensors, but rates has {len(rates)} for it")
    parts = lay_out(lengths, rates, block, exact)
    largest = min(float(np.finfo(spec.compute).max) / comm.size, nonfinite.largest(spec.dtype))
    return Memory(named(spec.device), spec.n, spec.compute, spec.stored, parts, options.beta, 0.99 * largest)


class SharedIndicesDriver(StepDriver):
    """Driver of steps that choose places and sum the values there like a short dense vector.

    Parameters
    ----------
    options : SharedIndices
    comm : Communicator
    spec : VectorSpec
    memory : Memory
    chooser : Chooser
    """

    feedback: Memory

    def __init__(
        self, options: SharedIndices, comm: Communicator, spec: VectorSpec, memory: Memory, chooser: Chooser
    ) -> None:
        self._comm, self._memory, self._chooser = comm, memory, chooser
        self._warmup_steps = options.warmup_steps
        self._dense = staged(FullPrecisionMean(comm), spec, used=options.warmup_steps > 0)
        super().__init__(comm, memory, None)
        self._side_channel = self.channel
        self._brief = spec.n <= BRIEF_ELEMENTS or comm.size == 1
        self._mean: MeanMeanwhile | None = None

    @override
    def commit(self) -> None:
        self._memory.commit()
        self._chooser.end()

    @override
    def roll_back(self) -> None:
        self._memory.roll_back()
        self._chooser.end()

    @override
    def steps(self, call: VectorCall) -> Iterator[bool]:
        memory, traffic, channel = self._memory, call.traffic, self._side_channel
        if call.step < self._warmup_steps:
            yield from self._dense.steps(call)
            return
        memory.begin(call)
        yield from self._chooser.choose(call)
        start = traffic.clock()
        yield from done(call, memory.pick(call.values))
        report = _GOOD if memory.within else _LARGE
        if not memory.finite:  # the sum of finite values and a finite residual may have overflowed
            report = _OVERFLOWED if memory.all_finite(call.values) else _BAD
        channel.mine[0] = report
        channel.start()
        traffic.seconds_encoding += traffic.clock() - start
        traffic.seconds_total += traffic.clock() - start
        dtype = call.spec.dtype
        # closing stops the workers' writes if this step fails
        with closing(self._meanwhile(call)) as work:
            if self._brief:
                yield from call.group.dense_steps(call, memory.values, dtype, True, memory.stored_means, traffic)
                start = traffic.clock()
                yield from work
                traffic.seconds_total += traffic.clock() - start
            else:
                if self._mean is None:
                    self._mean = MeanMeanwhile(self._comm, memory.values, dtype, memory.stored_means)
                yield from self._mean.steps(call, work)
        yield from self._complete(call)

    def _meanwhile(self, call: VectorCall) -> Generator[bool, None, None]:
        """Fill the result with zeros and compute the next residual, while the values travel."""
        clear = partial(self._memory.clear, call.out)
        yield from self._in_shares(call, "seconds_decoding", clear, messages=not self._brief)
        yield from self._side_channel.collect(call, call.traffic)
        if self._side_channel.everyones.max() == _GOOD:
            yield from self._renew(call, messages=not self._brief)

    def _renew(self, call: VectorCall, messages: bool) -> Iterator[bool]:
        return self._in_shares(call, "seconds_encoding", partial(self._memory.renew, call.values), messages)

    def _in_shares(self, call: VectorCall, phase: str, work: PieceWork, messages: bool) -> Iterator[bool]:
        workers = None if call.spec.n <= BRIEF_ELEMENTS else call.group.workers
        return in_parts(call, call.traffic, phase, work, self._memory.shares, workers, messages)

    def _complete(self, call: VectorCall) -> Iterator[bool]:
        """Scatter the means into the result. Raise if an input or a mean is not finite."""
        # a caller that receives an error may free the result at once
        yield from done(call, self._memory.device.done())
        traffic, worst = call.traffic, self._side_channel.everyones.max()
        if worst >= _OVERFLOWED:
            raise call.non_finite(bad_ranks(self._side_channel.everyones[:, 0] == _BAD))
        start = traffic.clock()
        # small numbers cannot overflow, so a mean that is not finite reveals a wrong sum; no other check would find it
        if not nonfinite.all_finite_result(self._memory.stored_means, call.spec.dtype):
            raise call.non_finite(())
        # with large numbers the mean might have been infinite, so the residual has not been computed yet
        if worst == _LARGE:
            yield from self._renew(call, messages=False)
        yield from done(call, self._memory.scatter(call.out))
        traffic.seconds_decoding += traffic.clock() - start
        traffic.seconds_total += traffic.clock() - start


class MeanMeanwhile:
    """Mean over ranks of vectors of one length, which travels along the topology's plan while other work is done.

    Parameters
    ----------
    comm : Communicator
    values : ndarray[n]
        This rank's vector at every run. For a 16-bit dtype a float32 copy, which is overwritten.
    dtype : str
        Type of the result: float16, bfloat16, float32 or float64.
    out : ndarray[n]
        Overwritten with the mean; uint16 for bfloat16.
    """

    def __init__(self, comm: Communicator, values: FloatArray, dtype: str, out: FloatArray) -> None:
        self._values, self._dtype, self._out = values, dtype, out
        itemsize = itemsize_in_messages(values, dtype)
        piece = max(1, comm.packed_piece_bytes() // itemsize)
        self._program = comm.program(comm.select(values.size * itemsize), values.size, 64, piece)
        longest = self._program.longest_piece * itemsize
        self._buffers = [aligned_empty(longest, "uint8") for _ in range(RECEIVE_BUFFERS)]

    def steps(self, call: VectorCall, work: Iterator[bool]) -> Iterator[bool]:
        """Do all of `work`, with progress of messages between its steps, and write the mean to `out`."""
        payload = DensePayload(self._program, self._values, self._dtype, True, self._buffers, self._out)
        sums = execute(call, self._program, payload, call.tag, call.traffic, overlapped=True)
        moved: bool | None = True
        for progressed in work:
            while moved:
                moved = next(sums, None)
            if moved is not None:
                moved = True
            yield progressed
        if moved is not None:
            yield from sums
