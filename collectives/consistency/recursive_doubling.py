"""A small vector summed, and a mark compared, in the fewest rounds: recursive doubling.

In round k every rank swaps all that it has with the rank 2^k away, so that log2 M rounds bring everything everywhere.
For M other than a power of two, each rank too many hands its part to a neighbour before and gets the result after, as
in `collectives.schedules.halving_doubling`.

Both ends of a swap add the same two sums, the lower ranks' first, so all results are equal to the bit. Four ranks::

    (x0 + x1) + (x2 + x3)

A message is the mark and, behind it, the numbers: where a call is compared among the ranks and then sums little,
both happen in one exchange. A receive has room for the longest message there is, so that ranks which make different
calls still hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.arrays.elements import Combine, add, aligned_empty
from collectives.trace.traffic import Traffic

TAG = 32_100  # and above: used for nothing else
MARK_BYTES = 8
NUMBERS_FROM = 64  # where a message has its numbers; see `aligned_empty`
# What a rank's numbers may amount to over all rounds; beyond it other ways, which send less, are faster.
MOST_BYTES_IN_A_NODE, MOST_BYTES_BETWEEN_NODES = 256 << 10, 64 << 10
DIFFERENT = -1  # the mark of ranks that do not all have the same one
MOST_REMEMBERED = 512  # lengths and tags for which persistent sends are kept


class Round(NamedTuple):
    """What one rank does in one round.

    Attributes
    ----------
    peer : int
    sends, receives : bool
    peer_first : bool
        The peer's part comes first in a sum.
    final : bool
        What is received is the result.
    """

    peer: int
    sends: bool
    receives: bool
    peer_first: bool = False
    final: bool = False


def rounds_of(rank: int, size: int) -> list[Round]:
    """Rank `rank`'s rounds among `size` ranks."""
    doublings = size.bit_length() - 1
    extras = size - (1 << doublings)
    paired = rank < 2 * extras  # pairs of a core rank (even) and one too many (odd)
    if paired and rank % 2:
        return [Round(rank - 1, True, False), Round(rank - 1, False, True, final=True)]
    position = rank // 2 if paired else rank - extras
    others = [position ^ 1 << bit for bit in range(doublings)]
    swaps = [Round(2 * other if other < extras else other + extras, True, True, other < position) for other in others]
    if paired:
        return [Round(rank + 1, False, True), *swaps, Round(rank + 1, True, False)]
    return swaps


def most_bytes(size: int, one_node: bool) -> int:
    """Longest vector, in bytes, that `size` ranks sum this way; equal on all of them."""
    everything = MOST_BYTES_IN_A_NODE if one_node else MOST_BYTES_BETWEEN_NODES
    return everything // max(1, (size - 1).bit_length()) & -64


_Requests = list[MPI.Prequest | None]  # of each round; None where nothing travels


class _Messages(NamedTuple):
    """What travels for vectors of one length and type with one tag."""

    nbytes: int
    receives: _Requests  # for vectors of any length
    sends: _Requests
    leaving: list[NDArray[Any]]
    landing: list[NDArray[Any]]


