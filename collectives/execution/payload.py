"""What travels through a program, and the messages for a piece that does not arrive or is not taken."""

from __future__ import annotations

from typing import Any, Protocol

from collectives.annotations import Testable
from collectives.execution.program import Message


class Payload(Protocol):
    """What travels, by a program that merges nothing. Pieces are numbered as in the program.

    `encode`, `finish` and `merge` return None, or what tells when a device has done its part.
    """

    # How many messages to be merged may be under way to this rank at once: 0 unless it is a `MergedPayload`.
    receive_buffers: int
    # There is so little to compute that nothing is gained by doing it while messages travel.
    brief: bool

    def encode(self, piece: int) -> Testable | None:
        """Make this rank's own contribution to a piece."""

    def outgoing(self, piece: int, weight: int) -> Any:
        """Bytes to send: the piece as it is now, speaking for `weight` ranks."""

    def replacing(self, piece: int, weight: int) -> Any:
        """The memory for a message that replaces the piece."""

    def finish(self, piece: int) -> Testable | None:
        """Turn a piece's final state into the result."""


class MergedPayload(Payload, Protocol):
    """What travels by a program that merges; messages to be merged arrive in numbered receive buffers."""

    def incoming(self, piece: int, buffer: int, weight: int) -> Any:
        """The memory for a message that will be merged."""

    def prepare(self, message: Message, buffer: int) -> None:
        """Do the part of a merge that needs no data yet; called at most once before `merge`."""

    def merge(self, message: Message, buffer: int) -> Testable | None:
        """Merge the message that arrived into the piece."""


def not_received(here: str, awaited: Message, last: Message | None) -> str:
    """What a rank waits for in vain, and the last thing that it got."""
    life = f"the last message to arrive was of step {last.step}" if last else "no message has arrived yet"
    return f"{here}, step {awaited.step}: nothing from rank {awaited.peer} for chunk {awaited.chunk} ({life})"


def not_sent(here: str, message: Message) -> str:
    """Whom a rank cannot get rid of its messages to."""
    return f"{here}, step {message.step}: rank {message.peer} does not take chunk {message.chunk}"
