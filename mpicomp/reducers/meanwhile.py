"""A dense mean that other things are done beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from collectives import Communicator
from collectives.dense.allreduce import RECEIVE_BUFFERS
from collectives.dense.payload import DensePayload, itemsize_in_messages
from collectives.execution.program import Program
from collectives.memory import aligned_empty
from mpicomp.aggregator.call import VectorCall


class MeanMeanwhile:
    """Mean over ranks of vectors of one length, along the plan whatever the topology, while other work is done.

    Parameters
    ----------
    comm : Communicator
    values : ndarray[n]
        This rank's, at every run. Of a 16-bit dtype a float32 copy, which is overwritten.
    dtype : str
        Of the result: float16, bfloat16, float32 or float64.
    out : ndarray[n]
        Overwritten with the mean; uint16 for bfloat16.
    """

    def __init__(self, comm: Communicator, values: NDArray[Any], dtype: str, out: NDArray[Any]) -> None:
        self._comm, self._values, self._dtype, self._out = comm, values, dtype, out
        itemsize = itemsize_in_messages(values, dtype)
        piece = max(1, comm.packed_piece_bytes() // itemsize)
        self._program: Program = comm.program(comm.select(values.size * itemsize), values.size, 64, piece)
        longest = self._program.longest_piece * itemsize
        self._buffers: Sequence[NDArray[Any]] = [aligned_empty(longest, "uint8") for _ in range(RECEIVE_BUFFERS)]

    def steps(self, call: VectorCall, work: Iterator[bool]) -> Iterator[bool]:
        """Do all of `work`, between whose items messages move on, and end with the mean in `out`.

        Parameters
        ----------
        call : VectorCall
        work : iterator of bool
            Yields, after each item, whether it has to wait for something.
        """
        comm = self._comm
        payload = DensePayload(self._program, self._values, self._dtype, True, self._buffers, self._out)
        sums = comm.execute(call, self._program, payload, call.tag, call.traffic, overlapped=True)
        moved: bool | None = True
        for waits in work:
            while moved:
                moved = next(sums, None)
            if moved is not None:
                moved = True
            yield not waits
        if moved is not None:
            yield from sums
