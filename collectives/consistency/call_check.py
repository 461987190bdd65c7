"""Before a collective starts, all ranks make sure that they are about to make the same one.

They compare hashes of it in one exchange, which may sum a small vector as well; only if the hashes differ do the
descriptions travel, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.consistency.missing_ranks import MissingRanks, named
from collectives.consistency.recursive_doubling import DIFFERENT, RecursiveDoubling
from collectives.errors import CollectiveMismatch
from collectives.progress.polling import spins, wait
from collectives.trace.traffic import Traffic

_MASK = (1 << 62) - 1


def fingerprint(text: str) -> int:
    """62 bits that stand for a description."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK


class Agreement:
    """The check, for one communicator.

    Parameters
    ----------
    comm : MPI.Comm
    timeout_s : float
    most_bytes : int
        Longest vector that may be summed on the way.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float, most_bytes: int = 0) -> None:
        self._comm, self._timeout_s = comm, timeout_s
        self.missing_ranks = MissingRanks(comm, timeout_s)
        self._calls = 0
        self._describe: Callable[[], str] | None = None  # of the check under way
        self._comparison = RecursiveDoubling(comm, most_bytes) if comm.size > 1 else None

    def begin(
        self,
        mark: int,
        describe: Callable[[], str],
        traffic: Traffic | None = None,
        values: NDArray[Any] | None = None,
        sums: NDArray[Any] | None = None,
    ) -> None:
        """Start comparing this call with what the other ranks call, once the check before it is over.

        Parameters
        ----------
        mark : int
            Fingerprint of the call without its number.
        describe : callable
            The call in words; asked for only if the ranks differ.
        traffic : Traffic, optional
            Counted into.
        values, sums : ndarray, optional
            What is summed on the way, and where the result goes; see `RecursiveDoubling.start`.
        """
        self._calls += 1
        if self._comparison is not None:
            self._describe = describe
            mixed = (mark + self._calls * 0x9E3779B97F4A7C15) & _MASK
            self._comparison.start(mixed, values, sums, traffic)

    @property
    def pending(self) -> bool:
        """Whether a check is under way."""
        return self._describe is not None

    def agreed(self) -> bool:
        """Whether the check under way is over and all ranks agreed.

        Raises
        ------
        CollectiveMismatch
            The same text on every rank, with what each group of ranks called.
        """
        if self._describe is None:
            return True
        assert self._comparison is not None
        if not self._comparison.Test():
            return False
        describe, self._describe = self._describe, None
        if self._comparison.mark == DIFFERENT:
            self._raise(describe())
        return True

    def wait(self) -> None:
        """Wait for the check under way.

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure
        """
        describe = self._describe
        if describe is None:
            return
        assert self._comparison is not None
        self.missing_ranks.wait(self._comparison, lambda: self.waiting(describe()))
        self.agreed()

    def check(
        self,
        mark: int,
        describe: Callable[[], str],
        traffic: Traffic | None = None,
        values: NDArray[Any] | None = None,
        sums: NDArray[Any] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """`begin`, what can be done `meanwhile`, and `wait`."""
        self.begin(mark, describe, traffic, values, sums)
        if meanwhile is not None:
            meanwhile()
        for _ in range(spins()):
            if self.agreed():
                return
        self.wait()

    def free(self) -> None:
        """Give MPI's resources back."""
        if self._comparison is not None:
            self._comparison.free()
            self._comparison = None

    def waiting(self, call: str) -> str:
        """Who waits for what."""
        comm = self._comm
        return (
            f"rank {comm.rank} of {comm.size}: not all ranks have come to call {self._calls}, {call} "
            "(look for one that stopped or took another branch)"
        )

    def _raise(self, mine: str) -> NoReturn:
        calls: dict[str, list[int]] = {}
        for rank, call in enumerate(gather_texts(self._comm, mine, self._timeout_s)):
            calls.setdefault(call, []).append(rank)
        listed = "; ".join(f"{named(ranks)}: {call}" for call, ranks in calls.items())
        if len(calls) == 1:
            listed += " (the same call, but after a different number of collectives)"
        raise CollectiveMismatch(
            f"the ranks differ in collective call {self._calls}: {listed}. "
            "Make the same calls in the same order with the same shapes, dtypes and options on every rank"
        )


def gather_texts(comm: MPI.Comm, text: str, timeout_s: float) -> list[str]:
    """Every rank's text, in rank order, on every rank."""

    def waiting() -> str:
        return f"rank {comm.rank} of {comm.size}: not all ranks say what went wrong (look for one that stopped)"

    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = np.zeros(comm.size, np.int64)
    wait(comm.Iallgather(np.array([mine.size], np.int64), lengths), timeout_s, waiting)
    everything = np.empty(int(lengths.sum()), np.uint8)
    wait(comm.Iallgatherv(mine, [everything, lengths]), timeout_s, waiting)
    ends = np.cumsum(lengths)
    return [bytes(everything[end - length : end]).decode() for end, length in zip(ends, lengths, strict=True)]
