"""Vectors that are on a device and on the host: where both are the host's memory, one array serves as both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from collectives.annotations import AnyArray, Array, Testable, Words, override
from collectives.arrays import Device, Landed

ALL = slice(None)
ALIGNMENT = 16  # words


class Mirror:
    """A vector, and memory of the host that parts of it are copied to and from: on the host the vector itself.

    Attributes
    ----------
    there : vector[n]
    here : ndarray[n]
        Of the same type; of a vector on a device pinned memory, undefined until something is copied to it.
    """

    def __init__(self, there: Array) -> None:
        self.there = there
        self.here: AnyArray = there

    def fetch(self, some: slice = ALL) -> Testable | None:
        """Start to copy from the device to the host."""
        return None

    def deliver(self, some: slice = ALL) -> Testable | None:
        """Start to copy from the host to the device."""
        return None

    def send(self, values: AnyArray) -> Testable | None:
        """Overwrite the host's memory and start to copy it to the device. Earlier copies must have ended."""
        self.here[:] = values
        return self.deliver()


class DeviceMirror(Mirror):
    """Mirror of a vector on a device."""

    def __init__(self, device: Device, there: Array) -> None:
        self._device, self.there = device, there
        nbytes = there.numel() * there.element_size()
        self.here = device.pinned(nbytes).view(str(there.dtype).removeprefix("torch."))

    @override
    def fetch(self, some: slice = ALL) -> Testable | None:
        return self._device.copy(self.there[some], self.here[some])

    @override
    def deliver(self, some: slice = ALL) -> Testable | None:
        return self._device.copy(self.here[some], self.there[some])


class Packed:
    """A reducer's packed words, piece by piece, and their place where signs are encoded: the same on the host.

    Attributes
    ----------
    pieces : list of int64 tensors
        On the host the reducer's own words.
    """

    def __init__(self, host: Sequence[Words]) -> None:
        self.pieces: list[Array] = list(host)

    def fetch(self, piece: int, some: slice = ALL) -> Testable | None:
        """Copy the head and words of a piece to the reducer; returns a handle, or None where they are there.

        The head crosses only together with the first word.
        """
        return None

    def deliver(self, piece: int, some: slice = ALL) -> None:
        """Copy words of a piece from the reducer; kernels that are launched from now on find them.

        The tail crosses with the last word of the last piece.
        """


class DevicePacked(Packed):
    """A reducer's packed words, piece by piece, and their place on a device.

    Parameters
    ----------
    device : Device
    host : sequence of uint64[words of a piece]
    heads : sequence of int, optional
        Words in front of each piece that cross to the host in one copy with it.
    tail : int
        Words behind the last piece that cross to the device in one copy with it.

    Attributes
    ----------
    heads : list of int64 tensors
        The words in front of each piece.
    heads_here : list of int64 arrays
        The same in the host's memory.
    starts : list of int
        Place of each piece's first word in `whole`.
    whole : int64 tensor
        The words of all pieces and their heads.
    tail, tail_here : int64 tensor, int64 array
        The words behind the last piece, there and in the host's memory.
    """

    def __init__(
        self, device: Device, host: Sequence[Words], heads: Sequence[int] | None = None, tail: int = 0
    ) -> None:
        self._host = list(host)
        heads = [0] * len(host) if heads is None else heads
        fronts = self._fronts = [size + size % 2 for size in heads]  # heads begin at multiples of 16 bytes
        # pieces begin at multiples of 128 bytes, which vector accesses ask for
        self.starts, end = list[int](), 0
        for words, front in zip(host, fronts, strict=True):
            self.starts.append(-(-(end + front) // ALIGNMENT) * ALIGNMENT)
            end = self.starts[-1] + words.size
        self._tail = slice(-(-end // ALIGNMENT) * ALIGNMENT, -(-end // ALIGNMENT) * ALIGNMENT + tail)
        self._mirror = DeviceMirror(device, device.zeros(self._tail.stop if tail else end, "int64"))
        self.whole, here = self._mirror.there, self._mirror.here
        self.tail, self.tail_here = self.whole[self._tail], here[self._tail]
        self._has_tail = tail > 0
        places = [(start - front, size) for start, front, size in zip(self.starts, fronts, heads, strict=True)]
        self._places = [slice(start, start + words.size) for start, words in zip(self.starts, host, strict=True)]
        self.pieces = [self.whole[place] for place in self._places]
        self.heads = [self.whole[at : at + size] for at, size in places]
        self.heads_here = [here[at : at + size] for at, size in places]

    def _place(self, piece: int, some: slice) -> slice:
        first, stop, _ = some.indices(self._host[piece].size)
        return slice(self.starts[piece] + first, self.starts[piece] + stop)

    @override
    def fetch(self, piece: int, some: slice = ALL) -> Testable | None:
        place = self._places[piece] if some is ALL else self._place(piece, some)
        if place.start == self.starts[piece]:
            place = slice(place.start - self._fronts[piece], place.stop)
        return Landed(self._mirror.fetch(place), partial(self._land, piece, some))

    def _land(self, piece: int, some: slice) -> None:
        place = self._places[piece] if some is ALL else self._place(piece, some)
        self._host[piece][some] = self._mirror.here[place].view(np.uint64)

    @override
    def deliver(self, piece: int, some: slice = ALL) -> None:
        place = self._places[piece] if some is ALL else self._place(piece, some)
        self._mirror.here[place] = self._host[piece][some].view(np.int64)
        is_last = self._has_tail and piece == len(self._host) - 1
        self._mirror.deliver(slice(place.start, self._tail.stop) if is_last else place)

    def deliver_tail(self) -> None:
        """Copy the tail alone from the host's memory."""
        self._mirror.deliver(self._tail)
