"""Transport over emulated links: messages between nodes are held back by a `SlowLink`.

Collectives of MPI itself take the time of a ring of messages through the nodes, and a barrier takes a latency.
"""

# ruff: noqa: N802 - named as in mpi4py, and doing the same

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.consistency.part_ranks import ranks_in
from collectives.cost.rate import EmulatedLink
from collectives.emulation.link_clock import share_clock
from collectives.emulation.slow_link import HeldReceive, HeldSend, SlowLink
from collectives.nodes.layout import NodeLabel
from collectives.transports import Wrapper, nbytes_of

SAMPLE_BYTES = 1 << 22
FASTEST = 0.25  # part of the speed of a copy that an emulated link may have, as each message is copied twice


def copied_bytes_per_s() -> float:
    """Return the bytes that this machine copies each second."""
    source, target = np.zeros(SAMPLE_BYTES, np.uint8), np.ones(SAMPLE_BYTES, np.uint8)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return SAMPLE_BYTES / min(times)


def validate_link(link: object, parent: object = None) -> EmulatedLink | None:
    """Return the link that a communicator emulates, or None.

    Raises
    ------
    TypeError, ValueError
        It is no link, or faster than this machine could emulate; or the communicator `parent` has one already.
    """
    if link is None:
        return None
    outer = link_of(parent)
    if outer is not None:
        raise ValueError(f"mpi_comm has an emulated link of {outer} already: leave out link")
    if isinstance(link, str):
        try:
            link = EmulatedLink.parse(link)
        except ValueError as error:
            raise ValueError(f"link={error}") from None
    if not isinstance(link, EmulatedLink):
        raise TypeError(f"link={link!r}: pass a text such as '100mbit' or '1gbit,50us'")
    most = FASTEST * copied_bytes_per_s()
    if link.bytes_per_s > most:
        raise ValueError(
            f"link: {link.rate} is faster than messages are copied here ({most * 8e-9:.3g} Gbit/s can be emulated): "
            "take a slower link, or leave out link"
        )
    return link


