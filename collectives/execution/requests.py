"""The requests that carry messages, persistent ones where buffers stay the same from call to call."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

Cache = dict[tuple[int, int], MPI.Prequest]
SENDS = -2  # stands in a key of the cache for the number of a buffer, where the message is sent


def free_all(cache: Cache) -> None:
    """Free the persistent requests of a cache, of which none is active."""
    for request in cache.values():
        request.Free()
    cache.clear()


class Requests:
    """Starts messages by a tag that is unique among what is in flight.

    With a `cache`, persistent requests are kept there between runs of one program on the same buffers.
    """

    __slots__ = ("_cache", "_comm", "_tag")

    def __init__(self, comm: MPI.Comm, tag: int, cache: Cache | None) -> None:
        self._comm, self._tag, self._cache = comm, tag, cache

    def receive(self, key: tuple[int, int], buffer: Any, peer: int) -> MPI.Request:
        """Start a receive; `key`: (message number, buffer number; -1 without a buffer)."""
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
        request = self._cache.get((index, SENDS))
        if request is None:
            request = self._cache[index, SENDS] = self._comm.Send_init(buffer, peer, self._tag)
        request.Start()
        return request
