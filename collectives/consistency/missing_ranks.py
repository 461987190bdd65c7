"""Who is missing: asked once a rank has given up waiting.

A collective that does not end says that somebody is missing, not who. The rank that gives up first sends every other
an empty message. Those that wait, in whichever call, see it, give up too and answer. A rank that does not answer is
missing.
"""

from __future__ import annotations

import time
from contextlib import suppress

from mpi4py import MPI

from collectives.progress.polling import SLEEP_S

TAG = 0  # used for nothing else
ANSWER_S = 1.0  # how long answers are awaited
ANSWER_PART = 0.25  # and at most this part of the timeout


class MissingRanks:
    """The question of one communicator, asked once: nothing uses a communicator on which a rank gave up.

    Parameters
    ----------
    comm : MPI.Comm
    timeout_s : float
        After which ranks give up.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        self._comm, self._patience_s = comm, min(ANSWER_S, ANSWER_PART * timeout_s)
        self._announcements: list[MPI.Request] = []  # never waited for: a stopped rank takes nothing

    def announce(self) -> None:
        """Tell the others that this rank has given up, so that they give up too and do not take it for missing."""
        if not self._announcements:
            others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
            with suppress(MPI.Exception):  # beyond a rank that MPI knows to be dead
                self._announcements = [self._comm.Isend([bytearray(), 0, MPI.BYTE], rank, TAG) for rank in others]

    def another_gave_up(self) -> bool:
        """Whether another rank has given up."""
        return self._comm.Iprobe(MPI.ANY_SOURCE, TAG)

    def find(self) -> list[int]:
        """Give up: ranks that do not do so too, in order."""
        missing = {rank for rank in range(self._comm.size) if rank != self._comm.rank}
        nothing = [bytearray(), 0, MPI.BYTE]
        deadline = time.perf_counter() + self._patience_s
        status = MPI.Status()
        self.announce()
        with suppress(MPI.Exception):
            while missing and time.perf_counter() < deadline:
                while self._comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
                    self._comm.Recv(nothing, status.source, TAG)
                    missing.discard(status.source)
                time.sleep(SLEEP_S)
        return sorted(missing)

    def dead(self) -> list[int]:
        """Ranks that MPI itself knows to have failed; a library without fault tolerance knows none."""
        try:
            failed, everyone = self._comm.Get_failed(), self._comm.Get_group()
            return sorted(MPI.Group.Translate_ranks(failed, group=everyone))
        except (NotImplementedError, AttributeError, MPI.Exception):
            return []


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
