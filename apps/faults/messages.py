"""A communicator of MPI whose outgoing messages are counted, and damaged by faults."""

# ruff: noqa: N802 - named as in mpi4py, and doing the same

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np
from mpi4py import MPI

from collectives.annotations import Bytes, Testable, override


class Watcher(Protocol):
    """Object that sees the messages of a rank."""

    def sending(self, comm: MPI.Comm, nbytes: int) -> int | None:
        """Count a message that is about to leave; return the number of a bit to flip, or None."""
        ...

    def sent(self) -> None:
        """Act on a message that has been given to MPI."""
        ...


class WatchedComm(MPI.Intracomm):
    """Communicator whose sends pass a `Watcher`, as do those of its duplicates; MPI's own collectives do not."""

    watcher: Watcher

    @classmethod
    def of(cls, comm: MPI.Comm, watcher: Watcher) -> WatchedComm:
        """Return the same communicator of MPI, watched."""
        made = cls(cast(MPI.Intracomm, comm))
        made.watcher = watcher
        return made

    @override
    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        bit = self.watcher.sending(self, _content(buf).size)
        if bit is not None:
            damaged = flip_bit(_content(buf), bit)
            buf = [damaged, damaged.size, MPI.BYTE]
        request = super().Isend(buf, dest, tag)
        self.watcher.sent()
        return request

    @override
    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        return _WatchedSend(self, buf, dest, tag, super().Send_init(buf, dest, tag))

    @override
    def Dup(self, info: MPI.Info | None = None) -> Any:
        return WatchedComm.of(super().Dup(), self.watcher)

    @override
    def Split(self, color: int = 0, key: int = 0) -> Any:
        part = super().Split(color, key)
        return part if color == MPI.UNDEFINED else WatchedComm.of(part, self.watcher)

    @override
    def Shrink(self) -> Any:
        return WatchedComm.of(super().Shrink(), self.watcher)


class _WatchedSend(Testable):
    """Persistent send that passes the watcher whenever it starts."""

    def __init__(self, comm: WatchedComm, message: Any, dest: int, tag: int, request: MPI.Prequest) -> None:
        self._comm, self._message, self._to, self._request = comm, message, (dest, tag), request
        self._single: MPI.Request | None = None  # a damaged copy, which matches the same receive

    def Start(self) -> None:
        """Send the message."""
        content = _content(self._message)
        bit = self._comm.watcher.sending(self._comm, content.size)
        if bit is None:
            self._request.Start()
        else:
            damaged = flip_bit(content, bit)
            self._single = MPI.Intracomm.Isend(self._comm, [damaged, damaged.size, MPI.BYTE], *self._to)
        self._comm.watcher.sent()

    @override
    def Test(self) -> bool:
        if self._single is None:
            return self._request.Test()
        if not self._single.Test():
            return False
        self._single = None
        return True

    def Free(self) -> None:
        """Free the persistent request."""
        self._request.Free()


def flip_bit(content: Bytes, bit: int) -> Bytes:
    """Return a copy of a message with one bit flipped; `bit` counts modulo the length.

    Examples
    --------
    >>> import numpy as np
    >>> from apps.faults.messages import flip_bit
    >>> flip_bit(np.zeros(2, np.uint8), 17).tolist()
    [2, 0]
    """
    damaged = content.copy()
    damaged[bit // 8 % content.size] ^= 1 << bit % 8
    return damaged


def _content(message: Any) -> Bytes:
    """Return the bytes of a message as mpi4py takes them: an array, or array and length and perhaps a type."""
    array, count = message, None
    if isinstance(message, list | tuple):
        array = message[0]
        count = message[1] * message[2].Get_size() if len(message) > 2 and isinstance(message[1], int) else None
    content = np.asarray(array).reshape(-1).view(np.uint8)
    return content if count is None else content[:count]
