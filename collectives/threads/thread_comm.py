"""Substitute of MPI for the ranks of one process: messages between threads, from array to array.

The second of sender and receiver copies a message straight from the one's buffer to the other's. The last rank that
calls a collective does its work. A rank that waits sleeps until a message or a collective has ended for it.
"""

# ruff: noqa: D102, N802 - named as in mpi4py, and doing the same

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from collectives.annotations import AnyArray, Bytes, Indices
from collectives.transports import BufferSpec, array_of, itemsize_of, memory_of

REST_S = 0.002  # longest sleep of a rank, after which it tests again
_OPERATIONS = ((MPI.SUM, np.add), (MPI.MAX, np.maximum), (MPI.MIN, np.minimum))


class Ended(BaseException):
    """Raised on a rank to end it after an error of another; no Exception, since programs catch those."""


class World:
    """State that the ranks of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._unmatched: dict[tuple[int, int, int, int], deque[_Message]] = {}  # context, source, destination, tag
        self._gatherings: dict[tuple[int, int], dict[int, _Collective]] = {}  # context, number of the call
        self._contexts: dict[tuple[int, int, int], int] = {}
        self._ended = False
        self._limits: list[Callable[[float], float] | None] = [None] * size  # by rank: functions that shorten a rest
        self._bells = [threading.Lock() for _ in range(size)]  # released when a request of the rank has ended
        for bell in self._bells:
            bell.acquire()

    def rest(self, rank: int) -> None:
        """Sleep until a message or a collective has ended for the rank, for `REST_S` at most."""
        if self._ended:
            raise Ended
        limit = self._limits[rank]
        self._bells[rank].acquire(timeout=REST_S if limit is None else limit(REST_S))

    def limit_rest(self, rank: int, limit: Callable[[float], float]) -> None:
        """Have a rank sleep no longer than ``limit(longest)`` at a time."""
        self._limits[rank] = limit

    def end(self) -> None:
        """Wake all ranks, and raise `Ended` on each that waits from now on."""
        self._ended = True
        for rank in range(self.size):
            self._ring(rank)

    def _ring(self, rank: int) -> None:
        with suppress(RuntimeError):  # the lock is released already
            self._bells[rank].release()

    def context_of(self, parent: int, number: int, color: int) -> int:
        """Return the number that separates the messages of a derived communicator from those of all others."""
        with self._lock:
            return self._contexts.setdefault((parent, number, color), 1 + len(self._contexts))

    def post(self, message: _Message) -> None:
        """Match a message with its other end, in the order of posting, or keep it."""
        with self._lock:
            queue = self._unmatched.setdefault(message.key, deque())
            if not queue or queue[0].is_send == message.is_send:
                queue.append(message)
                return
            other = queue.popleft()
            if not queue:
                del self._unmatched[message.key]
        send, receive = (message, other) if message.is_send else (other, message)
        if send.memory.size > receive.memory.size:
            receive.error = MPI.Exception(MPI.ERR_TRUNCATE)
        else:
            receive.memory[: send.memory.size] = send.memory
            receive.nbytes = send.memory.size
        message.done = other.done = True
        self._ring(other.thread)

    def awaits(self, key: tuple[int, int, int, int]) -> int | None:
        """Return the bytes of the first message that was sent and not received, or None."""
        with self._lock:
            queue = self._unmatched.get(key)
            return queue[0].memory.size if queue is not None and queue[0].is_send else None

    def join(self, context: int, number: int, request: _Collective) -> None:
        """Count a rank in; the last one does the work of all."""
        with self._lock:
            gathered = self._gatherings.setdefault((context, number), {})
            gathered[request.rank] = request
            if len(gathered) < request.size:
                return
            del self._gatherings[context, number]
        request.work([gathered[rank].part for rank in range(request.size)])
        for one in gathered.values():
            one.done = True
            self._ring(one.thread)


class _Request:
    """Request, persistent or not."""

    done = True  # until it is started
    error: MPI.Exception | None = None
    nbytes = 0  # of the message that has come

    def Test(self, status: MPI.Status | None = None) -> bool:
        if self.error is not None:
            raise self.error
        if status is not None and self.done:
            status.Set_elements(MPI.BYTE, self.nbytes)
        return self.done

    def Free(self) -> None:
        pass


class _Message(_Request):
    """Send or receive of the rank that is number `thread` in the world."""

    def __init__(self, world: World, key: tuple[int, int, int, int], thread: int, memory: Bytes, is_send: bool) -> None:
        self._world, self.key, self.thread, self.memory, self.is_send = world, key, thread, memory, is_send

    def Start(self) -> None:
        self.done = False
        self._world.post(self)


class _Collective(_Request):
    """One rank's part of a collective. The last rank calls `work` with the parts of all ranks, in rank order."""

    def __init__(self, comm: LocalComm, part: Any, work: Callable[[list[Any]], None]) -> None:
        self._comm, self.part, self.work = comm, part, work
        self.rank, self.size, self.thread = comm.rank, comm.size, comm.thread

    def Start(self) -> None:
        self.done = False
        self._comm.join(self)


