"""Who is missing: asked once a rank has given up waiting for all to come to a call.

An all-reduce that does not end says that somebody has not come, not who. The rank that gives up first sends every other
an empty message; those that wait in the same place see it, give up too and answer. Who does not answer is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from mpi4py import MPI

from collectives.errors import CollectiveTimeout
from collectives.progress.polling import SLEEP_S, Testable, wait

TAG = 0  # used for nothing else
ANSWER_S = 1.0  # how long answers are awaited
ANSWER_PART = 0.25  # and at most this part of the timeout


class MissingRanks:
    """One communicator's roll call. There is at most one: nothing uses a communicator on which a rank gave up.

    Parameters
    ----------
    comm : MPI.Comm
    timeout_s : float
        After which ranks give up.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        self._comm, self._timeout_s, self._patience_s = comm, timeout_s, min(ANSWER_S, ANSWER_PART * timeout_s)
        self._calls: list[MPI.Request] = []  # never waited for: a stopped rank takes nothing

    def wait(self, request: Testable, describe: Callable[[], str]) -> None:
        """Wait for what all ranks take part in; see `waiting.wait`.

        Raises
        ------
        CollectiveTimeout
            Names the ranks that are missing.
        PeerFailure
        """
        try:
            wait(request, self._timeout_s, describe, self.begun)
        except CollectiveTimeout as error:
            missing = self.silent()
            answers = f"no answer from {named(missing)}" if missing else "all ranks answer"
            raise CollectiveTimeout(f"{error}; {answers}") from None

    def answer(self) -> None:
        """Tell the others that this rank has given up, so that they do not take it for missing."""
        if not self._calls:
            others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
            with suppress(MPI.Exception):  # beyond a rank that MPI knows to be dead
                self._calls = [self._comm.Isend([bytearray(), 0, MPI.BYTE], rank, TAG) for rank in others]

    def begun(self) -> bool:
        """Whether another rank has given up."""
        return self._comm.Iprobe(MPI.ANY_SOURCE, TAG)

    def silent(self) -> list[int]:
        """Give up: ranks that do not do so too, in order."""
        missing = {rank for rank in range(self._comm.size) if rank != self._comm.rank}
        nothing = [bytearray(), 0, MPI.BYTE]
        deadline = time.perf_counter() + self._patience_s
        status = MPI.Status()
        self.answer()
        with suppress(MPI.Exception):
            while missing and time.perf_counter() < deadline:
                while self._comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
                    self._comm.Recv(nothing, status.source, TAG)
                    missing.discard(status.source)
                time.sleep(SLEEP_S)
        return sorted(missing)


def named(ranks: list[int]) -> str:
    """0, 1, 2, 5 as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s'[: len(ranks) > 1]} {listed}"
