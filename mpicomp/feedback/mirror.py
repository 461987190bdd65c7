"""Vectors that are on a device and on the host: where both are the host's memory, one array serves as both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from collectives.annotations import AnyArray, Array, Testable, Words
from collectives.arrays import Device, Landed

ALL = slice(None)


class Mirror:
    """A vector on a device, and memory of the host that parts of it are copied to and from.

    Parameters
    ----------
    device : Device
    there : vector[n] on the device

    Attributes
    ----------
    here : ndarray[n]
        Of the same type. On the host the same array; else pinned memory, undefined until something is copied to it.
    """

    def __init__(self, device: Device, there: Array) -> None:
        self._device, self.there = device, there
        if device.name == "cpu":
            self.here: AnyArray = there
        else:
            nbytes = there.numel() * there.element_size()
            self.here = device.pinned(nbytes).view(str(there.dtype).removeprefix("torch."))
        self._is_one = self.here is there

    @classmethod
    def of(cls, device: Device, values: AnyArray) -> Mirror:
        """Return a copy of an array of the host; kernels that are launched from now on find it on the device."""
        mirror = cls(device, device.zeros(values.size, values.dtype.name))
        mirror.send(values)
        return mirror

    def fetch(self, some: slice = ALL) -> Testable | None:
        """Start to copy from the device to the host."""
        return None if self._is_one else self._device.copy(self.there[some], self.here[some])

    def deliver(self, some: slice = ALL) -> Testable | None:
        """Start to copy from the host to the device."""
        return None if self._is_one else self._device.copy(self.here[some], self.there[some])

    def send(self, values: AnyArray) -> Testable | None:
        """Overwrite the host's memory and start to copy it to the device. Earlier copies must have ended."""
        self.here[:] = values
        return self.deliver()


class Packed:
    """A reducer's packed words, piece by piece, and their place on a device.

    Parameters
    ----------
    device : Device
    host : sequence of uint64[words of a piece]

    Attributes
    ----------
    pieces : list of int64 tensors
        On the host the reducer's own words.
    whole : int64 tensor
        The words of all pieces, one piece after the other; only on a device.
    """

    def __init__(self, device: Device, host: Sequence[Words]) -> None:
        self._host, self._on_host = list(host), device.name == "cpu"
        self.pieces: list[Array] = self._host
        if self._on_host:
            return
        self._starts = [*accumulate((words.size for words in host), initial=0)]
        self._mirror = Mirror(device, device.zeros(self._starts[-1], "int64"))
        self.whole = self._mirror.there
        self.pieces = [self.whole[start:stop] for start, stop in pairwise(self._starts)]

    def _place(self, piece: int, some: slice) -> slice:
        first, stop, _ = some.indices(self._host[piece].size)
        return slice(self._starts[piece] + first, self._starts[piece] + stop)

    def fetch(self, piece: int, some: slice = ALL) -> Testable | None:
        """Copy words of a piece to the reducer; returns a handle, or None where they are there."""
        if self._on_host:
            return None
        return Landed(self._mirror.fetch(self._place(piece, some)), partial(self._land, piece, some))

    def _land(self, piece: int, some: slice) -> None:
        self._host[piece][some] = self._mirror.here[self._place(piece, some)].view(np.uint64)

    def deliver(self, piece: int, some: slice = ALL) -> None:
        """Copy words of a piece from the reducer; kernels that are launched from now on find them."""
        if not self._on_host:
            place = self._place(piece, some)
            self._mirror.here[place] = self._host[piece][some].view(np.int64)
            self._mirror.deliver(place)
