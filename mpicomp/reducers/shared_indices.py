"""Reducer of methods whose ranks all send the same few elements, which are summed like a short dense vector.

    I      = places, the same on all ranks
    v      = mean over ranks of (m + g)[I]       a dense all-reduce of len(I) values
    result = v at I, 0 elsewhere

m is the residual ("memory", `mpicomp.feedback.memory`), g this rank's vector. A `Chooser` of the method finds I.

While the values travel, the next residual is computed and the result filled with zeros. The next residual becomes the
current one once the step has succeeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from collectives import Communicator
from collectives.annotations import FloatArray, override
from collectives.arrays.elements import NARROW, aligned_empty
from collectives.dense.allreduce import RECEIVE_BUFFERS
from collectives.dense.host_sum import DensePayload, itemsize_in_messages
from collectives.execution.jobs import in_parts
from collectives.execution.pipelined import execute
from collectives.execution.staged import until_queued
from collectives.progress.polling import done
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import MessageModel, Reducer, Round, VectorSpec
from mpicomp.codecs.top_k import count_kept
from mpicomp.reducers.choosers import BRIEF_ELEMENTS, Chooser
from mpicomp.spaces import space_at


def shared_model(n: int, dtype: str, ranks: int, piece_bytes: int, chunk: int, keep: int, bits: int) -> MessageModel:
    """Return the message model of such a method.

    An index of `bits` goes once to every rank; its bits are spread over both phases.
    """
    summing = 8 if dtype == "float64" else 4
    complete = 2 if dtype in NARROW else summing
    spread = bits * ranks / (16 * (ranks - 1)) if ranks > 1 else 0.0

    def nbytes(elements: int, weight: int) -> int:
        found = count_kept(elements, chunk, keep)
        return (complete if weight == ranks else summing) * found + math.ceil(spread * found)

    alignment = math.lcm(chunk, 64)
    return MessageModel(nbytes, max(1, piece_bytes * chunk // (keep * summing) // alignment) * alignment, alignment)


class SharedIndexMean(Reducer):
    """Reducer that chooses places and sums the values there like a short dense vector.

    Parameters
    ----------
    comm : Communicator
    spec : VectorSpec
    chooser : Chooser
    """

    brief = True  # the result is written once all means are there

    def __init__(self, comm: Communicator, spec: VectorSpec, chooser: Chooser) -> None:
        self._comm, self._space, self._chooser = comm, space_at(spec.device), chooser
        self._is_short = spec.n <= BRIEF_ELEMENTS or comm.size == 1
        self._mean: MeanMeanwhile | None = None

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        assert work.numbers is not None
        traffic, dtype, (values, mean) = call.traffic, call.spec.dtype, work.numbers()
        try:
            yield from self._chooser.choose(call)
        finally:
            self._chooser.end()
        start = traffic.clock()
        yield from done(call, work.encode(0))
        encoded()
        traffic.seconds_encoding += traffic.clock() - start
        traffic.seconds_total += traffic.clock() - start
        # closing stops the workers' writes if this step fails
        with closing(self._meanwhile(call, work)) as meanwhile:
            if self._is_short:
                yield from call.group.dense_steps(call, values, dtype, True, mean, traffic)
                start = traffic.clock()
                yield from meanwhile
                traffic.seconds_total += traffic.clock() - start
            else:
                if self._mean is None:
                    self._mean = MeanMeanwhile(self._comm, values, dtype, mean)
                yield from self._mean.steps(call, meanwhile)
        # a caller that receives an error may free the result at once
        yield from done(call, self._space.done())
        yield from until_queued(call, work.decode(0))

    def _meanwhile(self, call: VectorCall, work: Round) -> Generator[bool, None, None]:
        """Do the work that needs no means, while the values travel."""
        workers = None if call.spec.n <= BRIEF_ELEMENTS else call.group.workers
        for phase, share_work, shares in work.meanwhile:
            yield from in_parts(call, call.traffic, phase, share_work, shares, workers, not self._is_short)


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
        piece = max(1, comm.routes.packed_piece_bytes() // itemsize)
        self._program = comm.routes.program(comm.select(values.size * itemsize), values.size, 64, piece)
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
