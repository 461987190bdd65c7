"""Places of arrays on devices, the memory of the host that they travel through, and copies under way."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from collectives.annotations import Bytes, Testable, override
from collectives.arrays.device import Device, Taken

PATIENCE_S = 600.0


class Place:
    """Memory that an array occupies on a device."""

    def __init__(self, device: Device, taken: Taken, nbytes: int) -> None:
        self.device = device
        self._span = range(taken.address, taken.address + nbytes)

    def is_same(self, other: Place) -> bool:
        """Return True if two arrays occupy the same memory."""
        return (self.device.name, self._span) == (other.device.name, other._span)

    def overlaps(self, other: Place) -> bool:
        """Return True if two arrays share memory."""
        first, second = self._span, other._span
        same = self.device.name == other.device.name
        return same and first.start < second.stop and second.start < first.stop


class Staging(Place):
    """A contiguous array on a device, and the memory of the host that it travels through where it does so as a whole.

    `vector` is the array as a tensor of PyTorch, `host` the memory of as many bytes, or of none before `pin`.
    """

    def __init__(self, device: Device, taken: Taken, nbytes: int) -> None:
        super().__init__(device, taken, nbytes)
        self.vector, self._nbytes = taken.vector, nbytes
        self.host: Bytes = np.empty(0, np.uint8)

    def pin(self) -> Bytes:
        """Return the host's memory, allocated at the first call. Raises RuntimeError if the allocation fails."""
        if not self.host.size:
            self.host = self.device.pinned(self._nbytes)
        return self.host

    def fetch(self) -> Testable | None:
        """Begin to overwrite the host's memory with the array."""
        return self.device.copy(self.vector, self.host)

    def deliver(self) -> Testable | None:
        """Begin to overwrite the array with the host's memory."""
        return self.device.copy(self.host, self.vector)


class Landed(Testable):
    """A copy to the host's memory, followed by a function of the caller.

    `then` is called once, even if it raises or more tests follow. A copy of None is there already.
    """

    __slots__ = ("_copy", "_then")

    def __init__(self, copy: Testable | None, then: Callable[[], object]) -> None:
        self._copy = copy
        self._then: Callable[[], object] | None = then

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        if self._then is None:
            return True
        if self._copy is not None and not self._copy.Test():
            return False
        then, self._then = self._then, None
        then()
        return True


def after_copy(copy: Testable | None, then: Callable[[], object]) -> Testable | None:
    """Call `then` once a copy is there: at once, and return None, where the device has made it already."""
    if copy is not None:
        return Landed(copy, then)
    then()
    return None


def wait(copy: Testable | None) -> None:
    """Wait for a copy outside of calls, as for a state; None is a copy that is there already.

    Raises
    ------
    RuntimeError
        The device does not come to it.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (copy is None or copy.Test()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the device has not come to a copy in {PATIENCE_S:g} s")
        time.sleep(0)
