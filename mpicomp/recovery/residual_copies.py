"""Copies of residuals on other ranks, from which the survivors of a death add those of the dead rank.

Before a step ends whose number is a multiple of k, each rank sends its new residual to its buddy. The commit rule then
holds for the copies too: either all ranks have theirs and the step ends, or the step is dropped, with its copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.annotations import AnyArray
from collectives.execution.call import Call
from collectives.execution.traffic import Traffic
from collectives.progress.polling import keep_alive, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from collectives.communicator import Communicator
    from collectives.progress.polling import Backoff
    from mpicomp.feedback.base import StateKind

State = dict[str, Any]
LONGEST_MESSAGE = 1 << 30  # bytes: MPI counts elements of a message in 32 bits


class ResidualCopy(NamedTuple):
    """Copy of another rank's residual.

    Attributes
    ----------
    rank : int
        Owner of the residual.
    step : int
        Number of the step that begins with this residual.
    entries : dict or None
        Entries of its state; None: they are zero, since the rank has made no step.
    """

    rank: int
    step: int
    entries: State | None


def buddies_of(node_of: Sequence[int]) -> list[int]:
    """Return the rank that keeps each rank's copy: the next one, on another node where there are several.

    Parameters
    ----------
    node_of : sequence of int
        Node of each rank.

    Returns
    -------
    list of int
        In rank order; each rank keeps one copy.

    Examples
    --------
    >>> from mpicomp.recovery.residual_copies import buddies_of
    >>> buddies_of([0, 0, 0]), buddies_of([0, 0, 1, 1])
    ([1, 2, 0], [2, 3, 0, 1])
    """
    ranks = sorted(range(len(node_of)), key=lambda rank: (node_of[rank], rank))
    largest = int(np.bincount(node_of).max())
    # a shift by the largest node leaves every other node, and the largest one as far as the others have room
    shift = largest if largest < len(ranks) else 1
    buddies = [0] * len(ranks)
    for place, rank in enumerate(ranks):
        buddies[rank] = ranks[(place + shift) % len(ranks)]
    return buddies


class ResidualCopies:
    """Copy of one aggregator's residual for the buddy of this rank, and the copy that this rank keeps.

    Parameters
    ----------
    comm : Communicator
        With several ranks.
    every : int
        Steps from one copy to the next.
    keys : iterable of str
        Entries of the state that are copied.

    Attributes
    ----------
    size : int
        Number of ranks.
    held : ResidualCopy or None
        The copy that this rank keeps; None: it has no valid one.
    """

    def __init__(self, comm: Communicator, every: int, keys: Iterable[str]) -> None:
        self.every, self.keys, self.size = every, sorted(keys), comm.size
        buddies = buddies_of(comm.layout.node_of)
        self._comm, self._to, self._from = comm.mpi_comm, buddies[comm.rank], buddies.index(comm.rank)
        self._here = comm.here
        self.held: ResidualCopy | None = ResidualCopy(self._from, 0, None)
        self._arrived: ResidualCopy | None = None

    def are_due(self, step: int) -> bool:
        """Return True if the ranks exchange copies before the step with this number begins."""
        return step % self.every == 0

    def exchange(self, state: State, step: int, tag: int, call: Backoff, traffic: Traffic) -> Iterator[bool]:
        """Send this rank's residual, and receive that of another rank; `keep` makes it the copy that is held."""
        leaving = {key: np.ascontiguousarray(state[key]) for key in self.keys}
        landing = {key: np.empty_like(one) for key, one in leaving.items()}
        call.describe = lambda: f"{self._here}: no copy of the residual from rank {self._from}"
        requests: list[Any] = []
        if isinstance(call, Call):
            call.owners = (*call.owners, requests, leaving, landing)
        for key in self.keys:
            for start in range(0, leaving[key].nbytes, LONGEST_MESSAGE):
                part = slice(start, start + LONGEST_MESSAGE)
                receive, send = _bytes(landing[key])[part], _bytes(leaving[key])[part]
                requests.append(self._comm.Irecv([receive, receive.size, MPI.BYTE], self._from, tag))
                requests.append(self._comm.Isend([send, send.size, MPI.BYTE], self._to, tag))
                traffic.bytes_sent += send.size
                traffic.messages += 1
        try:
            for request in requests:
                yield from until(request, call)
        except BaseException:
            keep_alive(requests, leaving, landing)  # MPI may still write there
            raise
        self._arrived = ResidualCopy(self._from, step, landing)

    def keep(self) -> None:
        """Hold the copy that has arrived: the step has succeeded on all ranks."""
        self.held, self._arrived = self._arrived, None

    def drop(self) -> None:
        """Forget the copy that has arrived: the step has failed."""
        self._arrived = None

    def forget(self) -> None:
        """Forget the copy that is held, since the residuals were replaced."""
        self.held = self._arrived = None


class Saved(NamedTuple):
    """State of an aggregator from which it goes on after a death.

    Attributes
    ----------
    state : dict
    held : ResidualCopy or None
        The copy that this rank keeps.
    size : int
        Number of ranks, if they keep copies; else 0.
    """

    state: State
    held: ResidualCopy | None
    size: int


class Recovered(NamedTuple):
    """A survivor's state once it has added the copies that it held.

    Attributes
    ----------
    state : dict
    others : list of dict
        States of dead ranks, for the errors of elements that they owned; their means are in `state`.
    """

    state: State
    others: list[State]


def with_copy(
    state: State, copy: ResidualCopy | None, dead: Sequence[int], kinds: Mapping[str, StateKind]
) -> Recovered:
    """Add the copy of a dead rank's residual to a state, and return the errors that the rank owned besides."""
    if copy is None or copy.rank not in dead or copy.entries is None or copy.step > state["step"]:
        return Recovered(state, [])
    entries, sums = copy.entries, dict(state)
    for key, value in entries.items():
        if kinds[key] == "mean":
            sums[key] = state[key] + value
    owned = {key: value for key, value in entries.items() if kinds[key] != "mean"}
    return Recovered(sums, [{**state, **owned}] if owned else [])


def ages_of(copies: Sequence[tuple[int, int] | None], dead: Sequence[int], step: int) -> dict[int, int | None]:
    """Return the age in steps of each dead rank's copy, None where the survivors have no valid one.

    Parameters
    ----------
    copies : sequence of (rank, step) or None
        The copy that each survivor holds.
    dead : sequence of int
    step : int
        Number of the next step.

    Returns
    -------
    dict of int to int or None

    Examples
    --------
    >>> from mpicomp.recovery.residual_copies import ages_of
    >>> ages_of([(1, 8), None], dead=[1, 2], step=10)
    {1: 2, 2: None}
    """
    held = {copy[0]: step - copy[1] for copy in copies if copy is not None and copy[1] <= step}
    return {rank: held.get(rank) for rank in dead}


def _bytes(array: AnyArray) -> AnyArray:
    return array.reshape(-1).view(np.uint8)
