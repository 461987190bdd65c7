"""What two ranks tell each other around a step, while others wait: what is wrong, and a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.rows import Ids

_TAG = 20  # above those of cuts


class Pair:
    """A rank, seen from this one.

    Parameters
    ----------
    comm : Communicator
    other : int
        Rank.
    names : (str, str)
        What errors call this rank and the other one.
    """

    def __init__(self, comm: Communicator, other: int, names: tuple[str, str]) -> None:
        self._comm, self._other, self._names = comm, other, names

    def send(self, numbers: Sequence[int] | Ids) -> None:
        """Send numbers that the other rank receives."""
        self._comm.send(np.asarray(numbers, np.int64), self._other, _TAG)

    def receive(self, count: int) -> Ids:
        """Receive so many numbers."""
        found = np.empty(count, np.int64)
        self._comm.recv(found, self._other, _TAG)
        return found

    def exchange(self, numbers: Sequence[int]) -> Ids:
        """Send numbers, and return as many of the other rank's."""
        return self._exchanged(np.asarray(numbers, np.int64), np.empty(len(numbers), np.int64))

    def agree(self, what: str, wrong: str | None, cause: BaseException | None = None) -> None:
        """Exchange the faults of both ends; both call this.

        Raises
        ------
        PipelineError
            Something is wrong on one of the two; on both, and in the same words.
        """
        text = np.frombuffer((wrong or "").encode(), np.uint8)
        (theirs,) = self.exchange([text.size])
        if text.size or theirs:
            told = self._exchanged(text, np.empty(theirs, np.uint8)).tobytes().decode()
            pairs = sorted(zip(self._names, (wrong, told), strict=True))
            raise PipelineError(f"{what}: {'; '.join(f'{name}: {one}' for name, one in pairs if one)}") from cause

    def _exchanged(self, mine: NDArray[Any], theirs: NDArray[Any]) -> NDArray[Any]:
        receiving = self._comm.irecv(theirs, self._other, _TAG)
        sending = self._comm.isend(mine, self._other, _TAG)
        receiving.wait()
        sending.wait()
        return theirs
