"""Exchange of a few numbers between all ranks next to their payloads, directly from each rank to each other rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator, Traffic
from collectives.arrays.elements import aligned_empty
from collectives.execution.handle import Call
from collectives.execution.pipelined import Requests
from collectives.progress.polling import until


class SideChannel:
    """Channel for the numbers of one vector, step after step.

    Each channel has a tag of its own, so that messages of many vectors may be under way at once, in any order.

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
    started : bool
        This rank has sent its numbers, and those of the other ranks are not collected yet.
    """

    def __init__(self, comm: Communicator, count: int, tail_bytes: int = 0) -> None:
        self._rank, self._size, self._here = comm.rank, comm.size, comm.here
        nbytes = 8 * count + tail_bytes
        self._row = aligned_empty(nbytes, np.uint8)
        rows = aligned_empty(comm.size * -(-nbytes // 8) * 8, np.uint8).reshape(comm.size, -1)
        self._row[:] = 0
        rows[:] = 0
        self._rows = [row[:nbytes] for row in rows]
        self.mine, self.tail = self._row[: 8 * count].view(np.float64), self._row[8 * count :]
        self._numbers, self.tails = rows[:, : 8 * count].view(np.float64), [row[8 * count :] for row in self._rows]
        self.everyones = np.zeros((comm.size, count))  # contiguous for kernels
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._requests = Requests(comm.mpi_comm, comm.fixed_tag(), comm.persistent(self))
        self._message = [self._row, nbytes, MPI.BYTE]
        self._messages = {rank: [self._rows[rank], nbytes, MPI.BYTE] for rank in self._others}
        self._kept: list[Any] | None = None  # persistent requests of all messages
        self._under_way: list[Any] = []
        self.started = False

    def start(self) -> None:
        """Send this rank's numbers without waiting."""
        self._rows[self._rank][:] = self._row
        if self._kept is None:
            requests, others = self._requests, self._others
            self._kept = [requests.receive((rank, 0), self._messages[rank], rank) for rank in others]
            self._kept += [requests.send(rank, self._message, rank) for rank in others]
        else:
            for request in self._kept:
                request.Start()
        self._under_way, self.started = self._kept.copy(), True

    def arrived(self) -> bool:
        """Make progress; return True once `collect` need not wait."""
        under_way = self._under_way
        while under_way and under_way[-1].Test():
            under_way.pop()
        return not under_way

    def collect(self, call: Call, traffic: Traffic) -> Iterator[bool]:
        """Wait for the numbers of all ranks, if this rank has started the exchange."""
        if self.started:
            call.describe = lambda: f"{self._here}: the other ranks' reports do not arrive"
            call.wait_name = "side channel"
            for request in self._under_way:
                if not request.Test():
                    yield from until(request, call)
            call.wait_name = ""
            self._under_way, self.started = [], False
            self.everyones[:] = self._numbers
            traffic.bytes_sent += self._row.nbytes * len(self._others)
            traffic.messages += len(self._others)

    def swap(self, call: Call, traffic: Traffic) -> Iterator[bool]:
        """Send this rank's numbers and wait for those of all ranks."""
        self.start()
        yield from self.collect(call, traffic)