class SlowComm(Wrapper):
    """Transport whose messages between nodes a `SlowLink` holds back.

    `node_of` has the node of each rank.

    Attributes
    ----------
    emulated_link : EmulatedLink
        The link that messages are held back by.
    node : int
        Number of this rank's node.
    """

    def __init__(self, comm: Any, link: SlowLink, node_of: Sequence[int]) -> None:
        super().__init__(comm)
        self._link, self.node, self.emulated_link = link, link.node, link.link
        self._node_of, self._n_nodes, self._n_here = node_of, len(set(node_of)), node_of.count(link.node)

    def Dup(self) -> SlowComm:
        """Return a duplicate, over the same link."""
        return SlowComm(self._comm.Dup(), self._link, self._node_of)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return the communicator of the ranks of one color, over the same link; MPI's own COMM_NULL for no color."""
        part = self._comm.Split(color, key)
        if color == MPI.UNDEFINED:
            return part
        return SlowComm(part, self._link, [self._node_of[rank] for rank in ranks_in(self._comm, part)])

    # Messages --------------------------------------------------------------------------------------------------------

    def _passes_by(self, peer: int) -> bool:
        return self._n_here > 1 and self._node_of[peer] == self._link.node

    def Isend(self, buffer: Any, dest: int, tag: int) -> HeldSend | HeldReceive:
        """Post a message."""
        if self._passes_by(dest):
            return HeldReceive(self._link, self._comm.Isend(buffer, dest, tag), _at_once)
        send = HeldSend(self._link, nbytes_of(buffer), lambda: self._comm.Isend(buffer, dest, tag))
        send.Start()
        return send

    def Send_init(self, buffer: Any, dest: int, tag: int) -> HeldSend | HeldReceive:
        """Make a persistent send."""
        request = self._comm.Send_init(buffer, dest, tag)
        if self._passes_by(dest):
            return HeldReceive(self._link, request, _at_once)
        return HeldSend(self._link, nbytes_of(buffer), request.Start, request)

    def Irecv(self, buffer: Any, source: int, tag: int) -> HeldReceive:
        """Receive a message."""
        return HeldReceive(self._link, self._comm.Irecv(buffer, source, tag), self._hold(source))

    def Recv_init(self, buffer: Any, source: int, tag: int) -> HeldReceive:
        """Make a persistent receive."""
        return HeldReceive(self._link, self._comm.Recv_init(buffer, source, tag), self._hold(source))

    def _hold(self, source: int) -> Callable[[MPI.Status], float]:
        return _at_once if self._passes_by(source) else self._arrived

    def _arrived(self, status: MPI.Status) -> float:
        return self._link.arrive(status.Get_count(MPI.BYTE))

    def Iprobe(self, source: int, tag: int, status: MPI.Status | None = None) -> bool:
        """Return True if a message has come."""
        self._link.pump()
        return bool(self._comm.Iprobe(source, tag, status))

    # Collectives of MPI ----------------------------------------------------------------------------------------------

    def _after(self, request: Any, nbytes: float, hops: int = 1) -> HeldReceive:
        """Hold back a collective that sends `nbytes` through each node's link, a part of it for each of its ranks."""
        if self._n_nodes == 1:
            return HeldReceive(self._link, request, _at_once)
        latency_s = hops * self._link.link.latency_s
        return HeldReceive(self._link, request, lambda status: self._link.carry(nbytes / self._n_here) + latency_s)

    def Ibarrier(self) -> HeldReceive:
        """Wait for all ranks."""
        return self._after(self._comm.Ibarrier(), 0)

    def Ibcast(self, buffer: Any, root: int) -> HeldReceive:
        """Send the root's buffer to all ranks."""
        return self._after(self._comm.Ibcast(buffer, root), nbytes_of(buffer))

    def Iallgather(self, source: Any, landing: Any) -> HeldReceive:
        """Gather the buffers of all ranks."""
        return self._after(self._comm.Iallgather(source, landing), *self._gathered(source, landing))

    def Iallgatherv(self, source: Any, landing: Any) -> HeldReceive:
        """Gather buffers of different lengths."""
        return self._after(self._comm.Iallgatherv(source, landing), *self._gathered(source, landing))

    def _gathered(self, source: Any, landing: Any) -> tuple[int, int]:
        return nbytes_of(landing) - nbytes_of(source), self._n_nodes - 1

    def Ialltoallv(self, source: Any, landing: Any) -> HeldReceive:
        """Send a part of the buffer to each rank."""
        return self._after(self._comm.Ialltoallv(source, landing), nbytes_of(landing) * self._n_here)

    def Iallreduce(self, source: Any, landing: Any, op: MPI.Op = MPI.SUM) -> HeldReceive:
        """Sum the buffers of all ranks."""
        nbytes = 2 * nbytes_of(landing) * (self.size - 1) / self.size
        return self._after(self._comm.Iallreduce(source, landing, op), nbytes, 2 * (self._n_nodes - 1))

    def Allreduce(self, source: Any, landing: Any, op: MPI.Op = MPI.SUM) -> None:
        """Sum the buffers of all ranks, and wait."""
        request = self.Iallreduce(source, landing, op)
        while not request.Test():
            time.sleep(0)


def slow_down(comm: Any, node_of: Sequence[int], link: EmulatedLink | None) -> Any:
    """Return a communicator whose messages between nodes are held back by the nodes' links, if any; collective.

    `node_of` has the node of each rank; the ranks of a node are on one machine.

    Raises
    ------
    OSError
        A rank cannot share the link of its node; on every rank.
    """
    if link is None:
        return comm
    slow = SlowLink(link, node_of[comm.rank], share_clock(comm, node_of))
    if hasattr(comm, "limit_rest"):  # ranks are threads, which sleep until a message has come
        comm.limit_rest(slow.rest_s)
    return SlowComm(comm, slow, node_of)


def link_of(comm: Any) -> EmulatedLink | None:
    """Return the link that holds back a communicator's messages, or None."""
    return getattr(comm, "emulated_link", None)


def linked_node(comm: Any, link: EmulatedLink | None) -> NodeLabel | None:
    """Return the node of this rank over the link of a communicator or one that is added, or None."""
    if link is not None:
        return NodeLabel(comm.rank)
    return None if link_of(comm) is None else NodeLabel(comm.node)


def _at_once(status: MPI.Status) -> float:
    return -math.inf