class RecursiveDoubling:
    """One exchange after the other.

    Parameters
    ----------
    comm : MPI.Comm
    most_bytes : int
        Longest vector.

    Attributes
    ----------
    mark : int
        After the exchange: the mark, or `DIFFERENT`, on all ranks.
    """

    def __init__(self, comm: MPI.Comm, most_bytes: int) -> None:
        self._comm = comm
        self._rounds = rounds_of(comm.rank, comm.size)
        room = NUMBERS_FROM + most_bytes
        self._leaving = [aligned_empty(room * one.sends, np.uint8) for one in self._rounds]
        self._landing = [aligned_empty(room * one.receives, np.uint8) for one in self._rounds]
        self._marks_out, self._marks_in = (
            [buffer[:MARK_BYTES].view(np.int64) for buffer in buffers] for buffers in (self._leaving, self._landing)
        )
        self._known_receives: dict[int, _Requests] = {}  # by tag
        self._known: dict[Any, _Messages] = {}
        self._messages = _Messages(0, [], [], [], [])
        self._values: NDArray[Any] | None = None
        self._held: NDArray[Any] | None = None
        self._sums: NDArray[Any] | None = None
        self._combine: Combine = add
        self._at = 0
        self.mark = 0

    def start(
        self,
        mark: int,
        values: NDArray[Any] | None = None,
        sums: NDArray[Any] | None = None,
        traffic: Traffic | None = None,
        tag: int = TAG,
        combine: Combine = add,
    ) -> None:
        """Begin; the exchange before must be over.

        Parameters
        ----------
        mark : int
            0 or more.
        values : ndarray[n], optional
            To be summed over ranks: of equal length and type where the marks are equal, and `most_bytes` at most.
        sums : ndarray[n]
            Overwritten with the result if the marks are equal, else left alone; may be `values`.
        traffic : Traffic, optional
            Counted into.
        tag : int
            Of its messages: unique among the exchanges that are under way at once.
        combine : Combine
            What takes the place of the sum.
        """
        self.mark, self._at = mark, 0
        self._values = self._held = values
        self._sums, self._combine = sums, combine
        key = tag if values is None else (tag, values.size, values.dtype)
        messages = self._messages = self._known.get(key) or self._remember(key, tag, values)
        for request in messages.receives:
            if request is not None:
                request.Start()
        if self._rounds[0].sends:
            self._send(0)
        if traffic is not None:
            count = len(messages.sends) - messages.sends.count(None)
            traffic.messages += count
            traffic.bytes_sent += count * messages.nbytes

    def Test(self) -> bool:  # noqa: N802 - waited for like MPI's own requests
        """Make progress without waiting; True once it is over."""
        rounds, at, receives = self._rounds, self._at, self._messages.receives
        while at < len(rounds):
            receive = receives[at]
            if receive is not None:
                if not receive.Test():
                    return False
                self._take(at, rounds[at])
            self._at = at = at + 1
            if at < len(rounds) and rounds[at].sends:
                self._send(at)
        for request in self._messages.sends:
            if request is not None and not request.Test():
                return False
        if self._sums is not None and self._held is not self._sums and self.mark != DIFFERENT:
            self._sums[:] = self._held
        self._values = self._held = self._sums = None  # so that the caller's arrays can be freed
        return True

    def free(self) -> None:
        """Give MPI's resources back."""
        self._forget()
        _free(self._known_receives.values())

    def _send(self, at: int) -> None:
        messages = self._messages
        self._marks_out[at][0] = self.mark
        if self._values is not None and self._held is self._values:  # sums are made in place
            messages.leaving[at][:] = self._values
        request = messages.sends[at]
        assert request is not None
        request.Start()

    def _take(self, at: int, here: Round) -> None:
        """Compare and add what has landed."""
        theirs = self._marks_in[at].item()
        if here.final:
            self.mark = theirs
        elif theirs != self.mark:
            self.mark = DIFFERENT
        held = self._held
        if held is None or self.mark == DIFFERENT:
            return
        messages, after = self._messages, at + 1
        landed = messages.landing[at]
        if here.final:
            self._held = landed
            return
        # the caller's are left alone until all marks are seen
        sums: Any = messages.leaving[after] if after < len(self._rounds) else self._sums
        if held.size == 1 and sums is self._sums:
            sums = np.empty_like(held)  # NumPy adds one element the other way round where the result replaces the first
        if here.peer_first:
            self._combine(landed, held, sums)
        else:
            self._combine(held, landed, sums)
        self._held = sums

    def _remember(self, key: Any, tag: int, values: NDArray[Any] | None) -> _Messages:
        if len(self._known) >= MOST_REMEMBERED:
            self._forget()
        nbytes = MARK_BYTES if values is None else NUMBERS_FROM + values.nbytes

        def places(buffers: list[NDArray[np.uint8]]) -> list[NDArray[Any]]:
            return [] if values is None else [buffer[NUMBERS_FROM:nbytes].view(values.dtype) for buffer in buffers]

        sends = [
            self._comm.Send_init([buffer, nbytes, MPI.BYTE], one.peer, tag) if one.sends else None
            for one, buffer in zip(self._rounds, self._leaving, strict=True)
        ]
        if tag not in self._known_receives:
            self._known_receives[tag] = [
                self._comm.Recv_init([buffer, buffer.size, MPI.BYTE], one.peer, tag) if one.receives else None
                for one, buffer in zip(self._rounds, self._landing, strict=True)
            ]
        receives = self._known_receives[tag]
        made = self._known[key] = _Messages(nbytes, receives, sends, places(self._leaving), places(self._landing))
        return made

    def _forget(self) -> None:
        _free(messages.sends for messages in self._known.values())
        self._known.clear()


def _free(groups: Iterable[_Requests]) -> None:
    for request in chain.from_iterable(groups):
        if request is not None:
            request.Free()
