"""What the ranks of one process call instead of MPI: messages between threads, from array to array.

A message goes straight from the sender's buffer to the receiver's, by whichever rank comes second, as soon as both are
known. Of a collective the last rank to come does the work. A rank that waits sleeps until something has come for it.
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
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

REST_S = 0.002  # a rank that sleeps looks around this often even if nothing has come
_OPERATIONS = ((MPI.SUM, np.add), (MPI.MAX, np.maximum), (MPI.MIN, np.minimum))


class Ended(BaseException):
    """Another rank has raised: this one is to end too, whatever it would catch."""


class World:
    """What the ranks of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._unmatched: dict[tuple[int, int, int, int], deque[_Message]] = {}  # context, source, destination, tag
        self._gatherings: dict[tuple[int, int], dict[int, _Collective]] = {}  # context, number of the call
        self._contexts: dict[tuple[int, int, int], int] = {}
        self._ended = False
        self._bells = [threading.Lock() for _ in range(size)]  # open: something has come for the rank
        for bell in self._bells:
            bell.acquire()

    def rest(self, rank: int) -> None:
        """Sleep until something has come, or a while."""
        if self._ended:
            raise Ended
        self._bells[rank].acquire(timeout=REST_S)

    def end(self) -> None:
        """Let no rank wait any more."""
        self._ended = True
        for rank in range(self.size):
            self._ring(rank)

    def _ring(self, rank: int) -> None:
        with suppress(RuntimeError):  # it rings already
            self._bells[rank].release()

    def context_of(self, parent: int, number: int, color: int) -> int:
        """What tells the messages of a communicator that was made of another one from those of others."""
        with self._lock:
            return self._contexts.setdefault((parent, number, color), 1 + len(self._contexts))

    def post(self, message: _Message) -> None:
        """Match a message with its other end, in the order in which they were posted, or keep it."""
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
        message.done = other.done = True
        self._ring(other.thread)

    def awaits(self, key: tuple[int, int, int, int]) -> int | None:
        """Bytes of a message that was sent and that nobody has received; None: there is no such message."""
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
    """MPI's request, persistent or not."""

    done = True  # as of one that was not started
    error: MPI.Exception | None = None

    def Test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def Free(self) -> None:
        pass


class _Message(_Request):
    """A send or a receive, of the rank that is a `thread` of the world."""

    def __init__(self, world: World, key: tuple[int, int, int, int], thread: int, memory: Bytes, is_send: bool) -> None:
        self._world, self.key, self.thread, self.memory, self.is_send = world, key, thread, memory, is_send

    def Start(self) -> None:
        self.done = False
        self._world.post(self)


class _Collective(_Request):
    """A rank's part in a collective; `work` is given the parts of all, in rank order, and does all that is to be done.

    The rank that comes last calls it.
    """

    def __init__(self, comm: LocalComm, part: Any, work: Callable[[list[Any]], None]) -> None:
        self._comm, self.part, self.work = comm, part, work
        self.rank, self.size, self.thread = comm.rank, comm.size, comm.thread

    def Start(self) -> None:
        self.done = False
        self._comm.join(self)


class LocalComm:
    """One rank's communicator, as far as `collectives` and `mpicomp.algorithms` use mpi4py's.

    `threads` are those of its ranks, in rank order, as the world counts them; None: all. The rank's own is `thread`.
    """

    def __init__(self, world: World, thread: int, context: int = 0, threads: Sequence[int] | None = None) -> None:
        self._world, self._context, self.thread = world, context, thread
        self._threads = range(world.size) if threads is None else threads
        self.rank, self.size = self._threads.index(thread), len(self._threads)
        self._made = self._collectives = 0

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

    def Send_init(self, buffer: Any, dest: int, tag: int) -> _Message:
        return _Message(self._world, (self._context, self.rank, dest, tag), self.thread, _memory(buffer), True)

    def Recv_init(self, buffer: Any, source: int, tag: int) -> _Message:
        return _Message(self._world, (self._context, source, self.rank, tag), self.thread, _memory(buffer), False)

    def Isend(self, buffer: Any, dest: int, tag: int) -> _Message:
        return _started(self.Send_init(buffer, dest, tag))

    def Irecv(self, buffer: Any, source: int, tag: int) -> _Message:
        return _started(self.Recv_init(buffer, source, tag))

    def Recv(self, buffer: Any, source: int, tag: int) -> None:
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
        return _started(_Collective(self, None, lambda parts: None))

    def Ibcast(self, buffer: Any, root: int) -> _Collective:
        return _started(_Collective(self, (_memory(buffer), root), _broadcast))

    def Allgather_init(self, source: Any, landing: Any) -> _Collective:
        return _Collective(self, (_memory(source), _memory(landing)), _gather)

    def Iallgather(self, source: Any, landing: Any) -> _Collective:
        return _started(self.Allgather_init(source, landing))

    def Iallgatherv(self, source: Any, landing: Any) -> _Collective:
        return self.Iallgather(source, landing)

    def Ialltoallv(self, source: Any, landing: Any) -> _Collective:
        counts = source[1] * _itemsize(source)
        return _started(_Collective(self, (_memory(source), counts, _memory(landing)), _exchange))

    def Iallreduce(self, source: Any, landing: Any, op: MPI.Op = MPI.SUM) -> _Collective:
        target = _array(landing)
        values = target if source is MPI.IN_PLACE else _array(source)
        operation = next(function for known, function in _OPERATIONS if known == op)
        return _started(_Collective(self, (values, target, operation), _reduce))


_Started = TypeVar("_Started", _Message, _Collective)


def _started(request: _Started) -> _Started:
    request.Start()
    return request


def _array(buffer: Any) -> NDArray[Any]:
    """The array of a buffer as mpi4py takes it: the array itself, or a list that begins with it."""
    array: NDArray[Any] = buffer if isinstance(buffer, np.ndarray) else np.asarray(buffer[0])
    return array.reshape(-1)


def _memory(buffer: Any) -> Bytes:
    """Its bytes: all of them, or as many elements as stand behind it, be they counted rank by rank."""
    memory: Bytes = _array(buffer).view(np.uint8)
    return memory if isinstance(buffer, np.ndarray) else memory[: int(np.sum(buffer[1])) * _itemsize(buffer)]


def _itemsize(buffer: Any) -> int:
    """Bytes of what is counted: MPI's type where one is named, else an element of the array."""
    return int(buffer[2].Get_size() if len(buffer) > 2 else buffer[0].itemsize)


def _broadcast(parts: list[Any]) -> None:
    source = parts[parts[0][1]][0]
    for landing, _ in parts:
        if landing is not source:
            landing[:] = source


def _gather(parts: list[Any]) -> None:
    everything = np.concatenate([source for source, _ in parts])
    for _, landing in parts:
        landing[:] = everything


def _exchange(parts: list[Any]) -> None:
    blocks = [np.split(source, np.cumsum(counts)[:-1]) for source, counts, _ in parts]
    for rank, (_, _, landing) in enumerate(parts):
        landing[:] = np.concatenate([from_one[rank] for from_one in blocks])


@np.errstate(all="ignore")
def _reduce(parts: list[Any]) -> None:
    total = parts[0][0].copy()
    for values, _, operation in parts[1:]:
        operation(total, values, out=total)
    for _, landing, _ in parts:
        landing[:] = total
