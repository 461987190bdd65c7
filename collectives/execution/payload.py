"""What travels through a program, the requests that carry it, and what is said when they do not end."""

from __future__ import annotations

from typing import Any, Protocol

from mpi4py import MPI

from collectives.execution.program import Message

Cache = dict[tuple[int, int], MPI.Prequest]


class Payload(Protocol):
    """What travels, by a program that merges nothing. Pieces are numbered as in the program.

    Attributes
    ----------
    slots : int
        How many messages to be merged may be under way to this rank at once: 0 unless it is a `MergedPayload`.
    brief : bool
        There is so little to compute that nothing is gained by doing it while messages travel.
    """

    slots: int
    brief: bool

    def encode(self, piece: int) -> None:
        """Make this rank's own contribution to a piece."""

    def outgoing(self, piece: int, weight: int) -> Any:
        """Bytes to send: the piece as it is now, speaking for `weight` ranks."""

    def replacing(self, piece: int, weight: int) -> Any:
        """Where a message lands that replaces the piece."""

    def finish(self, piece: int) -> None:
        """Turn a piece's final state into the result."""


class MergedPayload(Payload, Protocol):
    """What travels by a program that merges; a slot is a place where messages to be merged land."""

    def incoming(self, piece: int, slot: int, weight: int) -> Any:
        """Where a message lands that will be merged."""

    def prepare(self, message: Message, slot: int) -> None:
        """Do what part of a merge needs no data yet; called at most once before `merge`."""

    def merge(self, message: Message, slot: int) -> None:
        """Merge what landed into the piece."""


def not_received(here: str, awaited: Message, last: Message | None) -> str:
    """What a rank waits for in vain, and the last thing that it got."""
    life = f"the last message to arrive was of step {last.step}" if last else "no message has arrived yet"
    return f"{here}, step {awaited.step}: nothing from rank {awaited.peer} for chunk {awaited.chunk} ({life})"


def not_sent(here: str, message: Message) -> str:
    """Whom a rank cannot get rid of its messages to."""
    return f"{here}, step {message.step}: rank {message.peer} does not take chunk {message.chunk}"


def free_all(cache: Cache) -> None:
    """Free the persistent requests of a cache, of which none is active."""
    for request in cache.values():
        request.Free()
    cache.clear()


class Requests:
    """Starts messages.

    Parameters
    ----------
    comm : MPI.Comm
    tag : int
        Of all the messages: unique among what is in flight on `comm`.
    cache : dict, optional
        Where persistent requests are kept between runs of one program on the same buffers.
    """

    __slots__ = ("_cache", "_comm", "_tag")

    def __init__(self, comm: MPI.Comm, tag: int, cache: Cache | None) -> None:
        self._comm, self._tag, self._cache = comm, tag, cache

    def receive(self, key: tuple[int, int], buffer: Any, peer: int) -> MPI.Request:
        """Start receive `key`: number and slot."""
        if self._cache is None:
            return self._comm.Irecv(buffer, peer, self._tag)
        request = self._cache.get(key)
        if request is None:
            request = self._cache[key] = self._comm.Recv_init(buffer, peer, self._tag)
        request.Start()
        return request

    def send(self, index: int, buffer: Any, peer: int) -> MPI.Request:
        """Start send number `index`."""
        if self._cache is None:
            return self._comm.Isend(buffer, peer, self._tag)
        request = self._cache.get((index, -2))
        if request is None:
            request = self._cache[index, -2] = self._comm.Send_init(buffer, peer, self._tag)
        request.Start()
        return request
