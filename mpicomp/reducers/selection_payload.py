"""Payloads of all ranks for the signs of winners: all ranks draw the same winner of each element."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.annotations import Array, Testable, Words, override
from collectives.arrays import Device
from collectives.arrays.elements import aligned_empty
from collectives.execution.payload import MessageMemory, Payload
from mpicomp.codecs.shared_selection import Selection
from mpicomp.feedback.mirror import Packed
from mpicomp.reducers.sign_merge import BRIEF_ELEMENTS
from mpicomp.step import Work


class SelectionPayload(Payload):
    """Payloads of all ranks, with the signs of the elements that each rank wins.

    Memory: W bits per element for payloads, and at most 0.71 bits per element for the winners. A device draws the
    winners, and picks and places signs; only payloads cross to the host.

    Parameters
    ----------
    device : Device
    selection : Selection
        Codec, bound to the device's kernels.
    rank : int
    cuts : tuple of range

    Attributes
    ----------
    words : list of uint64[ranks, words]
        Payload of each rank by pieces, in the host's memory.
    bits : uint64[ceil(n / 64)]
        This rank's signs, then the first winners'; an int64 tensor on a device.
    second : like bits, or None
        Signs of the second winners, if there are any.
    """

    receive_buffers = 0
    _encode_signs: Work
    _decode_signs: Work

    def __init__(self, device: Device, selection: Selection, rank: int, cuts: tuple[range, ...]) -> None:
        codec, self._device, self._on_host = selection.codec, device, device.name == "cpu"
        self._selection, self._rank, self._size, self._cuts = selection, rank, codec.ranks, cuts
        self.brief = not cuts or cuts[-1].stop <= BRIEF_ELEMENTS
        where = None if self._on_host else device
        self._winners = [selection.reserve(len(cut), where) for cut in cuts]
        self.words = [aligned_empty(self._size * w.words, np.uint64).reshape(self._size, -1) for w in self._winners]
        size = -(-cuts[-1].stop // 64) if cuts else 0
        self.bits, self.second = self._zeros(size), self._zeros(size) if codec.votes == 2 else None
        votes = [vote for vote in (self.bits, self.second) if vote is not None]
        self._votes = [[vote[cut.start // 64 : -(-cut.stop // 64)] for vote in votes] for cut in cuts]
        self._packed = Packed(device, [words.reshape(-1) for words in self.words])
        self._drawn = [-1] * len(cuts)  # step whose winners a piece has
        self._missing, self._counting = [self._size] * len(cuts), threading.Lock()
        self._step = 0

    def _zeros(self, words: int) -> Array:
        if not self._on_host:
            return self._device.zeros(words, "int64")
        zeros = aligned_empty(words, np.uint64)
        zeros[:] = 0
        return zeros

    def begin(self, step: int, encode: Work, decode: Work) -> None:
        """Start another step, with its winners."""
        self._step, self._encode_signs, self._decode_signs = step, encode, decode
        self._missing = [self._size] * len(self._cuts)

    def end(self) -> None:
        """Drop the references to the feedback, which would keep it alive in a cycle."""
        del self._encode_signs, self._decode_signs

    def draw(self, step: int) -> None:
        """Draw the winners of all pieces."""
        for k in range(len(self._cuts)):
            self._launch_draw(k, step)

    def _launch_draw(self, k: int, step: int) -> None:
        if self._on_host:
            self._draw(k, step)
        else:
            self._device.run(partial(self._draw, k, step))

    def _draw(self, k: int, step: int) -> None:
        if self._drawn[k] != step:
            self._selection.draw(self._winners[k], step, self._cuts[k].start)
            self._drawn[k] = step

    def mine(self, k: int) -> Words:
        """Return this rank's payload of a piece."""
        payload: Words = self.words[k][self._rank]
        return payload

    @override
    def encode(self, piece: int) -> Testable | None:
        k = piece % len(self._cuts)
        self._encode_signs(k)
        self._launch_draw(k, self._step)
        winners, signs = self._winners[k], self._votes[k][0]
        mine = slice(self._rank * winners.words, (self._rank + 1) * winners.words)
        payload = self._packed.pieces[k][mine]
        if self._on_host:
            self._selection.encode(signs, self._rank, winners, payload)
            return None
        self._device.run(partial(self._selection.encode, signs, self._rank, winners, payload))
        return self._packed.fetch(k, mine)

    @override
    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        origin, k = divmod(piece, len(self._cuts))
        row = self.words[k][origin]
        return [row, row.nbytes, MPI.BYTE]

    replacing = outgoing

    @override
    def finish(self, piece: int) -> Testable | None:
        k = piece % len(self._cuts)
        with self._counting:
            self._missing[k] -= 1
            complete = not self._missing[k]
        if not complete:  # signs are placed once the last rank's payload is there
            return None
        self._packed.deliver(k)
        if self._on_host:
            self._place(k)
        else:
            self._device.run(partial(self._place, k))
        return self._decode_signs(k)

    def _place(self, k: int) -> None:
        winners = self._winners[k]
        self._selection.decode(self._packed.pieces[k], winners.words, winners, self._votes[k])
