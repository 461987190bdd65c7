"""Who is missing: asked once a rank has given up waiting for all to come to a call.

An all-reduce that does not end says that somebody has not come, not who. The rank that gives up first sends every other
an empty message; those that wait in the same place see it, give up too and answer. Who does not answer is missing.
"""

from __future__ import annotations

import time
from contextlib import suppress

from mpi4py import MPI

from collectives.waiting import SLEEP_S

TAG = 0  # used for nothing else
ANSWER_S = 1.0  # how long answers are awaited
ANSWER_PART = 0.25  # and at most this part of the timeout


class RollCall:
    """One communicator's roll call. There is at most one: nothing uses a communicator on which a rank gave up.

    Parameters
    ----------
    comm : MPI.Comm
    timeout_s : float
        After which ranks give up.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        self._comm, self._patience_s = comm, min(ANSWER_S, ANSWER_PART * timeout_s)
        self._calls: list[MPI.Request] = []  # never waited for: a stopped rank takes nothing

    def begun(self) -> bool:
        """Whether another rank has given up."""
        return self._comm.Iprobe(MPI.ANY_SOURCE, TAG)

    def silent(self) -> list[int]:
        """Give up: ranks that do not do so too, in order."""
        missing = {rank for rank in range(self._comm.size) if rank != self._comm.rank}
        nothing = [bytearray(), 0, MPI.BYTE]
        deadline = time.perf_counter() + self._patience_s
        status = MPI.Status()
        with suppress(MPI.Exception):  # the ranks beyond one that MPI knows to be dead stay missing
            self._calls = [self._comm.Isend(nothing, rank, TAG) for rank in missing]
            while missing and time.perf_counter() < deadline:
                while self._comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
                    self._comm.Recv(nothing, status.source, TAG)
                    missing.discard(status.source)
                time.sleep(SLEEP_S)
        return sorted(missing)
