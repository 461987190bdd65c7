"""Contracts of the executors: a payload that travels through a program, and the requests that carry its messages."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from collectives.annotations import Testable
from collectives.execution.program import Message

MessageMemory: TypeAlias = list[Any]
"""Memory of one message as mpi4py takes it: [buffer, number of bytes, MPI.BYTE]."""


class Payload(Protocol):
    """Content of the messages of a program that merges nothing. Pieces are numbered as in the program.

    `encode`, `finish` and `merge` return None, or a handle that completes once a device has done its part.
    """

    # How many messages to be merged may be under way to this rank at once: 0 unless it is a `MergedPayload`.
    receive_buffers: int
    # There is so little to compute that nothing is gained by doing it while messages travel.
    brief: bool

    def encode(self, piece: int) -> Testable | None:
        """Make this rank's own contribution to a piece; by default it is there."""
        return None

    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        """Return the bytes to send: the piece in its present state, which has the contributions of `weight` ranks."""

    def replacing(self, piece: int, weight: int) -> MessageMemory:
        """Return the memory for a message that replaces the piece."""

    def finish(self, piece: int) -> Testable | None:
        """Turn a piece's final state into the result; by default it is in place."""
        return None


class MergedPayload(Payload, Protocol):
    """Content of the messages of a program that merges; messages to be merged arrive in numbered receive buffers."""

    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        """Return the memory for a message that will be merged."""

    def prepare(self, message: Message, buffer: int) -> None:
        """Do the part of a merge that needs no data yet, if there is any; called at most once before `merge`."""
        return

    def merge(self, message: Message, buffer: int) -> Testable | None:
        """Merge the message that arrived into the piece."""


class MessageStarter(Protocol):
    """Starter of a program's messages."""

    __slots__ = ()

    def receive(self, key: tuple[int, int], buffer: MessageMemory, peer: int) -> Testable:
        """Start a receive; `key` is (message number, number of the receive buffer or -1)."""

    def send(self, index: int, buffer: MessageMemory, peer: int) -> Testable:
        """Start send number `index`."""


def not_received(here: str, awaited: Message, last: Message | None) -> str:
    """Describe a message that does not arrive, and the last one that did."""
    life = f"the last message to arrive was of step {last.step}" if last else "no message has arrived yet"
    return f"{here}, step {awaited.step}: nothing from rank {awaited.peer} for chunk {awaited.chunk} ({life})"


def not_sent(here: str, message: Message) -> str:
    """Describe a message that its receiver does not take."""
    return f"{here}, step {message.step}: rank {message.peer} does not take chunk {message.chunk}"
