"""Requests of MPI that carry a program's messages, persistent where they are kept from call to call."""

from __future__ import annotations

from contextlib import suppress

from mpi4py import MPI

from collectives.annotations import override
from collectives.execution.payload import MessageMemory, MessageStarter

Cache = dict[tuple[int, int], MPI.Prequest]
SENDS = -2  # takes the place of a buffer's number in the keys of sends in a cache


class Requests(MessageStarter):
    """Starter of messages with a tag that no other messages under way have.

    With a `cache`, persistent requests are kept there between runs of one program on the same buffers.
    """

    __slots__ = ("_cache", "_comm", "_tag")

    def __init__(self, comm: MPI.Comm, tag: int, cache: Cache | None) -> None:
        self._comm, self._tag, self._cache = comm, tag, cache

    @override
    def receive(self, key: tuple[int, int], buffer: MessageMemory, peer: int) -> MPI.Request:
        if self._cache is None:
            return self._comm.Irecv(buffer, peer, self._tag)
        request = self._cache.get(key)
        if request is None:
            request = self._cache[key] = self._comm.Recv_init(buffer, peer, self._tag)
        request.Start()
        return request

    @override
    def send(self, index: int, buffer: MessageMemory, peer: int) -> MPI.Request:
        if self._cache is None:
            return self._comm.Isend(buffer, peer, self._tag)
        request = self._cache.get((index, SENDS))
        if request is None:
            request = self._cache[index, SENDS] = self._comm.Send_init(buffer, peer, self._tag)
        request.Start()
        return request


def free_inactive(cache: Cache) -> None:
    """Free the persistent requests of a cache that are not active: MPI writes to their buffers no more.

    Those that `Get_status` reports as active stay. The buffers of calls that were in flight stay in any case, kept by
    their calls: Open MPI may report a receive from a dead rank as ended while a part of its message still arrives.
    """
    for key, request in [*cache.items()]:
        with suppress(MPI.Exception):
            if isinstance(request, MPI.Prequest) and request.Get_status():
                request.Free()
                del cache[key]


def free_all(cache: Cache) -> None:
    """Free the persistent requests of a cache, of which none is active."""
    for request in cache.values():
        request.Free()
    cache.clear()