class LocalComm:
    """Communicator of one rank, with the methods of mpi4py's that `collectives` and `mpicomp` call."""

    def __init__(self, world: World, thread: int, context: int = 0, threads: Sequence[int] | None = None) -> None:
        # the context separates messages from those of other communicators, see `World.context_of`
        self._world, self._context, self.thread = world, context, thread
        # numbers of all ranks in the world, in rank order
        self._threads = range(world.size) if threads is None else threads
        self.rank, self.size = self._threads.index(thread), len(self._threads)
        self.members = tuple(self._threads)
        self._made = self._collectives = 0

    def limit_rest(self, limit: Callable[[float], float]) -> None:
        self._world.limit_rest(self.thread, limit)

    def Dup(self) -> LocalComm:
        return self._another(0, self._threads)

    def Split(self, color: int = 0, key: int = 0) -> LocalComm:
        everyone = np.empty((self.size, 3), np.int64)
        self._wait(self.Iallgather(np.array([color, key, self.thread]), everyone))
        by_key = sorted(everyone.tolist(), key=lambda one: one[1])
        return self._another(color, [thread for of_color, _, thread in by_key if of_color == color])

    def _another(self, color: int, threads: Sequence[int]) -> LocalComm:
        self._made += 1
        context = self._world.context_of(self._context, self._made, color)
        return LocalComm(self._world, self.thread, context, threads)

    def Split_type(self, split_type: int) -> LocalComm:
        return self.Dup()  # all share memory

    def Set_errhandler(self, errhandler: MPI.Errhandler) -> None:
        pass

    def Free(self) -> None:
        pass

    # Messages --------------------------------------------------------------------------------------------------------

    def Send_init(self, buffer: BufferSpec, dest: int, tag: int) -> _Message:
        return _Message(self._world, (self._context, self.rank, dest, tag), self.thread, memory_of(buffer), True)

    def Recv_init(self, buffer: BufferSpec, source: int, tag: int) -> _Message:
        return _Message(self._world, (self._context, source, self.rank, tag), self.thread, memory_of(buffer), False)

    def Isend(self, buffer: BufferSpec, dest: int, tag: int) -> _Message:
        return _start(self.Send_init(buffer, dest, tag))

    def Irecv(self, buffer: BufferSpec, source: int, tag: int) -> _Message:
        return _start(self.Recv_init(buffer, source, tag))

    def Recv(self, buffer: BufferSpec, source: int, tag: int) -> None:
        self._wait(self.Irecv(buffer, source, tag))

    def _wait(self, request: _Request) -> None:
        while not request.Test():
            self._world.rest(self.thread)

    def Iprobe(self, source: int, tag: int, status: MPI.Status | None = None) -> bool:
        for sender in range(self.size) if source == MPI.ANY_SOURCE else (source,):
            nbytes = self._world.awaits((self._context, sender, self.rank, tag))
            if nbytes is not None:
                if status is not None:
                    status.source = sender
                    status.Set_elements(MPI.BYTE, nbytes)
                return True
        return False

    # Collectives -----------------------------------------------------------------------------------------------------

    def join(self, request: _Collective) -> None:
        self._collectives += 1
        self._world.join(self._context, self._collectives, request)

    def Ibarrier(self) -> _Collective:
        return _start(_Collective(self, None, lambda parts: None))

    def Ibcast(self, buffer: BufferSpec, root: int) -> _Collective:
        return _start(_Collective(self, (memory_of(buffer), root), _broadcast))

    def Allgather_init(self, source: BufferSpec, landing: BufferSpec) -> _Collective:
        return _Collective(self, (memory_of(source), memory_of(landing)), _gather)

    def Iallgather(self, source: BufferSpec, landing: BufferSpec) -> _Collective:
        return _start(self.Allgather_init(source, landing))

    def Iallgatherv(self, source: BufferSpec, landing: BufferSpec) -> _Collective:
        return self.Iallgather(source, landing)

    def Ialltoallv(self, source: BufferSpec, landing: BufferSpec) -> _Collective:
        counts = source[1] * itemsize_of(source)
        return _start(_Collective(self, (memory_of(source), counts, memory_of(landing)), _exchange))

    def Iallreduce(self, source: BufferSpec, landing: BufferSpec, op: MPI.Op = MPI.SUM) -> _Collective:
        target = array_of(landing)
        values = target if source is MPI.IN_PLACE else array_of(source)
        operation = next(function for known, function in _OPERATIONS if known == op)
        return _start(_Collective(self, (values, target, operation), _reduce))


_Started = TypeVar("_Started", _Message, _Collective)


def _start(request: _Started) -> _Started:
    request.Start()
    return request


def _broadcast(parts: list[tuple[Bytes, int]]) -> None:
    source = parts[parts[0][1]][0]
    for landing, _ in parts:
        if landing is not source:
            landing[:] = source


def _gather(parts: list[tuple[Bytes, Bytes]]) -> None:
    everything = np.concatenate([source for source, _ in parts])
    for _, landing in parts:
        landing[:] = everything


def _exchange(parts: list[tuple[Bytes, Indices, Bytes]]) -> None:
    blocks = [np.split(source, np.cumsum(counts)[:-1]) for source, counts, _ in parts]
    for rank, (_, _, landing) in enumerate(parts):
        landing[:] = np.concatenate([from_one[rank] for from_one in blocks])


@np.errstate(all="ignore")
def _reduce(parts: list[tuple[AnyArray, AnyArray, np.ufunc]]) -> None:
    total = parts[0][0].copy()
    for values, _, operation in parts[1:]:
        operation(total, values, out=total)
    for _, landing, _ in parts:
        landing[:] = total
