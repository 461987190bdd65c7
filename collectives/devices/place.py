"""Where arrays on devices are, and the memory of the host that they travel through."""

from __future__ import annotations

import numpy as np

from collectives.devices.device import Bytes, Device, Taken
from collectives.testable import Testable


class Place:
    """Where an array is.

    Parameters
    ----------
    device : Device
    taken : Taken
    nbytes : int
    """

    def __init__(self, device: Device, taken: Taken, nbytes: int) -> None:
        self.device = device
        self._span = range(taken.address, taken.address + nbytes)

    def is_same(self, other: Place) -> bool:
        """Whether two arrays are in the same place."""
        return (self.device.name, self._span) == (other.device.name, other._span)

    def overlaps(self, other: Place) -> bool:
        """Whether two arrays share memory."""
        first, second = self._span, other._span
        same = self.device.name == other.device.name
        return same and first.start < second.stop and second.start < first.stop


class Staging(Place):
    """An array on a device, and the memory of the host that it travels through where it does so as a whole.

    Parameters
    ----------
    device : Device
    taken : Taken
        Contiguous.
    nbytes : int

    Attributes
    ----------
    vector : tensor, 1-D
        The array, as PyTorch has it.
    host : uint8[nbytes], or [0] before `pin`
    """

    def __init__(self, device: Device, taken: Taken, nbytes: int) -> None:
        super().__init__(device, taken, nbytes)
        self.vector, self._nbytes = taken.vector, nbytes
        self.host: Bytes = np.empty(0, np.uint8)

    def pin(self) -> Bytes:
        """Take the memory, if that has not been done. Raises RuntimeError if there is none."""
        if not self.host.size:
            self.host = self.device.pinned(self._nbytes)
        return self.host

    def fetch(self) -> Testable | None:
        """Begin to overwrite the host's memory with the array."""
        return self.device.copy(self.vector, self.host)

    def deliver(self) -> Testable | None:
        """Begin to overwrite the array with the host's memory."""
        return self.device.copy(self.host, self.vector)
