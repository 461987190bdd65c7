"""A dense mean that other things are done beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from collectives import Communicator, Traffic
from collectives.dense.allreduce import SLOTS
from collectives.dense.payload import DensePayload, travelling_itemsize
from collectives.execution.pipelined import PipelinedExecution
from collectives.execution.program import Program
from collectives.memory import aligned_empty


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
        itemsize = travelling_itemsize(values, dtype)
        piece = max(1, comm.packed_piece_bytes() // itemsize)
        self._program: Program = comm.program(comm.select(values.size * itemsize), values.size, 64, piece)
        longest = self._program.longest_piece * itemsize
        self._landing: Sequence[NDArray[Any]] = [aligned_empty(longest, "uint8") for _ in range(SLOTS)]

    def run(self, work: Iterable[None], traffic: Traffic) -> None:
        """Do all of `work`, between whose items messages move on, and end with the mean in `out`.

        Raises
        ------
        CollectiveTimeout, PeerFailure
            And whatever `work` raises; the communicator is of no more use then.
        """
        comm = self._comm
        payload = DensePayload(self._program, self._values, self._dtype, True, self._landing, self._out)
        made = self._program, payload, comm.next_tag(), comm.timeout, traffic
        execution = PipelinedExecution(comm.mpi_comm, *made, trace=comm.trace)
        start = traffic.clock()
        try:
            for _ in work:
                while execution.turn():
                    pass
            traffic.seconds_total += traffic.clock() - start
            execution.run()
        except BaseException as error:
            comm.abort(error, execution, self)
            raise
