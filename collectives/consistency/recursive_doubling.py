"""Recursive doubling: exchanges in which all ranks compare a number, and sum a small vector on the way.

In round k of recursive doubling every rank swaps its partial sum with the rank at distance 2^k, so that log2 M rounds
reach all ranks. If M is not a power of two, each extra rank sends its part to a neighbour before and receives the
result after, as in `collectives.schedules.halving_doubling`. Both ends of a swap add the same two sums, that of the
lower ranks first, so all results are equal to the bit. Four ranks::

    (x0 + x1) + (x2 + x3)

A message has the mark and then the numbers; with checksums, a checksum of the message in between. Receives have room
for the longest message there is, so that the exchange also ends on ranks that make different calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives import tags
from collectives.annotations import AnyArray, Bytes, Testable, override
from collectives.arrays.elements import Combine, add, aligned_empty
from collectives.checksum import digest
from collectives.errors import DamagedMessage
from collectives.execution.traffic import Traffic

# Limit of a rank's numbers, in bytes over all rounds; beyond it other ways, which send less, are faster.
MOST_BYTES_IN_A_NODE, MOST_BYTES_BETWEEN_NODES = 256 << 10, 64 << 10
MARK_BYTES = 8
SEALED_BYTES = 24  # of the mark, the checksum of the message, and its length
NUMBERS_FROM = 64  # offset of the numbers in a message; see `aligned_empty`
DIFFERENT = -1  # result in place of the mark if the ranks have different ones
MOST_REMEMBERED = 512  # lengths and tags for which persistent sends are kept
_Requests: TypeAlias = list[MPI.Prequest | None]  # by round; None: no message
_Key: TypeAlias = int | tuple[int, int, np.dtype[np.generic]]  # tag; and length and type of a vector


class Swap(NamedTuple):
    """Messages of one rank in one round."""

    peer: int
    sends: bool
    receives: bool
    peer_first: bool = False  # the peer's part comes first in a sum
    final: bool = False  # the message received is the result


def rounds_of(rank: int, size: int) -> list[Swap]:
    """Return the rounds of rank `rank` among `size` ranks."""
    doublings = size.bit_length() - 1
    extras = size - (1 << doublings)
    paired = rank < 2 * extras  # pairs of a core rank (even) and an extra one (odd)
    if paired and rank % 2:
        return [Swap(rank - 1, True, False), Swap(rank - 1, False, True, final=True)]
    position = rank // 2 if paired else rank - extras
    others = [position ^ 1 << bit for bit in range(doublings)]
    swaps = [Swap(2 * other if other < extras else other + extras, True, True, other < position) for other in others]
    if paired:
        return [Swap(rank + 1, False, True), *swaps, Swap(rank + 1, True, False)]
    return swaps


def most_bytes(size: int, one_node: bool) -> int:
    """Return the length in bytes of the longest vector that `size` ranks sum this way; equal on all ranks."""
    everything = MOST_BYTES_IN_A_NODE if one_node else MOST_BYTES_BETWEEN_NODES
    return everything // max(1, (size - 1).bit_length()) & -64


class _Messages(NamedTuple):
    """Requests and memory of the messages for vectors of one length and type with one tag."""

    nbytes: int
    receives: _Requests  # for vectors of any length
    sends: _Requests
    leaving: list[AnyArray]
    landing: list[AnyArray]


class RecursiveDoubling(Testable):
    """Exchanges of one rank, one after the other, of vectors of `most_bytes` at most."""

    def __init__(self, comm: MPI.Comm, most_bytes: int, has_checksums: bool = False) -> None:
        self._comm, self._has_checksums = comm, has_checksums
        self._rounds = rounds_of(comm.rank, comm.size)
        room = NUMBERS_FROM + most_bytes
        self._leaving = [aligned_empty(room * one.sends, np.uint8) for one in self._rounds]
        self._landing = [aligned_empty(room * one.receives, np.uint8) for one in self._rounds]
        self._marks_out, self._marks_in = (
            [buffer[:MARK_BYTES].view(np.int64) for buffer in buffers] for buffers in (self._leaving, self._landing)
        )
        self._known_receives: dict[int, _Requests] = {}  # by tag
        self._known: dict[_Key, _Messages] = {}
        self._messages = _Messages(0, [], [], [], [])
        self._values: AnyArray | None = None
        self._held: AnyArray | None = None
        self._sums: AnyArray | None = None
        self._combine: Combine = add
        self._at = 0
        self.mark = 0

    def start(
        self,
        mark: int,
        values: AnyArray | None = None,
        sums: AnyArray | None = None,
        traffic: Traffic | None = None,
        tag: int = tags.CHECKS_OF_CALLS.start,
        combine: Combine = add,
    ) -> None:
        """Begin an exchange with a tag that no other one under way has; the previous exchange must be over."""
        self.mark, self._at = mark, 0  # >= 0; in the end the common mark, or `DIFFERENT`, on all ranks
        self._values = self._held = values
        self._sums, self._combine = sums, combine
        key: _Key = tag if values is None else (tag, values.size, values.dtype)
        messages = self._messages = self._known.get(key) or self._remember(key, tag, values)
        for request in messages.receives:
            if request is not None:
                request.Start()
        if self._rounds[0].sends:
            self._send(0)
        if traffic is not None:
            count = len(messages.sends) - messages.sends.count(None)
            traffic.messages += count
            traffic.bytes_sent += count * messages.nbytes

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        rounds, at, receives = self._rounds, self._at, self._messages.receives
        while at < len(rounds):
            receive = receives[at]
            if receive is not None:
                if not receive.Test():
                    return False
                self._take(at, rounds[at])
            self._at = at = at + 1
            if at < len(rounds) and rounds[at].sends:
                self._send(at)
        for request in self._messages.sends:
            if request is not None and not request.Test():
                return False
        if self._sums is not None and self._held is not self._sums and self.mark != DIFFERENT:
            self._sums[:] = self._held
        self._values = self._held = self._sums = None  # so that the caller's arrays can be freed
        return True

    def free(self) -> None:
        """Free persistent requests of MPI."""
        self._forget()
        _free(self._known_receives.values())

    def _send(self, at: int) -> None:
        messages = self._messages
        self._marks_out[at][0] = self.mark
        if self._values is not None and self._held is self._values:  # sums are made in place
            messages.leaving[at][:] = self._values
        if self._has_checksums:
            _seal(self._leaving[at][: messages.nbytes])
        request = messages.sends[at]
        assert request is not None
        request.Start()

    def _take(self, at: int, here: Swap) -> None:
        """Compare the mark that has arrived, and add the numbers."""
        if self._has_checksums and not _is_sealed(self._landing[at]):
            raise DamagedMessage.of(f"rank {self._comm.rank} of {self._comm.size}", here.peer, self._messages.nbytes)
        theirs = self._marks_in[at].item()
        if here.final:
            self.mark = theirs
        elif theirs != self.mark:
            self.mark = DIFFERENT
        held = self._held
        if held is None or self.mark == DIFFERENT:
            return
        messages, after = self._messages, at + 1
        landed = messages.landing[at]
        if here.final:
            self._held = landed
            return
        # The caller's array is written to in the last round alone, since a later mark may differ.
        sums = messages.leaving[after] if after < len(self._rounds) else self._sums
        assert sums is not None
        if held.size == 1 and sums is self._sums:
            sums = np.empty_like(held)  # NumPy swaps the operands of one element if the result replaces the first
        if here.peer_first:
            self._combine(landed, held, sums)
        else:
            self._combine(held, landed, sums)
        self._held = sums

    def _remember(self, key: _Key, tag: int, values: AnyArray | None) -> _Messages:
        if len(self._known) >= MOST_REMEMBERED:
            self._forget()
        nbytes = (
            (SEALED_BYTES if self._has_checksums else MARK_BYTES) if values is None else NUMBERS_FROM + values.nbytes
        )

        def places(buffers: list[Bytes]) -> list[AnyArray]:
            return [] if values is None else [buffer[NUMBERS_FROM:nbytes].view(values.dtype) for buffer in buffers]

        sends = [
            self._comm.Send_init([buffer, nbytes, MPI.BYTE], one.peer, tag) if one.sends else None
            for one, buffer in zip(self._rounds, self._leaving, strict=True)
        ]
        if tag not in self._known_receives:
            self._known_receives[tag] = [
                self._comm.Recv_init([buffer, buffer.size, MPI.BYTE], one.peer, tag) if one.receives else None
                for one, buffer in zip(self._rounds, self._landing, strict=True)
            ]
        receives = self._known_receives[tag]
        made = self._known[key] = _Messages(nbytes, receives, sends, places(self._leaving), places(self._landing))
        return made

    def _forget(self) -> None:
        _free(messages.sends for messages in self._known.values())
        self._known.clear()


def _seal(message: Bytes) -> None:
    """Store the checksum of a message behind its mark, and its length."""
    seal = message[MARK_BYTES:SEALED_BYTES].view(np.uint64)
    seal[0], seal[1] = 0, message.size
    seal[0] = digest(message)


def _is_sealed(message: Bytes) -> bool:
    """Return whether a message of any length, at the beginning of this memory, has the checksum that was sent."""
    seal = message[MARK_BYTES:SEALED_BYTES].view(np.uint64)
    theirs, nbytes = seal.tolist()
    seal[0] = 0
    return bool(SEALED_BYTES <= nbytes <= message.size and theirs == digest(message[:nbytes]))


def _free(groups: Iterable[_Requests]) -> None:
    for request in chain.from_iterable(groups):
        if request is not None:
            request.Free()
