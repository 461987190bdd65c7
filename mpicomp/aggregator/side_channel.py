"""Exchange of a few numbers between all ranks next to their payloads, directly from each rank to each other rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator, Traffic
from collectives.annotations import Array
from collectives.arrays.elements import add, aligned_empty
from collectives.execution.requests import Requests
from collectives.group.routes import LATENCY_BYTES
from collectives.progress.polling import until
from mpicomp.aggregator.call import Compare, VectorCall

# bytes of the rows of all ranks that travel with the comparison of a call: among more than two ranks each message has
# all rows, most of them zeros, so that long ones would take longer than another round of messages
MOST_COMPARED_BYTES = LATENCY_BYTES // 8


class SideChannel:
    """Channel for the numbers of one vector, step after step.

    Each channel has a tag of its own, so that messages of many vectors may be under way at once, in any order. The
    first exchange of a call can travel in the messages by which the ranks compare the call, see `compare_with`.

    Parameters
    ----------
    comm : Communicator
    count : int
        Number of float64 numbers.
    tail_bytes : int
        Number of bytes that follow the numbers.

    Attributes
    ----------
    mine : float64[count]
        This rank's numbers; filled in before `start`.
    everyones : float64[ranks, count]
        The numbers of all ranks, after `collect`.
    tail : uint8[tail_bytes]
        The bytes behind this rank's numbers.
    tails : list of uint8[tail_bytes]
        The bytes of all ranks, after `collect`.
    fits_comparison : bool
        The numbers and bytes of all ranks are few enough for the messages of a comparison; equal on all ranks.
    started : bool
        This rank has sent its numbers, and those of the other ranks are not collected yet.

    Examples
    --------
    In the steps of a call; a single rank has nothing to wait for:

    >>> import mpicomp
    >>> from mpicomp.aggregator.side_channel import SideChannel
    >>> with mpicomp.Communicator() as comm:
    ...     channel = SideChannel(comm, count=2)
    ...     channel.mine[:] = 0.5, 1.0
    ...     steps = list(channel.swap(None, mpicomp.Dense().start(comm, 1).traffic.last))
    >>> steps, channel.everyones.tolist()
    ([], [[0.5, 1.0]])
    """

    def __init__(self, comm: Communicator, count: int, tail_bytes: int = 0) -> None:
        rank, size, nbytes = comm.rank, comm.size, 8 * count + tail_bytes
        self._here, self._others = comm.here, [one for one in range(size) if one != rank]
        # two words at least: a sum of a single word is made elsewhere, and has no room for the rows of two ranks
        words = max(2, -(-nbytes // 8))
        self._all = _zeros(size, words)
        # rows of other ranks stay zero, so that sums are the rows of all; two ranks need no sums
        values = self._all if size == 1 else _zeros(size if size > 2 else 1, words)
        own = values[rank if size > 2 else 0]
        most = comm.call_check.most_bytes if size == 2 else min(comm.call_check.most_bytes, MOST_COMPARED_BYTES)
        self.fits_comparison = size > 1 and values.nbytes <= most
        self._combine = add if size > 2 else _pair
        self._own, self._row, self._values = self._all[rank], own, values.reshape(-1)
        self._sums = self._all if size == 2 else self._all.reshape(-1)
        message = own.view(np.uint8)[:nbytes]
        self._rows = [row.view(np.uint8)[:nbytes] for row in self._all]
        self.mine, self.tail = message[: 8 * count].view(np.float64), message[8 * count :]
        self._numbers, self.tails = self._all[:, :count].view(np.float64), [row[8 * count :] for row in self._rows]
        # contiguous for kernels
        self._has_copy = not self._numbers.flags.c_contiguous
        self.everyones = np.zeros((size, count)) if self._has_copy else self._numbers
        self._requests = Requests(comm.mpi_comm, comm.fixed_tag(), comm.users.persistent(self))
        self._message = [message, nbytes, MPI.BYTE]
        self._messages = {one: [self._rows[one], nbytes, MPI.BYTE] for one in self._others}
        self._kept: list[Any] | None = None  # persistent requests of all messages
        self._under_way: list[Any] = []
        self._compare: Compare | None = None
        self.started = False

    def compare_with(self, compare: Compare | None) -> None:
        """Let the next exchange travel in the messages of a comparison; None: in messages of its own."""
        self._compare = compare

    def start(self) -> None:
        """Send this rank's numbers without waiting."""
        self.started = True
        if not self._others or self._compare is not None:
            return
        self._own[:] = self._row
        if self._kept is None:
            requests, others = self._requests, self._others
            self._kept = [requests.receive((one, 0), self._messages[one], one) for one in others]
            self._kept += [requests.send(one, self._message, one) for one in others]
        else:
            for request in self._kept:
                request.Start()
        self._under_way = self._kept.copy()

    def arrived(self) -> bool:
        """Make progress; return True once `collect` need not wait."""
        under_way = self._under_way
        while under_way and under_way[-1].Test():
            under_way.pop()
        return not under_way

    def collect(self, call: VectorCall, traffic: Traffic) -> Iterator[bool]:
        """Return steps that wait for the numbers of all ranks, if this rank has started the exchange.

        Raises
        ------
        CollectiveMismatch
            The exchange travels with the comparison of the call, and the ranks differ.
        """
        if self.started and self._others:
            return self._collect(call, traffic)
        self.started = False
        return iter(())

    def _collect(self, call: VectorCall, traffic: Traffic) -> Iterator[bool]:
        if self._compare is not None:
            compare, self._compare = self._compare, None
            yield from compare(values=self._values, sums=self._sums, combine=self._combine)
            call.compare = None
        else:
            call.describe = lambda: f"{self._here}: the other ranks' reports do not arrive"
            call.wait_name = "side channel"
            for request in self._under_way:
                if not request.Test():
                    yield from until(request, call)
            call.wait_name = ""
            self._under_way = []
            traffic.bytes_sent += self._message[1] * len(self._others)
            traffic.messages += len(self._others)
        self.started = False
        if self._has_copy:
            self.everyones[:] = self._numbers

    def swap(self, call: VectorCall, traffic: Traffic) -> Iterator[bool]:
        """Send this rank's numbers and wait for those of all ranks."""
        self.start()
        yield from self.collect(call, traffic)


def _zeros(rows: int, words: int) -> Array:
    zeros = aligned_empty(rows * words, np.uint64).reshape(rows, words)
    zeros[:] = 0
    return zeros


def _pair(first: Array, second: Array, out: Array) -> None:
    """Store the rows of two ranks."""
    out[0], out[1] = first, second
